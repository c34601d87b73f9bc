"""Preflight checks before a run allocates memory: `zero=auto` is resolved, and runs that cannot fit are refused.

    tier    needed (`estimate/memory.py`)    available to one rank
    device  fullest moment of a step         GPU: its memory; CPU: its part of host memory, within every limit
    host    offloaded states                 its part of host memory, within every limit
    disk    scratch files                    its part of the free space at the paths it uses (`offload/disk_nodes.py`)

A run is refused if it needs more than the machine has, without any margin, because it would surely fail. A warning is
given if it needs more than is free now, or leaves less than the headroom of `estimate/search.py`. Nothing is measured
here, and no device is touched.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from operator import attrgetter

import torch

from dzero.config import RunConfig
from dzero.errors import RunError, user_errors
from dzero.estimate.candidates import ACCUMULATE, Candidate
from dzero.estimate.forecast import FRAGMENTS, Tier, tiers_of
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.memory import StepMemory, memory_of
from dzero.estimate.microbatch_costs import STATES_ALONE
from dzero.estimate.search import fitting, short_bytes
from dzero.hardware import (
    device_memory_bytes,
    format_bytes,
    host_available_bytes,
    host_memory_bytes,
    multiplies_fp8,
)
from dzero.launch.devices import device_type
from dzero.models.config import SHAPES
from dzero.offload.disk_nodes import by_node, nodes_of_local_ranks
from dzero.optim.build import check_options, owned_states
from dzero.overrides import tell, typed_keys
from dzero.plan.auto import candidates_of, resolve_auto, subject_of
from dzero.plan.meta_model import as_on_a_rank, costs_for, model_of, pipeline_stages_of, units_of
from dzero.plan.plan_run import MANY_LAYERS, announce_long_layout
from dzero.plan.run_layout import check_tokenizer, layout_of, ranks_of, settled, workers_of
from dzero.plan.search_tables import words
from dzero.utils.launched import launched, local_rank, local_ranks
from dzero.utils.scratch_paths import make_folder
from dzero.zero.offload_config import KINDS, DiskConfig, OffloadConfig

SUGGESTED = LARGEST = 3
HOPELESS = 64
"""Sizes above this multiple of the available memory are refused before a model of them is laid out."""
MORE = "block.loss_tiles and block.tiles make logits and activations smaller, more ranks everything that is sharded"
LINGER_S = 2.0
LEAST_IDS = 1


class UnforeseenError(Exception):
    """Error for a model whose memory cannot be predicted; the message has the reason."""


def prepare_run(config: RunConfig, given: Sequence[str]) -> tuple[RunConfig, int]:
    """Return the resolved configuration, and the number of workers that this machine starts (0 under torchrun)."""
    config = resolve_run(config, given)
    return config, 0 if launched() else workers_of(config)


def resolve_run(config: RunConfig, given: Sequence[str]) -> RunConfig:
    """Return the configuration that will be trained, with settings `given` as `key=value`; RunError if it cannot fit.

    Settings of presets give way to those `given`, and are told. Under torchrun all ranks reach the same result, and the
    first rank of each node reports it.
    """
    try:
        with user_errors():
            config, gave_way = settled(config, typed_keys(given))
            tell(gave_way)
            given = [*given, *(way.word for way in gave_way)]
            check_options(config.optim)
            check_tokenizer(config)
            check_scratch(config.offload)
            if config.launch.check_memory:
                check_least(config)
            announce_long_layout(config)
            config = resolve_auto(config, given)
            check_scratch(config.offload)  # zero=auto may have chosen disk
            if config.launch.check_memory:
                check_memory(config)
    except RunError:
        if local_rank() == 0:
            raise
        time.sleep(LINGER_S)  # torchrun ends all ranks once one exits, so rank 0, which reports, exits first
        sys.exit(1)
    return config


def check_memory(config: RunConfig) -> None:
    """Raise RunError if a run needs more of a tier than this machine has, and warn if it comes near."""
    try:
        memory = needed(config)
    except UnforeseenError as error:
        _warn(f"memory was not checked: {error}")
        return
    here = this_machine(config, host_memory_bytes())
    ranks = layout_of(config, device_type(config.launch)).world
    tiers = tiers_of(memory, here, ranks)
    if lacking := {name: sure for name, tier in tiers.items() if (sure := _surely(tier)).short_bytes}:
        raise RunError(_refusal(config, here, lacking))
    now = this_machine(config, host_available_bytes())
    for name, tier in tiers_of(memory, now, ranks).items():
        if tier.capacity_bytes is not None and short_bytes({name: tier}):
            needs, free = format_bytes(tier.total_bytes), format_bytes(tier.capacity_bytes)
            _warn(
                f"the {name} will be nearly full, or too small: each rank needs about {needs} of {free} that are free"
            )


def check_least(config: RunConfig) -> None:
    """Raise RunError if simple arithmetic shows that the sizes cannot fit, before a model of them is laid out.

    A rank has at least its share of 16-bit parameters and one hidden state of its part of a microbatch.
    """
    if config.model.kind not in SHAPES:
        return
    shape, mesh, train = config.model.shape(config.model.vocab_size or LEAST_IDS), config.mesh, config.train
    ranks = ranks_of(config) * mesh.tp * mesh.pp
    sequences = 1 if config.auto else train.microbatch_sequences  # zero=auto may choose smaller microbatches
    tokens, hidden = sequences * train.sequence_tokens // (mesh.cp * mesh.tp), "a hidden state of the microbatch"
    least = {"parameters": 2 * shape.params // ranks, hidden: 2 * tokens * shape.hidden_size}
    here = this_machine(config, host_memory_bytes())
    beside = 0 if here.devices_are_host else here.host_bytes or 0
    if config.auto or "disk" in map(config.offload.tier, KINDS):
        beside += here.disk_bytes or 0
    has = {"parameters": here.device_bytes + beside, hidden: here.device_bytes}
    quick = shape.layers <= MANY_LAYERS  # to lay out, which gives the user sizes by kind and settings that fit
    for what, needs in least.items():
        if needs > (HOPELESS if quick else 1) * has[what]:
            raise RunError(
                f"this run cannot fit this machine, so it was not started: {what} alone would take "
                f"{format_bytes(needs)} of the {format_bytes(has[what])} that each rank has; make the sizes of model "
                "or train smaller, or take more ranks. launch.check_memory=false starts it all the same"
            )


def needed(config: RunConfig) -> StepMemory:
    """Return the memory that a rank needs; offloaded activations are not predicted and therefore not counted.

    UnforeseenError is raised for a model that does not run on fake tensors. It may train all the same.
    """
    if config.mesh.stages_per_rank > 1:
        raise UnforeseenError(f"what mesh.pp_schedule={config.mesh.pp_schedule} holds at once is not foreseen")
    return max(
        (_needed(config, part) for part in pipeline_stages_of(config)), key=lambda memory: memory.peak.total_bytes
    )


def _needed(config: RunConfig, part: int) -> StepMemory:
    layout, model = layout_of(config, device_type(config.launch)), model_of(config)
    try:
        with as_on_a_rank(config, model, part) as rank:
            units = units_of(config, model, rank)
            foreseen = config.offload.activations == "device"
            has_fp8 = multiplies_fp8(device_type(config.launch))
            costs = STATES_ALONE
            if foreseen:
                costs = costs_for(config, model, rank, layout.microbatches, has_fp8=has_fp8)
    except RunError:  # mesh.tp does not divide the model, so no run could start
        raise
    except Exception as error:
        raise UnforeseenError(f"{type(error).__name__}: {error}") from error
    return memory_of(layout, units, costs, device_type(config.launch), owned_states(config.optim))


def this_machine(config: RunConfig, host_bytes: int) -> HardwareConfig:
    """Return this machine's capacities without measuring: the smallest device, `host_bytes`, and free scratch space."""
    local = local_ranks() if launched() else workers_of(config)
    kind = device_type(config.launch)
    may_use_disk = config.offload.uses_disk or config.auto  # zero=auto may choose it
    devices = [device_memory_bytes(torch.device(kind, index)) for index in range(local)] if kind == "cuda" else []
    return HardwareConfig.of_sizes(
        "this machine",
        kind,
        local,
        device_bytes=min(devices, default=host_bytes // local),
        host_bytes=host_bytes,
        disk_bytes=scratch_bytes(config.offload.disk, local, kind) if may_use_disk else None,
    )


def check_scratch(offload: OffloadConfig) -> None:
    """Create the last folder of each scratch path if it is missing; raises DiskError if a path cannot be used."""
    if offload.uses_disk:
        for path in offload.disk.paths:
            make_folder(path)


def scratch_bytes(disk: DiskConfig, local_ranks: int, device_type: str) -> int:
    """Return the free scratch space of this machine, of which each rank can use its part.

    If ranks use the paths of their memory node, the node with the least space for each of its ranks decides.
    """
    nodes = nodes_of_local_ranks(local_ranks, beside_gpu=device_type == "cuda")
    near = by_node(disk, nodes)
    if not near:
        return free_bytes(disk.paths)
    return min(free_bytes(part.paths) * local_ranks // nodes.count(node) for node, part in near.items())


def free_bytes(paths: Sequence[str]) -> int:
    """Return the free bytes of the disks at `paths`, counting each disk once."""
    disks = {os.stat(path).st_dev: shutil.disk_usage(path).free for path in paths}
    return sum(disks.values())


def _surely(tier: Tier) -> Tier:
    """Return the tier without the margin for fragmentation."""
    return replace(tier, kinds={kind: count for kind, count in tier.kinds.items() if kind != FRAGMENTS})


def _refusal(config: RunConfig, here: HardwareConfig, lacking: Mapping[str, Tier]) -> str:
    lines = ["this run cannot fit this machine, so it was not started:"]
    for name, tier in lacking.items():
        kinds = sorted(tier.kinds, key=lambda kind: -tier.kinds[kind])[:LARGEST]
        stages = ", ".join(f"{kind} {format_bytes(tier.kinds[kind])}" for kind in kinds)
        need, has, short = map(format_bytes, (tier.total_bytes, tier.capacity_bytes or 0, tier.short_bytes))
        lines.append(f"  on the {name} each rank needs {need} of {has}: {short} short (most of it: {stages})")
    would = suggestions(config, here)
    lines.append(
        f"would fit: {' | '.join(would)}" if would else f"no stage, tier, recomputation or microbatch would fit; {MORE}"
    )
    lines.append("launch.check_memory=false starts it all the same")
    return "\n".join(lines)


def suggestions(config: RunConfig, here: HardwareConfig) -> list[str]:
    """Return a few settings that would fit with headroom: those with the fewest changes, simplest first."""
    if config.offload.activations != "device":
        return []
    candidates = candidates_of(config, (), here)
    now = {key: attrgetter(key)(config) for key in candidates[0].settings}
    now[ACCUMULATE] = config.train.microbatches(ranks_of(config))

    def changes(candidate: Candidate) -> int:
        return len({key.partition(".")[0] for key, value in candidate.settings.items() if value != now[key]})

    fit = fitting(sorted(candidates, key=changes), subject_of(config, here))
    for _, alike in groupby(fit, key=lambda each: changes(each.candidate)):
        return [words(each.candidate.settings, now) for each in islice(alike, SUGGESTED)]
    return []


def _warn(line: str) -> None:
    if local_rank() == 0:
        print(f"warning: {line}", file=sys.stderr)

"""Resolution of `zero=auto` into settings for given hardware, which need not be this machine.

searched settings   those of `estimate/candidates.py` that are not given
given settings      keep their values: on the command line (a group gives all its settings), or not the default
sequences per step  keep their number: train.accumulate follows the microbatch. Giving one of the two fixes both;
                    train.global_sequences=N with train.accumulate=null leaves both free
ranks               each decides on its own from the same figures, so all choose alike
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from dzero.config import RunConfig, with_settings
from dzero.errors import RunError
from dzero.estimate.candidates import ACCUMULATE, MICROBATCH, STAGE, Candidate, Settings, space
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.microbatch_costs import MicrobatchCosts
from dzero.estimate.search import Ranking, Subject, search
from dzero.models.build import flops_per_token
from dzero.optim.build import owned_states
from dzero.plan.meta_model import as_on_a_rank, costs_for, model_of, units_of
from dzero.plan.plan_run import check_foreseen, hardware_of
from dzero.plan.run_layout import layout_of, ranks_of
from dzero.plan.search_tables import headline, nothing_fits
from dzero.utils.launched import launched, local_ranks


@dataclass(frozen=True, kw_only=True)
class AutoChoice:
    """Resolved run, and the choice in one `line`; `defaults` lacks the stage, so that `line` always reports it."""

    config: RunConfig
    ranking: Ranking
    defaults: Settings
    line: str


def choose(config: RunConfig, given: Sequence[str]) -> AutoChoice:
    """Choose the settings that `zero=auto` stands for, apart from those `given` on the command line, as `key=value`.

    RunError is raised if nothing fits, activations are offloaded, the run is a pipeline, or the hardware of several
    nodes is not given, so that ranks could choose differently.
    """
    check_foreseen(config)
    hardware = _hardware(config)
    defaults = {key: default_of(config, key) for key in next(space(1)) if key != STAGE}
    ranking = search(candidates_of(config, given_settings(config, given), hardware), subject_of(config, hardware))
    if not ranking.best:
        raise RunError(nothing_fits(ranking, defaults))
    best = ranking.best[0]
    resolve_auto = with_choice(config, best.candidate.settings)
    return AutoChoice(config=resolve_auto, ranking=ranking, defaults=defaults, line=headline(best, defaults))


def resolve_auto(config: RunConfig, given: Sequence[str]) -> RunConfig:
    """Return `config` with `zero=auto` resolved; rank 0 prints the choice. Raises like `choose`."""
    if not config.auto:
        return config
    choice = choose(config, given)
    if os.environ.get("RANK", "0") == "0":
        print(choice.line, flush=True)
    return choice.config


def subject_of(config: RunConfig, hardware: HardwareConfig) -> Subject:
    """Return the model and hardware that candidates are evaluated on."""
    ranks, model = ranks_of(config), model_of(config)
    flops = flops_per_token(model, config.train.sequence_tokens)
    with as_on_a_rank(config, model) as rank:
        units = units_of(config, model, rank)
    return Subject(
        units=units,
        costs=partial(_costs, config, hardware.fp8_flops is not None),
        hardware=hardware,
        step_tokens=config.train.sequences(config.mesh.readers(ranks)) * config.train.sequence_tokens,
        model_flops=flops,
        owned=owned_states(config.optim),
    )


def candidates_of(config: RunConfig, fixed: Collection[str], hardware: HardwareConfig) -> list[Candidate]:
    """Return every possible combination of the settings that are not `fixed`, simplest first; RunError if none is."""
    readers = config.mesh.readers(ranks_of(config))
    sequences = config.train.sequences(readers) // readers
    distinct = dict.fromkeys(
        tuple((key, value) for key, value in each.items() if key not in fixed) for each in space(sequences)
    )
    candidates, why = [], ""
    for simplicity, settings in enumerate(dict(each) for each in distinct):
        try:
            run = with_choice(config, settings)
            layout = layout_of(run, hardware.device_type)
        except ValueError as error:
            why = why or str(error)
            continue
        candidates.append(
            Candidate(
                settings=settings,
                layout=layout,
                recompute=run.block.activation_checkpoint,
                microbatch=run.train.microbatch_sequences,
                simplicity=simplicity,
            )
        )
    if not candidates:
        raise RunError(f"zero=auto: what is given leaves no choice: {why}")
    return candidates


def given_settings(config: RunConfig, given: Sequence[str]) -> set[str]:
    """Return the searched settings that keep their values: those that are not defaults, or are on the command line.

    A stage that a preset such as adapter=qlora sets is searched, since `zero=auto` asks for one.
    """
    keys = {line.lstrip("+~").partition("=")[0] for line in given} - {"zero"}
    searched = next(space(1))
    found = {key for key in searched if key != STAGE and attrgetter(key)(config) != default_of(config, key)}
    found |= {key for key in searched if any(key == each or key.startswith(f"{each}.") for each in keys)}
    found |= {f"{key}_fraction" for key in found if f"{key}_fraction" in searched}
    if config.train.accumulate is None:
        found.discard(ACCUMULATE)
    return found | {MICROBATCH, ACCUMULATE} if found & {MICROBATCH, ACCUMULATE} else found


def default_of(config: RunConfig, key: str) -> Any:
    """Return the default of `group.name`."""
    group, _, name = key.partition(".")
    return getattr(type(getattr(config, group)), name)


def with_choice(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return the run with chosen values of some settings; raises ValueError like the dataclasses.

    What is given of scratch disks, in case they are chosen, is left out if they are not.
    """
    run = with_settings(config, settings, auto=False)
    return replace(run, offload=run.offload.without_idle())


def _costs(config: RunConfig, has_fp8: bool, recompute: str, microbatch: int) -> MicrobatchCosts:
    """Return the costs of a microbatch of `microbatch` sequences."""
    block = replace(config.block, activation_checkpoint=recompute)
    train = replace(config.train, microbatch_sequences=microbatch, accumulate=1, global_sequences=None)
    return costs_for(replace(config, block=block, train=train), has_fp8=has_fp8)


def _hardware(config: RunConfig) -> HardwareConfig:
    if config.hardware is None and launched() and int(os.environ["WORLD_SIZE"]) != local_ranks():
        raise RunError(
            "zero=auto on several nodes: each would decide by figures of its own; name the nodes, hardware=NODE "
            "(conf/hardware; python -m dzero hardware prints this machine as a file for it)"
        )
    return hardware_of(config)

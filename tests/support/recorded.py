"""Named runs of the table, made from outside, through what `import dzero` offers: each once per session of tests.

`recorded(pool, "stage 3, all on disk")` gives what one may ask of the run: losses, norms and loss scales of its steps,
parameters, masters and moments at the end, what its ranks sent and keep, where, and what the formulas say of that, the
table and the schedule that it prints, what it warned of, and the files of a checkpoint. `counts` and `bits` are what
tests/golden.json keeps of it, and `oracle` trains the same without dzero.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import reference
import small_decoders
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from training_loops import states_of, step, whole

import dzero
from dzero import testing

LR, CLIP = 3e-3, 0.5
SCALE = {"init": 2.0**19, "growth_interval": 2, "hysteresis": 1}
"""So high that the first steps of fp16 overflow, and growing within the run."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STATES = ("param", "grad", "master", "moments")


@dataclass(frozen=True)
class Run:
    """Settings as `dzero.shard` takes them; what is not said is as in a bf16 run of `even` on two ranks."""

    stage: int = 2
    net: str = "even"
    ranks: int = 2
    replicate: int = 1
    microbatches: int = 1
    steps: int = 3
    rule: str = "adamw"
    precision: dict[str, Any] = field(default_factory=dict)
    offload: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    scale: dict[str, Any] = field(default_factory=lambda: SCALE)


def off(tier: str, *states: str, **more: Any) -> dict[str, Any]:
    """Some states, or all, on a tier."""
    return dict.fromkeys(states or STATES, tier) | more


def _runs() -> dict[str, Run]:
    every = {f"stage {stage}": Run(stage=stage) for stage in range(4)}
    found = dict(every)
    for name, run in every.items():
        found |= {
            f"{name}, {dtype}": replace(run, precision={"param": dtype}, steps=5 if dtype == "fp16" else 3)
            for dtype in ("fp32", "fp16")
        }
        found[f"{name}, 4 microbatches"] = replace(run, microbatches=4, net="uneven")
        found[f"{name}, remainders"] = replace(run, precision={"master": "remainder"}, net="tied")
        found[f"{name}, frozen"] = replace(run, net="frozen", microbatches=2)
        found[f"{name}, 4 ranks"] = replace(run, ranks=4, net="uneven")
        found[f"{name}, moments of 8 bits"] = replace(run, precision={"moments": "int8"})
    stages = {stage: replace(every[f"stage {stage}"], net="uneven") for stage in (1, 2, 3)}
    for stage, run in stages.items():
        found |= {
            f"stage {stage}, replicas": replace(run, ranks=4, replicate=2),
            f"stage {stage}, sums in fp32": replace(run, precision={"reduce": "fp32"}, microbatches=2),
            f"stage {stage}, torch's sums": replace(run, zero={"reduction": "native"}),
            f"stage {stage}, moments on the host": replace(run, offload=off("host", "master", "moments")),
            f"stage {stage}, moments on disk": replace(run, offload=off("disk", "master", "moments")),
            f"stage {stage}, half on the host": replace(
                run, offload=off("host", "master", "moments", master_fraction=0.5, moments_fraction=0.5)
            ),
            f"stage {stage}, Muon": replace(run, rule="muon", net="even"),
            f"stage {stage}, SGD": replace(run, rule="sgd"),
        }
    three = stages[3]
    for tier in ("host", "disk"):
        found[f"stage 3, all on {tier}"] = replace(three, offload=off(tier))
        for overlap in ("step", "forward", "backward", "delayed"):
            given = off(tier, overlap=overlap, **({"delay_warmup_steps": 1} if overlap == "delayed" else {}))
            found[f"stage 3, all on {tier}, {overlap}"] = replace(three, offload=given, microbatches=2)
    found |= {
        "stage 3, gathered once": replace(three, zero={"reshard_after_forward": False}, microbatches=2),
        "stage 3, int8 gathers": replace(three, precision={"gather": "int8"}),
        "stage 3, int8 sums": replace(three, precision={"reduce": "int8"}),
        "stage 3, in parts": replace(three, zero={"unit_bytes": 6000}),
        "stage 3, frozen in 4 bits": replace(three, net="frozen", precision={"frozen": "nf4"}),
        "stage 3, products in fp8": replace(three, net="even", precision={"compute": "fp8_rowwise"}),
    }
    return found


RUNS = _runs()


class Record(NamedTuple):
    """What rank 0 tells of a run, but where a list has an item per rank; traffic is of the last step."""

    norms: list[float | None]  # of each step; None where the step was skipped
    scales: list[float]  # loss scale of each step
    states: dict[str, dict[str, Tensor]]  # of each parameter, whole: `value`, and all that the optimizer keeps of it
    table: str  # what the handle prints
    schedule: list[str]  # lines of the offload schedule
    warned: list[str]
    files: dict[str, str]  # digests of what the ranks wrote into a checkpoint at the end; the manifest has the time
    losses: list[list[float]]  # of each rank, of each step
    sent: list[dict[str, list[int]]]  # of each rank: calls and bytes by phase, kind, axis and dtype
    expected: list[dict[str, list[int]]]  # the same by the formulas
    kept: list[dict[str, int]]  # of each rank: bytes of parameters and of each state, between steps
    resting: list[dict[str, int]]  # of each rank: bytes by kind, by the formulas
    tiers: list[dict[str, int]]  # of each rank: bytes on the device, on the host and on disk


OF_RANKS = ("losses", "sent", "expected", "kept", "resting", "tiers")
_made: dict[str, Record] = {}


def recorded(pool: Pool, name: str) -> Record:
    """The run of this name; it is made when it is first asked for."""
    if name not in _made:
        run = RUNS[name]
        with TemporaryDirectory() as folder:
            of_ranks = pool.run(train, run.ranks, run, folder)
        together = {key: [each[key] for each in of_ranks] for key in OF_RANKS}
        _made[name] = Record(**{**of_ranks[0], **together})
    return _made[name]


def train(rank: int, ranks: int, run: Run, folder: str) -> dict[str, Any]:
    """The worker's side."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = _trained(rank, ranks, run, folder)
    return found | {"warned": [f"{each.category.__name__}: {each.message}" for each in warned]}


def made(
    run: Run,
    folder: str = "",
    *,
    offload: dzero.OffloadConfig | None = None,
    device: str = "cpu",
    change: Callable[[nn.Module], object] | None = None,
) -> tuple[dzero.Sharded, Any]:
    """The net on all ranks, and its optimizer.

    offload: instead of the run's, whose disk is in `folder`. change: what is done to the net before.
    """
    model = small_decoders.build(run.net)
    if change is not None:
        change(model)
    if offload is None:
        disk = {"disk": dzero.DiskConfig(paths=[folder], block_bytes=8192)} if "disk" in run.offload.values() else {}
        offload = dzero.OffloadConfig(**run.offload, **disk)
    sharded = dzero.shard(
        model,
        dzero.ZeroConfig(stage=run.stage, **run.zero),
        precision=dzero.PrecisionConfig(**run.precision),
        offload=offload,
        mesh=dzero.make_mesh(device, replicate=run.ranks if run.stage == 0 else run.replicate),
        microbatches=run.microbatches,
    )
    given = {"lr": LR, "max_norm": CLIP, "scaler": dzero.ScalerConfig(**run.scale)}
    if run.rule == "sgd":
        return sharded, dzero.TorchOptimizer(sharded, torch.optim.SGD, momentum=0.9, **given)
    return sharded, {"adamw": dzero.AdamW, "muon": dzero.Muon}[run.rule](sharded, **given)


def batches_of(run: Run) -> list[list[list[Tensor]]]:
    return small_decoders.batches(run.net, steps=run.steps, ranks=run.ranks, microbatches=run.microbatches)


def _trained(rank: int, ranks: int, run: Run, folder: str) -> dict[str, Any]:
    sharded, optim = made(run, folder)
    schedule, steps = testing.schedule(optim), []
    for of_step in batches_of(run):
        sharded.ledger.take()
        steps.append(step(sharded, optim, of_step[rank]))
    losses, norms, scales = (list(each) for each in zip(*steps, strict=True))
    optim.synchronize()
    sent = _by_words(sharded.ledger.take())
    expected = _by_words(testing.expected_traffic(sharded) | testing.expected_decision(sharded) | optim.traffic)
    states = states_of(sharded, optim)
    kept: dict[str, int] = {}
    for of_param in states.values():
        for key, value in of_param.items():
            kept[key] = kept.get(key, 0) + testing.local(value).nbytes
    with dzero.Checkpointer(dzero.CheckpointConfig(folder=f"{folder}/saved"), sharded, optim) as checkpoints:
        checkpoints.save(run.steps, extra={})
        checkpoints.finish()
    dist.barrier()
    return {
        "losses": [sum(loss.item() for loss in of_step) for of_step in losses],
        "norms": norms,
        "scales": scales,
        "states": {name: {key: whole(value) for key, value in each.items()} for name, each in states.items()},
        "sent": sent,
        "expected": expected,
        "kept": kept,
        "resting": testing.resting_bytes(sharded),
        "tiers": testing.bytes_on_tiers(optim),
        "schedule": schedule,
        "table": repr(sharded).replace(folder, "FOLDER"),
        "files": files_of(Path(folder, "saved")) if rank == 0 else {},
    }


def _by_words(sent: Mapping[testing.Entry, testing.Traffic]) -> dict[str, list[int]]:
    return {
        " ".join((entry.phase, entry.kind, entry.axis, entry.dtype)): [traffic.calls, traffic.sent_bytes]
        for entry, traffic in sent.items()
    }


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: digest(path.read_bytes()) for path in sorted(folder.rglob("rank_*"))}


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def digest_of(tensors: dict[str, Tensor]) -> str:
    """One digest of tensors by name, their dtypes, shapes and bits."""
    found = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {[*tensor.shape]}".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def counts(record: Record) -> dict[str, Any]:
    """What golden.json has of a run that no processor and no release of torch changes."""
    schedule = "\n".join(record.schedule)
    kept = {"sent": record.sent, "kept": record.kept, "tiers": record.tiers}
    return kept | {"table": digest(record.table.encode()), "schedule": digest(schedule.encode())}


def bits(record: Record) -> dict[str, Any]:
    """What golden.json has of a run whose bits are those of products and sums of this torch on this processor."""
    keys = sorted({key for of_param in record.states.values() for key in of_param})
    return {
        "losses": digest(np.array(record.losses).tobytes()),
        "norms": [None if norm is None else float(norm).hex() for norm in record.norms],
        "states": {key: digest_of({n: s[key] for n, s in record.states.items() if key in s}) for key in keys},
        "files": digest(json.dumps(record.files, sort_keys=True).encode()),
    }


FOLLOWED = {"param", "master", "reduce"}
"""Settings of precision that the oracle knows; what moves in codes, or is summed by the backend, is not to the bit."""


def has_oracle(run: Run) -> bool:
    """Whether reference.py does the arithmetic of the run."""
    exact = run.precision.get("reduce") != "int8" and "reduction" not in run.zero
    return exact and run.rule == "adamw" and run.precision.keys() <= FOLLOWED and run.replicate == 1


def oracle(run: Run, model: Callable[[], nn.Module] | None = None) -> reference.History:
    """The same run without dzero, to the bit; its first moments are `exp_avg`, its second ones `exp_avg_sq`.

    model: makes the net, instead of the run's.
    """
    working, several = DTYPES[run.precision.get("param", "bf16")], run.microbatches > 1
    delayed = run.offload.get("overlap") == "delayed"
    return reference.train(
        model or (lambda: small_decoders.build(run.net)),
        batches_of(run),
        small_decoders.loss_fn,
        lrs=[LR] * run.steps,
        numerics=reference.Numerics(
            working=working,
            wire=torch.float32 if "reduce" in run.precision else working,
            grad=torch.float32 if several else working,
            early=run.stage >= 2 and several,
        ),
        clip=CLIP,
        loss_scale=reference.LossScale(**run.scale) if working == torch.float16 else None,
        sum_squares=reference.sum_squares_in_lanes,
        delay_after=run.offload["delay_warmup_steps"] if delayed else None,
    )


def arithmetic(rank: int, ranks: int) -> str:
    """A digest of how plain torch trains the nets here, without dzero: equal where the bits of runs can be compared."""
    found = {}
    for net in small_decoders.SHAPES:
        for name, dtype in DTYPES.items():
            model: nn.Module = small_decoders.build(net).to(dtype)
            for of_step in small_decoders.batches(net, steps=2, ranks=1, microbatches=1):
                small_decoders.loss_fn(model, of_step[0][0]).backward()  # type: ignore[no-untyped-call]
            found |= {f"{net} {name} {key}": p.grad for key, p in model.named_parameters() if p.grad is not None}
    return digest_of(found)

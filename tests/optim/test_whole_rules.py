"""Rules that mix the elements of a parameter train on shards as in one process, to the bit, and over what tp cuts.

A rule gets whole parameters on the ranks that own them, so its own reductions add in the same order as in one process.
Of a matrix that tensor parallelism cuts, the owners of its parts gather and update the whole. What Muon alone promises
is in test_muon.py.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import decoders
import plain_classes
import pytest
import torch
from on_ranks import on_ranks
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from training_loops import masters_of, params_of, sharded_net, train, unequal

import dzero
from dzero.testing import Traffic, by_phase, local

STEPS = 2


class Rule(NamedTuple):
    """A class and its settings; the oracle gives it the whole parameters of one process."""

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]


RULES = {
    "LAMB": Rule(plain_classes.Lamb, {"lr": 0.05, "weight_decay": 0.1}),
    "Adafactor": Rule(torch.optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1}),
    "Shampoo": Rule(plain_classes.Shampoo, {"lr": 0.05, "weight_decay": 0.1}),
}


def optimizer(sharded: Any, name: str, **settings: Any) -> Any:
    if name == "Muon":
        return dzero.Muon(sharded, lr=3e-3, scaler=dzero.ScalerConfig(init=256.0), **settings)
    rule = RULES[name]
    return dzero.TorchOptimizer(sharded, rule.kind, elementwise=False, **rule.options, **settings)


def ends_of(sharded: dzero.Sharded, optim: Any) -> dict[str, Tensor]:
    """Whole parameters and masters, and this rank's part of the rule's states."""
    found = {**params_of(sharded), **{f"{name} master": each for name, each in masters_of(sharded, optim).items()}}
    for name, param in sharded.named_params().items():
        for key, value in optim.state.get(param, {}).items():
            if isinstance(value, Tensor) and key not in ("master", "remainder"):
                found[f"{name} {key}"] = local(value).clone()
    return found


def at_stages(rank: int, ranks: int, name: str, cells: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Whole parameters after `STEPS` steps, clipped unless a cell says otherwise."""
    found = []
    for cell in cells:
        clip = cell.pop("clip", 0.5)
        sharded = sharded_net("uneven", **cell)
        sharded.ledger.collective_log.check = ranks == 2
        optim = optimizer(sharded, name, max_norm=clip)
        train(sharded, optim, "uneven", steps=STEPS)
        found.append(params_of(sharded))
    return found


CELLS = [(3, "fp32", None), (2, "bf16", None), (0, "bf16", 0.5), (3, "bf16", 0.5)]
"""Stage, dtype and norm to clip to."""
ASKED_FIRST = "tests/optim/test_whole_rules.py::test_every_stage_has_the_bits_of_one_process"


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("name", RULES)
def test_every_stage_has_the_bits_of_one_process(pool: Pool, name: str) -> None:
    """Unclipped, as norms add in another order; and clipped, where all stages agree."""
    cells = [{"stage": stage, "param": param, "clip": clip} for stage, param, clip in CELLS]
    found = pool.run(at_stages, 2, name, cells)[0]
    of_kind: dict[tuple[str, float | None], list[dict[str, Tensor]]] = {}
    for (_, param, clip), params in zip(CELLS, found, strict=True):
        of_kind.setdefault((param, clip), []).append(params)
    for (param, clip), alike in of_kind.items():
        assert all(unequal(each, alike[0]) == [] for each in alike), (param, clip)
        if clip is None:
            want = plain_classes.train(*RULES[name], precision=param, steps=STEPS, clip=None)
            assert unequal(alike[0], want) == [], param


@pytest.mark.full(ASKED_FIRST)
@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_replicas_of_hybrid_sharding_stay_replicas(pool: Pool, name: str) -> None:
    """Each replica of two shards has its own owners."""
    cells = [{"stage": stage, "replicate": 2, "param": "bf16"} for stage in (2, 3)]
    runs = pool.run(at_stages, 4, name, cells)
    assert all(unequal(each, runs[0][0]) == [] for of_rank in runs for each in of_rank)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("kind", [{"moments": "bf16"}, {"param": "fp16"}], ids=str)
def test_muon_has_the_same_bits_in_other_dtypes(pool: Pool, kind: dict[str, str]) -> None:
    """Moments in bf16 are rounded at random; fp16 gradients are scaled."""
    first, other = pool.run(at_stages, 2, "Muon", [{"stage": stage, **kind} for stage in (0, 3)])[0]
    assert unequal(first, other) == []


HOST = {"grad": "host", "master": "host", "moments": "host"}
TIERS: dict[str, dict[str, Any]] = {
    "all": HOST,
    "within the step": {**HOST, "overlap": "step"},
    "gradients": {"grad": "host"},
    "masters": {"master": "host"},
    "moments": {"moments": "host"},
    "half": {**HOST, "master_fraction": 0.5, "moments_fraction": 0.5},
    "parameters too": {"param": "host", **HOST},
    "disk": {"grad": "host", "master": "disk", "moments": "disk"},
}
Cell = tuple[str, dict[str, Any]]


def off_the_device(rank: int, ranks: int, name: str, cells: list[Cell], folder: Path) -> list[str]:
    """What differs from states on the device in losses, parameters, states and traffic."""
    wrong = []
    for where, kind in cells:
        runs = []
        disk = {"disk": dzero.DiskConfig(paths=[str(folder)])} if where == "disk" else {}
        for offload in (None, dzero.OffloadConfig(**TIERS[where], **disk)):
            sharded = sharded_net("uneven", offload=offload, **kind)
            optim = optimizer(sharded, name, max_norm=0.5)
            losses = train(sharded, optim, "uneven", steps=STEPS)
            optim.synchronize()
            runs.append({"losses": torch.tensor(losses), **ends_of(sharded, optim)})
            sent, due = (by_phase(each).get("update", Traffic()) for each in (sharded.ledger.take(), optim.traffic))
            if (sent.calls, sent.sent_bytes) != (STEPS * due.calls, STEPS * due.sent_bytes):
                wrong.append(f"{where}: {sent} for {STEPS} times {due}")
        wrong += [f"{where} {kind}: {key}" for key in unequal(*runs)]
    return wrong


FIRST_CELL: Cell = ("parameters too", {"stage": 3})
MORE_CELLS: list[Cell] = [
    ("half", {"stage": 1}),
    ("all", {"stage": 2, "param": "fp32"}),
    ("all", {"stage": 0}),
    ("gradients", {"stage": 2}),
    ("within the step", {"stage": 3, "param": "fp32"}),
]
OF_MUON: list[Cell] = [
    ("parameters too", {"stage": 3, "microbatches": 2}),
    ("masters", {"stage": 1}),
    ("disk", {"stage": 0, "param": "fp32"}),
    ("moments", {"stage": 2, "moments": "bf16"}),
    ("half", {"stage": 3, "master": "remainder"}),
    ("disk", {"stage": 3, "param": "fp16"}),
    ("all", {"stage": 2, "moments": "int8"}),
]


@pytest.mark.parametrize("name", ["LAMB", "Muon"])
def test_states_off_the_device_change_no_bit(pool: Pool, tmp_path: Path, name: str) -> None:
    assert pool.run(off_the_device, 2, name, [FIRST_CELL], tmp_path) == [[], []]


@pytest.mark.full("tests/optim/test_whole_rules.py::test_states_off_the_device_change_no_bit")
@pytest.mark.parametrize("name", [*RULES, "Muon"])
def test_states_off_the_device_change_no_bit_at_any_stage(pool: Pool, tmp_path: Path, name: str) -> None:
    cells = MORE_CELLS + (OF_MUON if name == "Muon" else [])
    assert pool.run(off_the_device, 2, name, cells, tmp_path) == [[], []]


class Cut(nn.Module):
    """Two layers of two matrices each, which tp cuts between rows and columns, behind an embedding that it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 8)]) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for up, down in self.layers:
            x = x + down(torch.relu(up(x)))
        return x


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """`dp` x `tp` ranks. offload: of gradients, masters and moments."""

    dp: int = 2
    tp: int = 2
    stage: int = 0
    offload: str = "device"


def sharded_cut(run: Parallel) -> dzero.Sharded:
    torch.manual_seed(0)
    mesh = dzero.make_mesh("cpu", replicate=run.dp if run.stage == 0 else 1, tp=run.tp)
    plan: dict[str, Any] = {"layers.*.0": ColwiseParallel(), "layers.*.1": RowwiseParallel()}
    how = dzero.ParallelConfig(tensor_plan=plan, replicated=["embed.*"])
    model = dzero.parallelize(Cut(), mesh, how) if run.tp > 1 else Cut()
    tiers = dzero.OffloadConfig(**dict.fromkeys(HOST, run.offload))
    return dzero.shard(model, dzero.ZeroConfig(stage=run.stage), precision="fp32", offload=tiers, mesh=mesh)


def matrix_rule(sharded: dzero.Sharded, rule: str) -> Any:
    if rule == "muon":
        return dzero.Muon(sharded, muon=dzero.MuonConfig(lr=0.02, compute="fp32"), lr=1e-3, max_norm=0.5)
    return dzero.TorchOptimizer(sharded, torch.optim.Adafactor, lr=1e-2, max_norm=0.5)


def trained(rank: int, ranks: int, run: Parallel, rule: str, folder: str = "", first: int = 0, last: int = 3) -> Any:
    """Whole parameters after steps `first` to `last`, and how cut ones were gathered along tp.

    folder: resume from what is there, and save at the end.
    """
    sharded = sharded_cut(run)
    optim = matrix_rule(sharded, rule)
    checkpoints = dzero.Checkpointer(dzero.CheckpointConfig(folder=folder), sharded, optim) if folder else None
    if checkpoints is not None and first:
        checkpoints.resume("auto")
    for step in range(first, last):
        tokens = torch.randint(16, (run.dp, 3, 5), generator=torch.Generator().manual_seed(step))[rank // run.tp]
        (sharded.model(tokens) - 1.0).square().mean().backward()
        sharded.ledger.take()
        optim.step()
        optim.synchronize()
        sent = sharded.ledger.take()
        assert {entry: each for entry, each in sent.items() if entry.phase == "update"} == optim.traffic
    if checkpoints is not None:
        checkpoints.save(last, {})
        checkpoints.finish()
    return params_of(sharded), [entry.kind for entry in optim.traffic if entry.axis == "tp"]


def far(found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).norm() / value.norm()) for name, value in want.items())


EVERY_STAGE = [Parallel(stage=3), Parallel(stage=1, offload="host"), Parallel(offload="host")]
WHOLE = "tests/optim/test_whole_rules.py::test_cut_matrices_are_updated_whole"


@pytest.mark.parametrize(
    ("dp", "runs"),
    [(1, [Parallel(dp=1)]), pytest.param(2, EVERY_STAGE, marks=pytest.mark.full(WHOLE))],
    ids=["one", "every stage"],
)
@pytest.mark.parametrize("rule", ["muon", "Adafactor"])
def test_cut_matrices_are_updated_whole(pool: Pool, rule: str, dp: int, runs: list[Parallel]) -> None:
    """Forward sums along tp in another order, hence a tolerance; parts that are updated alone are far from it.

    Stages and tiers have the same bits.
    """
    want, _ = pool.run(trained, dp, Parallel(dp=dp, tp=1), rule)[0]
    ends = []
    for run in runs:
        (found, along), *others = pool.run(trained, 2 * dp, run, rule)
        assert along == ["all_gather"]
        assert far(found, want) < 1e-4
        assert all(unequal(each, found) == [] for each, _ in others)
        ends.append(found)
    assert all(unequal(each, ends[0]) == [] for each in ends)


@pytest.mark.full(WHOLE)
@pytest.mark.parametrize("rule", ["Adafactor", "muon"])
def test_their_states_load_on_another_mesh(pool: Pool, tmp_path: Path, rule: str) -> None:
    straight, _ = pool.run(trained, 4, Parallel(stage=3), rule)[0]
    pool.run(trained, 4, Parallel(stage=3), rule, f"{tmp_path}/saved", 0, 2)
    shutil.copytree(tmp_path / "saved", tmp_path / "other")
    again, _ = pool.run(trained, 4, Parallel(stage=1, offload="host"), rule, f"{tmp_path}/saved", 2)[0]
    assert unequal(again, straight) == []
    alone, _ = pool.run(trained, 2, Parallel(tp=1, stage=2), rule, f"{tmp_path}/other", 2)[0]
    assert far(alone, straight) < 1e-4


@pytest.mark.full("tests/optim/test_muon.py::test_mistakes_are_told_with_their_repair")
@pytest.mark.parametrize("rule", ["muon", "Adafactor"])
@on_ranks(2)
def test_matrices_with_several_results_side_by_side_are_refused(rank: int, ranks: int, rule: str) -> None:
    model = decoders.of_transformers("gpt2", on="cpu")
    sharded = dzero.shard(dzero.parallelize(model, dzero.make_mesh("cpu", tp=2)), dzero.ZeroConfig(stage=1))
    with pytest.raises(ValueError, match=rf"optim\.rule={rule}.*cut in several places.*take mesh\.tp=1"):
        matrix_rule(sharded, rule)

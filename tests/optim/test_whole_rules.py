"""Rules that mix the elements of a parameter train on shards as in one process, to the bit, and over what tp cuts.

A rule gets whole parameters on the ranks that own them, so its own reductions add in the same order as in one process.
Of a matrix that tensor parallelism cuts, the owners of its parts gather and update the whole.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import plain_classes
import pytest
import torch
from pool import Pool
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from training_loops import params_of, sharded_net, train, unequal

import dzero
from dzero.testing import by_phase, local

STEPS = 2


class Rule(NamedTuple):
    """A class and its settings; the oracle gives it the whole parameters of one process."""

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]


RULES = {
    "Adafactor": Rule(torch.optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1}),
    "LAMB": Rule(plain_classes.Lamb, {"lr": 0.05, "weight_decay": 0.1}),
    "Shampoo": Rule(plain_classes.Shampoo, {"lr": 0.05, "weight_decay": 0.1}),
}


def optimizer(sharded: Any, name: str, **settings: Any) -> dzero.TorchOptimizer:
    rule = RULES[name]
    return dzero.TorchOptimizer(sharded, rule.kind, elementwise=False, **rule.options, **settings)


def at_stages(rank: int, ranks: int, name: str, cells: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Whole parameters after `STEPS` steps, clipped unless a cell says otherwise."""
    found = []
    for cell in cells:
        clip, net = cell.pop("clip", 0.5), cell.pop("net", "uneven")
        sharded = sharded_net(net, **cell)
        sharded.ledger.collective_log.check = ranks == 2
        optim = optimizer(sharded, name, max_norm=clip)
        train(sharded, optim, net, steps=STEPS)
        found.append(params_of(sharded))
    return found


CELLS = [(0, "fp32", None), (3, "fp32", None), (2, "bf16", None), *((stage, "bf16", 0.5) for stage in (0, 1, 3))]
"""Stage, dtype and norm to clip to."""


def test_every_stage_has_the_bits_of_one_process(pool: Pool) -> None:
    check(pool, "LAMB", [CELLS[1], *CELLS[-2:]])


@pytest.mark.full("tests/optim/test_whole_rules.py::test_every_stage_has_the_bits_of_one_process")
@pytest.mark.parametrize("name", RULES)
def test_every_stage_has_the_bits_of_one_process_full_product(pool: Pool, name: str) -> None:
    check(pool, name, CELLS)


def check(pool: Pool, name: str, chosen: list[tuple[int, str, float | None]]) -> None:
    """Unclipped, as norms add in another order; and clipped, where all stages agree."""
    cells = [{"stage": stage, "param": param, "clip": clip} for stage, param, clip in chosen]
    found = pool.run(at_stages, 2, name, cells)[0]
    of_kind: dict[tuple[str, float | None], list[dict[str, torch.Tensor]]] = {}
    for (_, param, clip), params in zip(chosen, found, strict=True):
        of_kind.setdefault((param, clip), []).append(params)
    for (param, clip), alike in of_kind.items():
        assert all(unequal(each, alike[0]) == [] for each in alike), (param, clip)
        if clip is None:
            rule = RULES[name]
            want = plain_classes.train(rule.kind, rule.options, precision=param, steps=STEPS, clip=None)
            assert unequal(alike[0], want) == [], param


@pytest.mark.full("tests/optim/test_whole_rules.py::test_every_stage_has_the_bits_of_one_process")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("net", ["uneven", "tied", "frozen"])
def test_four_ranks_have_the_same_bits_at_every_stage(pool: Pool, name: str, net: str) -> None:
    """Shards of some ranks are empty."""
    cells = [{"stage": stage, "net": net, "param": "fp32", "clip": None} for stage in range(4)]
    found = pool.run(at_stages, 4, name, cells)[0]
    rule = RULES[name]
    want = plain_classes.train(rule.kind, rule.options, precision="fp32", steps=STEPS, clip=None, net=net, ranks=4)
    assert [unequal(each, want) for each in found] == [[]] * len(cells)


@pytest.mark.full("tests/optim/test_whole_rules.py::test_every_stage_has_the_bits_of_one_process")
def test_replicas_of_hybrid_sharding_stay_replicas(pool: Pool) -> None:
    """Each replica of two shards has its own owners."""
    cells = [{"stage": 3, "replicate": 2, "param": "bf16"}]
    runs = pool.run(at_stages, 4, "Adafactor", cells)
    assert all(unequal(each, runs[0][0]) == [] for of_rank in runs for each in of_rank)


HOST = {
    "all": dzero.OffloadConfig(grad="host", master="host", moments="host"),
    "within the step": dzero.OffloadConfig(master="host", moments="host", overlap="step"),
    "gradients": dzero.OffloadConfig(grad="host"),
    "half": dzero.OffloadConfig(grad="host", master="host", moments="host", master_fraction=0.5, moments_fraction=0.5),
    "parameters too": dzero.OffloadConfig(param="host", grad="host", master="host", moments="host"),
}


def on_the_host(rank: int, ranks: int, name: str, cells: list[tuple[int, str, str]]) -> list[str]:
    """What differs from the device in parameters, losses and traffic."""
    wrong = []
    for stage, param, where in cells:
        ends: list[dict[str, torch.Tensor]] = []
        for offload in (None, HOST[where]):
            sharded = sharded_net("uneven", stage=stage, param=param, offload=offload)
            optim = optimizer(sharded, name, max_norm=0.5)
            losses = train(sharded, optim, "uneven", steps=2)
            optim.synchronize()
            ends.append({"losses": torch.tensor(losses), **params_of(sharded)})
            for owner, value in sharded.named_params().items():
                kept = {key: each for key, each in optim.state.get(value, {}).items() if isinstance(each, torch.Tensor)}
                ends[-1] |= {f"{owner} {key}": local(each).clone() for key, each in kept.items()}
            sent, due = by_phase(sharded.ledger.take())["update"], by_phase(optim.traffic)["update"]
            if (sent.calls, sent.sent_bytes) != (2 * due.calls, 2 * due.sent_bytes):
                wrong.append(f"{where}: {sent} for twice {due}")
        wrong += [f"{stage} {param} {where}: {key}" for key in unequal(*ends)]
    return wrong


ON_HOST = [(3, "bf16", "parameters too"), (1, "bf16", "half"), (2, "fp32", "all")]
ON_HOST += [(0, "bf16", "all"), (2, "bf16", "gradients"), (3, "fp32", "within the step")]


def test_states_on_the_host_change_no_bit(pool: Pool) -> None:
    assert pool.run(on_the_host, 2, "LAMB", ON_HOST[:1]) == [[], []]


@pytest.mark.full("tests/optim/test_whole_rules.py::test_states_on_the_host_change_no_bit")
@pytest.mark.parametrize("name", RULES)
def test_states_on_the_host_change_no_bit_full_product(pool: Pool, name: str) -> None:
    assert pool.run(on_the_host, 2, name, ON_HOST) == [[], []]


class Cut(nn.Module):
    """Two layers of two matrices each, which tp cuts between rows and columns, behind an embedding that it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 8)]) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(tokens)
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
    model = (
        dzero.parallelize(Cut(), mesh, dzero.ParallelConfig(tensor_plan=plan, replicated=["embed.*"]))
        if run.tp > 1
        else Cut()
    )
    tiers = dzero.OffloadConfig(grad=run.offload, master=run.offload, moments=run.offload)
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
        assert {
            entry: each for entry, each in sharded.ledger.take().items() if entry.phase == "update"
        } == optim.traffic
    if checkpoints is not None:
        checkpoints.save(last, {})
        checkpoints.finish()
    return params_of(sharded), [entry.kind for entry in optim.traffic if entry.axis == "tp"]


def far(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - value).norm() / value.norm()) for name, value in want.items())


@pytest.mark.parametrize("rule", ["muon", "Adafactor"])
def test_cut_matrices_are_updated_whole(pool: Pool, rule: str) -> None:
    check_cut(pool, rule, 1, [Parallel(dp=1)])


@pytest.mark.full("tests/optim/test_whole_rules.py::test_cut_matrices_are_updated_whole")
@pytest.mark.parametrize("rule", ["muon", "Adafactor"])
def test_cut_matrices_are_updated_whole_at_every_stage(pool: Pool, rule: str) -> None:
    check_cut(pool, rule, 2, [Parallel(stage=3), Parallel(stage=1, offload="host"), Parallel(offload="host")])


def check_cut(pool: Pool, rule: str, dp: int, runs: list[Parallel]) -> None:
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


@pytest.mark.full("tests/optim/test_whole_rules.py::test_cut_matrices_are_updated_whole")
@pytest.mark.parametrize("rule", ["Adafactor", "muon"])
def test_their_states_load_on_another_mesh(pool: Pool, tmp_path: Path, rule: str) -> None:
    straight, _ = pool.run(trained, 4, Parallel(stage=3), rule)[0]
    pool.run(trained, 4, Parallel(stage=3), rule, f"{tmp_path}/saved", 0, 2)
    shutil.copytree(tmp_path / "saved", tmp_path / "other")
    again, _ = pool.run(trained, 4, Parallel(stage=1, offload="host"), rule, f"{tmp_path}/saved", 2)[0]
    assert unequal(again, straight) == []
    alone, _ = pool.run(trained, 2, Parallel(tp=1, stage=2), rule, f"{tmp_path}/other", 2)[0]
    assert far(alone, straight) < 1e-4


def fused(rank: int, ranks: int, rule: str) -> str:
    import transformers  # which takes seconds

    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    sharded = dzero.shard(dzero.parallelize(model, dzero.make_mesh("cpu", tp=2)), dzero.ZeroConfig(stage=1))
    with pytest.raises(ValueError, match="cut in several places") as error:
        matrix_rule(sharded, rule)
    return str(error.value)


@pytest.mark.full("tests/optim/test_muon.py::test_mistakes_are_told_with_their_repair")
@pytest.mark.parametrize("rule", ["muon", "Adafactor"])
def test_matrices_with_several_results_side_by_side_are_refused(pool: Pool, rule: str) -> None:
    told = pool.run(fused, 2, rule)[0]
    assert f"optim.rule={rule}" in told
    assert "take mesh.tp=1" in told

"""Muon beside AdamW trains as plain single-process training does, with the same bits at every stage.

Between stages not a bit differs. The oracle's products add in another order, so a parameter may end away from its own
by a small part of how far it has moved: 4e-6 was seen after 20 steps in fp32; in bf16, whose last place may round
otherwise in every step, up to 0.044. Tiers, copies and cuts are asked in test_whole_rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import reference
import small_decoders
import torch
from dispatch_counter import DispatchCounter
from many_cells import of_all
from on_ranks import on_ranks
from parity_cells import DTYPES, master_of, same_numbers, whole
from pool import Pool
from reference_muon import Muon as PlainMuon
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from training_loops import backward, sharded_net, snapshot, unequal

import dzero
from dzero.testing import Entry, Traffic

STEPS, LR, CLIP = 3, 3e-3, 0.5
TOLERANCE = {"fp32": 3e-5, "bf16": 0.1}


@dataclass(frozen=True)
class Run:
    """Four runs, one per stage. `every`: each 2-D parameter is Muon's, gains of one row and embeddings too."""

    net: str
    ranks: int
    precision: str
    microbatches: int
    every: bool = False
    master: str = "fp32"

    @property
    def names(self) -> list[str]:
        """Muon's parameters."""
        named = small_decoders.build(self.net).named_parameters()
        trained = {name: tuple(p.shape) for name, p in named if p.requires_grad and p.ndim == 2}
        return [n for n, shape in trained.items() if self.every or (n.startswith("layers.") and min(shape) > 1)]


RUNS = [
    Run("uneven", 2, "fp32", 1),
    Run("even", 2, "bf16", 2),
    Run("uneven", 2, "bf16", 1, every=True, master="remainder"),
    Run("uneven", 4, "fp32", 1, every=True),
    Run("tied", 2, "bf16", 1),
    Run("frozen", 4, "fp32", 2),
]


def optimizer(sharded: dzero.Sharded, run: Run) -> dzero.Muon:
    groups = None
    if run.every:
        named = {name: p for name, p in sharded.named_params().items() if p.requires_grad}
        groups = [
            {"params": [p for name, p in named.items() if name in run.names], "rule": "muon"},
            {"params": [p for name, p in named.items() if name not in run.names]},
        ]
    return dzero.Muon(sharded, groups, lr=LR, max_norm=CLIP)


def stages(rank: int, ranks: int, run: Run) -> list[dict[str, Any]] | None:
    """`STEPS` steps at each stage; what rank 0 has at the end."""
    results = []
    for stage in range(4):
        kinds = {"param": run.precision, "master": run.master}
        sharded = sharded_net(run.net, stage=stage, microbatches=run.microbatches, **kinds)
        sharded.ledger.collective_log.check = run.ranks == 2
        optim, norms = optimizer(sharded, run), list[float]()
        for of_step in small_decoders.batches(run.net, steps=STEPS, ranks=ranks, microbatches=run.microbatches):
            backward(sharded, optim, of_step[rank])
            optim.step()
            norms.append(optim.last_decision.norm)
        named = sharded.named_params()
        states = {name: optim.state[p] for name, p in named.items() if p in optim.state}
        assert {n for n, s in states.items() if "exp_avg_sq" not in s} == {*run.names}
        result = {"norms": norms, "params": {name: whole(p) for name, p in named.items()}}
        result["masters"] = {name: master_of(named[name], each) for name, each in states.items()}
        keys = ("exp_avg", "exp_avg_sq")
        result["moments"] = {f"{n}.{k}": whole(s[k]) for n, s in states.items() for k in keys if k in s}
        results.append(result)
    return results if rank == 0 else None


@cache
def oracle(run: Run, early: bool) -> reference.History:
    working = DTYPES[run.precision]
    plain = PlainMuon(dtype=torch.bfloat16 if run.precision == "bf16" else torch.float32)
    return reference.train(
        lambda: small_decoders.build(run.net),
        small_decoders.batches(run.net, steps=STEPS, ranks=run.ranks, microbatches=run.microbatches),
        small_decoders.loss_fn,
        lrs=[LR] * STEPS,
        numerics=reference.Numerics(
            working=working, wire=working, grad=torch.float32 if run.microbatches > 1 else working, early=early
        ),
        clip=CLIP,
        rules=dict.fromkeys(run.names, plain),
        adamw=reference.AdamW(beta2=0.95, weight_decay=0.1),
    )


def moved(run: Run, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """By parameter: how far it is from the oracle's, over how far that has moved."""
    start = dict(small_decoders.build(run.net).named_parameters())
    return {name: float((got[name] - want[name]).norm() / (want[name] - start[name].detach()).norm()) for name in want}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_stages_have_the_same_bits_and_follow_the_oracle(pool: Pool, run: Run) -> None:
    with ThreadPoolExecutor(1) as beside:
        both = {early: beside.submit(oracle, run, early) for early in {False, run.microbatches > 1}}
        results = pool.run(stages, run.ranks, run, timeout_s=300)[0]
    alike = [(0, 1, 2, 3)] if run.microbatches == 1 else [(0, 1), (2, 3)]
    for first, *others in alike:
        for other in others:
            assert same_numbers(results[first]["norms"], results[other]["norms"])
            for kind in ("params", "masters", "moments"):
                assert unequal(results[first][kind], results[other][kind]) == []
        want = both[first > 1].result()
        far = moved(run, results[first]["masters"], want.masters)
        assert max(far.values()) < TOLERANCE[run.precision], far


def beside_torch(rank: int, ranks: int, muon: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """Three steps beside torch.optim.Muon, given our gradients; the largest difference over the largest movement."""
    sharded = sharded_net("uneven", stage=2, param="fp32")
    optim = dzero.Muon(sharded, muon=dzero.MuonConfig(compute="bf16", **muon), lr=0.02, weight_decay=0.1)
    named = {n: p for n, p in sharded.named_params().items() if "exp_avg_sq" not in optim.state[p]}
    plain = {name: torch.nn.Parameter(whole(p)) for name, p in named.items()}
    start = {name: p.detach().clone() for name, p in plain.items()}
    judge = torch.optim.Muon([*plain.values()], lr=0.02, weight_decay=0.1, **theirs)
    for of_step in small_decoders.batches("uneven", steps=3, ranks=1, microbatches=1):
        backward(sharded, optim, of_step[0])
        for name, grad in optim.gradients.named().items():
            if name in plain:
                plain[name].grad = grad.view(plain[name].shape).clone()
        optim.step()
        judge.step()
    off = max(float((whole(p) - plain[name]).detach().norm()) for name, p in named.items())
    return off, min(float((p.detach() - start[name]).norm()) for name, p in plain.items())


def test_matrices_move_as_torch_muon_moves_them(pool: Pool) -> None:
    """Up to a last place of bf16 for each of five iterations: torch mixes momentum by one fused operation."""
    fitting = {"adjust_lr_fn": "match_rms_adamw"}
    still = {"momentum": 0.8, "nesterov": False}
    settings: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"scale": "original"}, {"adjust_lr_fn": "original"}),
        (still, still | fitting),
        ({"iterations": 3}, {"ns_steps": 3} | fitting),
    ]
    for off, moved_least in of_all(pool, 1, beside_torch, settings):
        assert off < 5 * 2**-8 * moved_least


class Branching(nn.Module):
    """One block, of which the second of three matrices is used where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({name: nn.Linear(6, 6) for name in ("one", "two", "three")})])

    def forward(self, x: torch.Tensor, *, second: bool) -> torch.Tensor:
        (block,) = self.layers
        x = block["one"](x)
        return block["three"]((block["two"](x) if second else x).tanh())


def without(rank: int, ranks: int) -> tuple[list[str], list[str]]:
    """What changed in a step with all matrices, and in one without the second."""
    torch.manual_seed(0)
    sharded = dzero.shard(Branching(), dzero.ZeroConfig(stage=2))
    sharded.ledger.collective_log.check = True
    optim, changes = dzero.Muon(sharded, lr=LR), []
    for second in (True, False):
        before = snapshot(sharded, optim)
        sharded.model(torch.full((2, 6), rank + 1.0).bfloat16(), second=second).float().square().sum().backward()
        optim.step()
        changes.append(unequal(snapshot(sharded, optim), before))
    return changes[0], changes[1]


def test_matrices_without_a_gradient_stay_what_they_are(pool: Pool) -> None:
    for both, one in pool.run(without, 2):
        of_second = {f"layers.0.two.weight{key}" for key in ("", ".master", ".exp_avg", ".step")}
        assert of_second <= {*both}
        assert of_second.isdisjoint(one)
        assert {each.replace("two", "one") for each in of_second} <= {*one}


ON_HOST = {"grad": "host", "master": "host", "moments": "host"}


def step_traffic(rank: int, ranks: int, stage: int, param: str) -> dict[Entry, Traffic]:
    """What a step's update moved by the ledger, which must be the formula's, and by the auditor below it."""
    sharded = sharded_net("uneven", stage=stage, param=param)
    optim = dzero.Muon(sharded, max_norm=1.0)
    backward(sharded, optim, small_decoders.batches("uneven", steps=1, ranks=ranks, microbatches=1)[0][rank])
    sharded.ledger.take()
    with DispatchCounter(ranks) as counter:
        optim.step()
    moved = {entry: traffic for entry, traffic in sharded.ledger.take().items() if entry.phase == "update"}
    assert moved == optim.traffic
    assert counter.sent_bytes["send"] == sum(traffic.sent_bytes for traffic in moved.values())
    return moved


def test_the_bytes_written_out(pool: Pool) -> None:
    """Three blocks of qkv [45, 15], out [15, 15], up [21, 15] and down [15, 21], so costs of 23625, 10125 and twice
    12825. Dealt in that order to whoever has least:

        rank 0   qkv 0, qkv 2, up 1, up 2, out 0, out 2
        rank 1   qkv 1, up 0, down 0, down 1, down 2, out 1
    """
    qkv, out, up, down = 23 * 15, 8 * 15, 11 * 15, 8 * 21  # elements of a shard, padded to 2 ranks
    own = [2 * qkv + 2 * up + 2 * out, qkv + up + 3 * down + out]
    for rank, moved in enumerate(pool.run(step_traffic, 2, 3, "bf16")):
        sent = own[1 - rank] + own[rank]  # shards to the other's owner, and those that the other needs of its own
        assert moved == {Entry("update", "all_to_all", "shard", "bfloat16"): Traffic(2, 2 * sent)}
    whole = [2 * 45 * 15 + 2 * 21 * 15 + 2 * 15 * 15, 45 * 15 + 4 * 21 * 15 + 15 * 15]
    for rank, moved in enumerate(pool.run(step_traffic, 2, 0, "fp32")):
        assert moved == {Entry("update", "all_gather", "replicate", "float32"): Traffic(1, 4 * whole[rank])}


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"momentum": 1.0}, "optim.muon.momentum=1.0: must be a number in [0, 1)"),
    ({"lr": -1.0}, "optim.muon.lr=-1.0: must be a number in [0, 1e+06], or null"),
    ({"iterations": 0}, "optim.muon.iterations=0: must be a whole number ≥ 1"),
    ({"scale": "big"}, "optim.muon.scale='big': choose one of ['rms', 'original']"),
    ({"compute": "fp16"}, "optim.muon.compute='fp16': choose auto, fp32 or bf16"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_settings_that_do_not_fit_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        dzero.MuonConfig(**settings)


def tiled(stage: int) -> dzero.Sharded:
    model = small_decoders.build("even")
    dzero.tile(model.layers[0].get_submodule("up"), 2)
    return dzero.shard(model, dzero.ZeroConfig(stage=stage))


def cut_by_tp() -> dzero.Sharded:
    """Of two layers and a norm, tp cuts the first layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    plan = dzero.ParallelConfig(tensor_plan={"0": ColwiseParallel()}, replicated=["1.*", "2.*"])
    return dzero.shard(dzero.parallelize(model, dzero.make_mesh("cpu", tp=2), plan), dzero.ZeroConfig(stage=0))


@on_ranks(2)
def test_mistakes_are_told_with_their_repair(rank: int, ranks: int) -> None:
    even, cut = sharded_net("even", stage=2), cut_by_tp()
    early = sharded_net("even", stage=2, offload=dzero.OffloadConfig(**ON_HOST, overlap="backward"))
    every = [param for param in even.named_params().values() if param.requires_grad]
    nothing, torchs = dzero.MuonConfig(exclude=["layers", "head"]), partial(dzero.TorchOptimizer, lr=0.1)
    refused: list[tuple[str, Callable[[], object]]] = [
        (r"choose one of \['muon', 'adamw'\]", partial(dzero.Muon, even, [{"params": every, "rule": "muno"}])),
        (r"norm1\.weight has 1 dims, Muon's", partial(dzero.Muon, even, [{"params": every, "rule": "muon"}])),
        (r"no parameter is Muon's", partial(dzero.Muon, even, [{"params": every}])),
        (r"no parameter is Muon's.*optim\.muon\.exclude", partial(dzero.Muon, even, muon=nothing)),
        (r"tiles\.0\.\S+: block\.tiles=\d with optim\.rule=muon: .*=1", partial(dzero.Muon, tiled(2))),
        (r"block\.tiles=\d with optim\.rule=Adafactor: .*=1", partial(torchs, tiled(0), torch.optim.Adafactor)),
        (r"offload\.overlap=backward: .* offload\.overlap=forward", partial(dzero.Muon, early)),
        (r"mesh\.tp=2 with optim\.rule=LBFGS: it mixes .* mesh\.tp=1", partial(torchs, cut, torch.optim.LBFGS)),
    ]
    for message, attempt in refused:
        with pytest.raises(ValueError, match=message):
            attempt()
    whole_ones = [param for name, param in cut.named_params().items() if not name.startswith("0.")]
    torchs(cut, torch.optim.Adafactor, whole_ones)  # what tp leaves whole may be taken by itself

    other = sharded_net("even", stage=2)
    named = other.named_params()
    matrices = {name: param for name, param in named.items() if name.startswith("layers.0") and param.ndim == 2}
    rest = [param for name, param in named.items() if name not in matrices]
    states = dzero.Muon(other, [{"params": rest}, {"params": [*matrices.values()], "rule": "muon"}]).state_dict()
    with pytest.raises(ValueError, match=r"the rules \['adamw', 'muon'\], this optimizer's \['muon', 'adamw'\]"):
        dzero.Muon(sharded_net("even", stage=2)).load_state_dict(states)


class Mixed(nn.Module):
    """Matrices below modules of several names, and an embedding in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.MultiheadAttention(8, 2), nn.Embedding(8, 8)])
        self.conv = nn.Conv1d(8, 8, 3)
        self.lm_head = nn.Linear(8, 8)
        self.row = nn.Linear(8, 1)


def chosen(rank: int, ranks: int, **settings: Any) -> tuple[list[tuple[str, float, list[str]]], list[str]]:
    """Rule, rate and parameters of each group, and what the optimizer says of itself."""
    sharded = dzero.shard(Mixed(), dzero.ZeroConfig(stage=2))
    optim = dzero.Muon(sharded, **settings)
    names = {param: name for name, param in sharded.named_params().items()}
    found = [(group["rule"], group["lr"], [names[p] for p in group["params"]]) for group in optim.param_groups]
    return found, optim.describe()


def chosen_twice(rank: int, ranks: int) -> list[Any]:
    return [chosen(rank, ranks), chosen(rank, ranks, lr=0.1, muon=dzero.MuonConfig(lr=0.2, exclude=["layers"]))]


def test_matrices_are_muons_but_embeddings_heads_and_rows(pool: Pool) -> None:
    (default, lines), (other, _) = pool.run(chosen_twice, 2)[0]
    assert default[0] == ("muon", 3e-4, ["layers.0.weight", "layers.1.in_proj_weight", "layers.1.out_proj.weight"])
    assert [rule for rule, _, _ in default] == ["muon", "adamw"]
    assert {"layers.2.weight", "conv.weight", "lm_head.weight", "row.weight", "layers.0.bias"} <= {*default[1][2]}
    assert other[0] == ("muon", 0.2, ["lm_head.weight"])
    assert other[1][1] == 0.1
    assert lines[0] == "muon: 3 matrices, 10 other parameters by adamw"

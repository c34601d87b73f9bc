"""Muon beside AdamW trains as plain single-process training does, with the same bits at every stage.

Between stages not a bit differs. The oracle's products add in another order, so a parameter may end away from its own
by a small part of how far it has moved: 4e-6 was seen after 20 steps in fp32; in bf16, whose last place may round
otherwise in every step, up to 0.044.
"""

from __future__ import annotations

import functools
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import reference
import small_decoders
import torch
from parity_cells import DTYPES, master_of, same_numbers, whole
from pool import Pool
from reference_muon import Muon as PlainMuon
from training_loops import backward, params_of, sharded_net, snapshot, train, unequal

from dzero import Muon, MuonConfig, ScalerConfig, Sharded, ZeroConfig, shard
from dzero.optim import cpu_kernels, unsharded_updates

STEPS, LR, CLIP = 10, 3e-3, 0.5
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
    Run("even", 1, "fp32", 1),
    Run("even", 2, "bf16", 2),
    Run("uneven", 2, "fp32", 2),
    Run("uneven", 4, "fp32", 1, every=True),
    Run("uneven", 4, "bf16", 1, master="remainder"),
    Run("tied", 2, "bf16", 1),
    Run("frozen", 4, "fp32", 2),
]
PRODUCT = [
    Run(net, ranks, precision, microbatches)
    for net, ranks, precision, microbatches in itertools.product(
        ("even", "uneven", "tied", "frozen"), (1, 2, 4), ("fp32", "bf16"), (1, 2)
    )
]


def name(run: Run) -> str:
    whose = "every" if run.every else "default"
    return f"{run.net}-{run.precision}-M{run.microbatches}-{run.master}-{whose}-{run.ranks}ranks"


def optimizer(sharded: Sharded, run: Run) -> Muon:
    groups = None
    if run.every:
        named = {name: p for name, p in sharded.named_params().items() if p.requires_grad}
        groups = [
            {"params": [p for name, p in named.items() if name in run.names], "rule": "muon"},
            {"params": [p for name, p in named.items() if name not in run.names]},
        ]
    return Muon(sharded, groups, lr=LR, max_norm=CLIP)


def stages(rank: int, ranks: int, run: Run) -> list[dict[str, Any]] | None:
    """`STEPS` steps at each stage; what rank 0 has at the end."""
    results = []
    for stage in range(4):
        kinds = {"param": run.precision, "master": run.master}
        sharded = sharded_net(run.net, stage=stage, microbatches=run.microbatches, **kinds)
        sharded.ledger.collective_log.check = run.ranks == 2
        optim, norms = optimizer(sharded, run), []
        for of_step in small_decoders.batches(run.net, steps=STEPS, ranks=ranks, microbatches=run.microbatches):
            backward(sharded, optim, of_step[rank])
            optim.step()
            norms.append(optim.last_decision.norm)  # type: ignore[union-attr]
        named = sharded.named_params()
        states = {name: optim.state[p] for name, p in named.items() if p in optim.state}
        assert {n for n, s in states.items() if "exp_avg_sq" not in s} == {*run.names}
        result = {"norms": norms, "params": {name: whole(p) for name, p in named.items()}}
        result["masters"] = {name: master_of(named[name], each) for name, each in states.items()}
        keys = ("exp_avg", "exp_avg_sq")
        result["moments"] = {f"{n}.{k}": whole(s[k]) for n, s in states.items() for k in keys if k in s}
        results.append(result)
    return results if rank == 0 else None


@functools.cache
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
        sum_squares=lambda chunk: cpu_kernels.sum_squares([chunk.contiguous()]).item(),
        rules=dict.fromkeys(run.names, plain),
        adamw=reference.AdamW(beta2=0.95, weight_decay=0.1),
    )


def moved(run: Run, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """By parameter: how far it is from the oracle's, over how far that has moved."""
    start = dict(small_decoders.build(run.net).named_parameters())
    return {name: float((got[name] - want[name]).norm() / (want[name] - start[name].detach()).norm()) for name in want}


def check(pool: Pool, run: Run) -> None:
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


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("run", RUNS, ids=name)
def test_stages_have_the_same_bits_and_follow_the_oracle(pool: Pool, run: Run) -> None:
    check(pool, run)


@pytest.mark.slow
@pytest.mark.parametrize("run", PRODUCT, ids=name)
def test_stages_have_the_same_bits_and_follow_the_oracle_full_product(pool: Pool, run: Run) -> None:
    check(pool, run)


def of_kind(rank: int, ranks: int, kinds: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Whole parameters and momenta after four steps of each kind."""
    found = []
    for kind in kinds:
        room = kind.pop("room", unsharded_updates.ROOM_ELEMS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(unsharded_updates, "ROOM_ELEMS", room)
            sharded = sharded_net("uneven", **kind)
            optim = Muon(sharded, lr=LR, max_norm=CLIP, scaler=ScalerConfig(init=256.0))
        train(sharded, optim, "uneven", steps=4)
        momenta = {n: s for n, p in sharded.named_params().items() if "exp_avg" in (s := optim.state[p])}
        rounds = torch.tensor(len(optim._unsharded._rounds))
        found.append({**params_of(sharded), **{f"{n}.m": whole(s["exp_avg"]) for n, s in momenta.items()}})
        found[-1]["rounds"] = rounds
    return found


def test_rounds_change_no_bit(pool: Pool) -> None:
    """A room of nothing: an owner has the largest matrix at a time, or a few that are together no larger."""
    kinds = [{"stage": stage, "param": "fp32", **room} for stage in (0, 2) for room in ({}, {"room": 0})]
    for found in pool.run(of_kind, 4, kinds):
        assert [int(each.pop("rounds")) for each in found] == [1, 2, 1, 2]
        assert all(unequal(each, found[0]) == [] for each in found)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("kind", [{"moments": "bf16"}, {"param": "fp16"}], ids=str)
def test_other_dtypes_have_the_same_bits_at_every_stage(pool: Pool, kind: dict[str, str]) -> None:
    """Moments in bf16 are rounded at random; fp16 gradients are scaled."""
    found = pool.run(of_kind, 4, [{"stage": stage, **kind} for stage in range(4)])[0]
    momentum = found[0]["layers.0.qkv.weight.m"]
    assert momentum.dtype == (torch.bfloat16 if "moments" in kind else torch.float32)
    assert momentum.isfinite().all()
    assert momentum.any()
    assert all(unequal(each, found[0]) == [] for each in found)


def hybrid(rank: int, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Stages 2 and 3 of two copies of two shards each, put together from this rank's copy."""
    return of_kind(rank, ranks, [{"stage": stage, "replicate": 2, "param": "fp32"} for stage in (2, 3)])


def test_copies_of_hybrid_sharding_stay_copies(pool: Pool) -> None:
    runs = pool.run(hybrid, 4)
    assert all(unequal(each, runs[0][0]) == [] for of_rank in runs for each in of_rank)


def beside_torch(rank: int, ranks: int, muon: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """Three steps beside torch.optim.Muon, given our gradients; the largest difference over the largest movement."""
    sharded = sharded_net("uneven", stage=2, param="fp32")
    optim = Muon(sharded, muon=MuonConfig(compute="bf16", **muon), lr=0.02, weight_decay=0.1)
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


@pytest.mark.parametrize(
    ("muon", "theirs"),
    [
        ({"scale": "original"}, {"adjust_lr_fn": "original"}),
        ({"momentum": 0.8, "nesterov": False}, {"momentum": 0.8, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
        ({"iterations": 3}, {"ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}),
    ],
    ids=str,
)
def test_matrices_move_as_torch_muon_moves_them(pool: Pool, muon: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Up to a last place of bf16 here and there: torch mixes momentum by one fused operation."""
    off, moved_least = pool.run(beside_torch, 1, muon, theirs)[0]
    assert off < 0.01 * moved_least


def skip(rank: int, ranks: int, stage: int) -> tuple[str, ...]:
    """One good step, one with a gradient of infinity on rank 1, one good step."""
    sharded = sharded_net("even", stage=stage)
    optim = Muon(sharded, lr=LR, max_norm=CLIP)
    first, second, third = small_decoders.batches("even", steps=3, ranks=ranks, microbatches=1)
    backward(sharded, optim, first[rank])
    optim.step()
    before = snapshot(sharded, optim)
    handle = sharded.model.layers[1].qkv.register_full_backward_hook(spoil) if rank == 1 else None
    backward(sharded, optim, second[rank])
    if handle is not None:
        handle.remove()
    optim.step()
    assert optim.last_decision is not None
    assert unequal(snapshot(sharded, optim), before) == []
    nonfinite_params = optim.last_decision.nonfinite_params
    backward(sharded, optim, third[rank])
    optim.step()
    changed = unequal(snapshot(sharded, optim), before)
    assert {f"layers.{n}.qkv.weight.exp_avg" for n in range(3)} <= {*changed}
    assert all(torch.isfinite(each.float()).all() for each in snapshot(sharded, optim).values())
    return nonfinite_params


def spoil(module: torch.nn.Module, into: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, ...]) -> Any:
    return (torch.full_like(into[0], math.inf),)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_with_an_infinite_gradient_changes_no_bit(pool: Pool, stage: int) -> None:
    one, other = pool.run(skip, 2, stage)
    assert one == other
    assert any(each.startswith("layers.0") for each in one)


class Branch(torch.nn.Module):
    """Three matrices, of which the second is used where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (torch.nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, *, second: bool) -> torch.Tensor:
        x = self.one(x)
        return self.three((self.two(x) if second else x).tanh())  # type: ignore[no-any-return]


class Branching(torch.nn.Module):
    """One block, which is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Branch()])

    def forward(self, x: torch.Tensor, *, second: bool) -> torch.Tensor:
        return self.layers[0](x, second=second)  # type: ignore[no-any-return]


def without(rank: int, ranks: int) -> tuple[list[str], list[str]]:
    """What changed in a step with all matrices, and in one without the second."""
    torch.manual_seed(0)
    sharded = shard(Branching(), ZeroConfig(stage=2))
    sharded.ledger.collective_log.check = True
    optim, changes = Muon(sharded, lr=LR), []
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

"""A checkpoint of any stage, tier, kind of master and number of ranks loads into any other, exactly.

8-bit moments come back as the very codes where blocks align with those saved, and near them elsewhere.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cells import DTYPES, whole
from pool import Pool
from reference import to_working
from torch import Tensor
from training_loops import masters_of, params_of, sharded_net, train, unequal

from dzero import AdamW, CheckpointConfig, Checkpointer, DiskConfig, OffloadConfig, Sharded

TIERS = ("device", "host", "disk")
STORED = (("bf16", "fp32", "fp32"), ("bf16", "remainder", "bf16"), ("fp32", "fp32", "fp32"), ("fp16", "fp32", "fp32"))
"""dtypes of parameters, masters and moments."""
OVER_ALL = ("replicate", "shard")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A run that can save a checkpoint, or load one. `tier`: of masters and moments; at stage 3 of parameters too."""

    stage: int
    tier: str
    ranks: int
    net: str = "uneven"
    param: str = "bf16"
    master: str = "fp32"
    moments: str = "fp32"
    replicate: int = 1
    over: tuple[str, ...] = ("shard",)

    def make(self, folder: Path) -> tuple[Sharded, AdamW]:
        tiers: dict[str, Any] = {"grad": "host", "master": self.tier, "moments": self.tier}
        tiers |= {"param": self.tier} if self.stage == 3 and self.over == ("shard",) else {}
        tiers |= {"disk": DiskConfig(paths=[str(folder)], block_bytes=8192)} if self.tier == "disk" else {}
        sharded = sharded_net(
            self.net,
            stage=self.stage,
            replicate=self.replicate,
            optimizer_shard_axes=self.over,
            offload=OffloadConfig(**tiers) if self.tier != "device" else None,
            param=self.param,
            master=self.master,
            moments=self.moments,
            seed=self.ranks,
        )
        return sharded, AdamW(sharded, lr=3e-3, max_norm=1.0)

    def __str__(self) -> str:
        stored = f"{self.param}-{self.master}-{self.moments}-{self.net}-{'+'.join(self.over)}"
        return f"stage{self.stage}-{self.tier}-{self.ranks}of{self.replicate}-{stored}"


def every_kind(net: str, *, few: bool = False) -> list[Kind]:
    """All stages, tiers and numbers of ranks; how states are stored goes round, and copies where they divide.

    few: a third of them, in which every pair of a stage, a tier and a number of ranks occurs.
    """
    kinds, stored = [], itertools.cycle(STORED)
    for stage, tier, ranks in itertools.product((0, 1, 2, 3), TIERS, (1, 2, 3, 4)):
        param, master, moments = next(stored)
        if few and (stage + TIERS.index(tier) + ranks) % len(TIERS):
            continue
        dtypes = {"param": param, "master": master, "moments": moments}
        replicate = 2 if ranks == 4 and stage in (1, 3) else 1
        kinds.append(Kind(stage=stage, tier=tier, ranks=ranks, net=net, replicate=replicate, **dtypes))
    random.Random(net).shuffle(kinds)
    return kinds


def everything(sharded: Sharded, optim: AdamW) -> dict[str, Tensor]:
    """Whole tensors by kind and name: parameters, fp32 masters, moments, counts of updates."""
    optim.synchronize()
    found = {f"param {name}": value for name, value in params_of(sharded).items()}
    found |= {f"master {name}": value for name, value in masters_of(sharded, optim).items()}
    for name, param in sharded.named_params().items():
        for key, value in optim.state.get(param, {}).items():
            if key == "step" or key.startswith("exp_avg"):
                found[f"{key} {name}"] = whole(value).clone()
    return found


def saved(rank: int, ranks: int, kinds: list[Kind], folder: Path) -> dict[Kind, dict[str, Tensor]]:
    """Train each of `kinds`, save it in a folder of its name, and tell what it held."""
    told = {}
    for kind in kinds:
        sharded, optim = kind.make(folder)
        train(sharded, optim, kind.net, steps=2)
        with Checkpointer(CheckpointConfig(folder=str(folder / str(kind))), sharded, optim) as checkpoints:
            checkpoints.save(2, {"of": str(kind)})
            told[kind] = everything(sharded, optim)
            checkpoints.finish()
        optim.offload.executor.close()
    return told if rank == 0 else {}


def loaded(rank: int, ranks: int, pairs: list[tuple[Kind, Kind]], folder: Path) -> list[dict[str, Tensor]]:
    """Load (source, own) each, tell what it then holds, and go on training."""
    told = []
    for source, kind in pairs:
        sharded, optim = kind.make(folder)
        with Checkpointer(CheckpointConfig(folder=str(folder / str(source))), sharded, optim) as checkpoints:
            resumed = checkpoints.resume("auto")
            assert resumed is not None
            assert (resumed.step, resumed.extra) == (2, {"of": str(source)})
        told.append(everything(sharded, optim))
        train(sharded, optim, kind.net, steps=1, seed=1)
        assert torch.isfinite(torch.tensor(optim.last_decision.norm if optim.last_decision else 0.0))
        optim.offload.executor.close()
    return told if rank == 0 else []


def expected(saved: dict[str, Tensor], kind: Kind) -> dict[str, Tensor]:
    """What a run of `kind` holds that took over `saved`: masters to the bit, the rest in its own dtypes."""
    found = {key: value for key, value in saved.items() if not key.startswith("param ")}
    for key, value in saved.items():
        if key.startswith("exp_avg"):
            found[key] = value.to(DTYPES[kind.moments])
        if key.startswith("param "):
            master = saved.get(key.replace("param ", "master ", 1))
            found[key] = to_working(value.float() if master is None else master, DTYPES[kind.param])
    return found


def check(pool: Pool, folder: Path, ways: list[tuple[Kind, Kind]]) -> None:
    """Save each of what is loaded, and load it."""
    sources = [*dict.fromkeys(source for source, _ in ways)]
    held: dict[Kind, dict[str, Tensor]] = {}
    for ranks in sorted({kind.ranks for kind in sources}):
        held |= pool.run(saved, ranks, [kind for kind in sources if kind.ranks == ranks], folder, timeout_s=600)[0]
    for ranks in sorted({kind.ranks for _, kind in ways}):
        pairs = [(source, kind) for source, kind in ways if kind.ranks == ranks]
        found = pool.run(loaded, ranks, pairs, folder, timeout_s=600)[0]
        for (source, kind), got in zip(pairs, found, strict=True):
            want = expected(held[source], kind)
            assert got.keys() == want.keys()
            assert [key for key in want if not torch.equal(got[key], want[key])] == [], f"{source} -> {kind}"


def test_masters_moments_and_counts_go_from_layout_to_layout_exactly(pool: Pool, tmp_path: Path) -> None:
    """From the host of two ranks to the disk of one, back to the devices of two, and to four that share them out."""
    two = Kind(stage=2, tier="host", ranks=2, master="remainder", moments="bf16")
    one = Kind(stage=3, tier="disk", ranks=1, param="fp32")
    copies = Kind(stage=2, tier="device", ranks=4, replicate=2, over=OVER_ALL)
    check(pool, tmp_path, [(two, one), (one, Kind(stage=0, tier="device", ranks=2, param="fp16")), (two, copies)])


BETWEEN_TWO = "tests/checkpoint/test_any_to_any.py::test_masters_moments_and_counts_go_from_layout_to_layout_exactly"
SETS = [
    pytest.param("uneven", True, id="few", marks=pytest.mark.full(BETWEEN_TWO)),
    pytest.param("uneven", False, id="all", marks=pytest.mark.slow),
    pytest.param("tied", False, id="all tied", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("net", "few"), SETS)
def test_every_kind_is_saved_and_every_kind_loads_one_of_another(
    pool: Pool, tmp_path: Path, net: str, few: bool
) -> None:
    """All 48 kinds each way are paired at random: all rows and columns of the full matrix."""
    kinds = every_kind(net, few=few)
    assert len(kinds) == (16 if few else 48)
    check(pool, tmp_path, [*zip(kinds, [*kinds[7:], *kinds[:7]], strict=True)])


@pytest.mark.full(BETWEEN_TWO)
def test_states_over_all_ranks_are_saved_in_parts_that_any_mesh_loads_and_back(pool: Pool, tmp_path: Path) -> None:
    """2 x 2 with states over all four (shards and parts uneven and empty), 2 x 2, 1 x 4, one rank."""
    small = {"master": "remainder", "moments": "bf16"}
    over_all = Kind(stage=2, tier="device", ranks=4, replicate=2, over=OVER_ALL, **small)
    fp32 = Kind(stage=1, tier="host", ranks=4, replicate=2, over=OVER_ALL, param="fp32")
    on_disk = Kind(stage=3, tier="disk", ranks=4, replicate=2, over=OVER_ALL)
    hybrid = Kind(stage=3, tier="device", ranks=4, replicate=2)
    flat, alone = Kind(stage=3, tier="host", ranks=4, **small), Kind(stage=0, tier="device", ranks=1)
    there = [(over_all, hybrid), (over_all, flat), (fp32, alone), (on_disk, over_all)]
    check(pool, tmp_path, [*there, (hybrid, fp32), (flat, on_disk), (alone, over_all)])


# Moments in 8 bits

BLOCK_ELEMS = 256
MOST_GAP = {"exp_avg": 0.0071, "exp_avg_sq": 0.0036}
"""The farthest that a value in [-1, 1], or [0, 1], lies from the table of 256 values (Dettmers et al. 2022), with the
rounding of the comparison."""
ALIGNED = "tests/checkpoint/test_any_to_any.py::test_blocks_of_8_bits_that_align_are_the_same_and_others_near"


def passed_on(rank: int, ranks: int, kind: Kind, source: Kind, folder: Path) -> None:
    """Load what `source` saved, and save it anew."""
    sharded, optim = kind.make(folder)
    with Checkpointer(CheckpointConfig(folder=str(folder / str(source))), sharded, optim) as checkpoints:
        assert checkpoints.resume("auto") is not None
    with Checkpointer(CheckpointConfig(folder=str(folder / str(kind))), sharded, optim) as checkpoints:
        checkpoints.save(2, {"of": str(kind)})


def moments_of(pool: Pool, source: Kind, kind: Kind, folder: Path) -> dict[str, Tensor]:
    """What a run of `kind` has of moments that loads what `source` saved."""
    (found,) = pool.run(loaded, kind.ranks, [(source, kind)], folder)[0]
    return {key: value for key, value in found.items() if key.startswith("exp_avg")}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("net", "others"), [("even", (1, 3)), ("uneven", (3,))])
def test_blocks_of_8_bits_that_align_are_the_same_and_others_near(
    pool: Pool, tmp_path: Path, net: str, others: tuple[int, ...]
) -> None:
    """Of the values for which codes stand, which loading into fp32 on one rank gives.

    A value that is encoded anew moves by at most a part of its block's largest magnitude. That block lies within the
    `BLOCK_ELEMS` before and behind it. With even shards on one rank, some blocks align with those of two.
    """
    two = Kind(stage=3, tier="device", ranks=2, net=net, moments="int8")
    alone = replace(two, ranks=1, moments="fp32")
    codes = pool.run(saved, 2, [two], tmp_path)[0][two]
    same = moments_of(pool, two, replace(two, stage=2), tmp_path)
    assert unequal(same, {key: value for key, value in codes.items() if key.startswith("exp_avg")}) == []
    assert codes["exp_avg_codes layers.0.up.weight"].unique().numel() > 1
    want = moments_of(pool, two, alone, tmp_path)
    for ranks in others:
        pool.run(passed_on, ranks, replace(two, ranks=ranks), two, tmp_path)
        found, moved = moments_of(pool, replace(two, ranks=ranks), alone, tmp_path), 0
        for name, value in want.items():
            flat, got = value.flatten(), found[name].flatten()
            blocks = {"kernel_size": 2 * BLOCK_ELEMS + 1, "stride": 1, "padding": BLOCK_ELEMS}
            largest = torch.nn.functional.max_pool1d(flat.abs()[None], **blocks)[0]
            assert ((flat - got).abs() <= MOST_GAP[name.split()[0]] * largest).all(), name
            moved += int((flat != got).sum())
        total = sum(value.numel() for value in want.values())
        assert 0 < moved < total // (4 if ranks == 1 else 1)


@pytest.mark.full(ALIGNED)
def test_8_bits_load_into_bf16_and_out_of_it(pool: Pool, tmp_path: Path) -> None:
    """On other ranks; the nearest of each, with 8 bits of bf16 beside the table's gap."""
    two = Kind(stage=3, tier="device", ranks=2, net="even", moments="int8")
    three, again, alone = replace(two, ranks=3, moments="bf16"), replace(two, stage=2), replace(two, ranks=1)
    pool.run(saved, 2, [two], tmp_path)
    want = moments_of(pool, two, replace(alone, moments="fp32"), tmp_path)
    found = moments_of(pool, two, three, tmp_path)
    assert unequal(found, {name: value.bfloat16() for name, value in want.items()}) == []
    pool.run(passed_on, 3, three, two, tmp_path)
    pool.run(passed_on, 2, again, three, tmp_path)
    for name, value in moments_of(pool, again, replace(alone, moments="fp32"), tmp_path).items():
        most = float(want[name].abs().max())
        assert float((value - want[name]).abs().max()) <= (MOST_GAP[name.split()[0]] + 2**-8) * most

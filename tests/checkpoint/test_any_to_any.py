"""A checkpoint of any stage, tier, kind of master and number of ranks loads into any other, exactly."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from kinds import Kind, every_kind, loaded, saved
from pool import Pool
from reference import to_working
from torch import Tensor

STATES = {"master": "remainder", "moments": "bf16"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def test_masters_moments_and_counts_go_from_layout_to_layout_exactly(pool: Pool, tmp_path: Path) -> None:
    """From the host of two ranks to the disk of one, and back to the devices of two."""
    two = Kind(stage=2, tier="host", ranks=2, master="remainder", moments="bf16")
    one = Kind(stage=3, tier="disk", ranks=1, param="fp32")
    check(pool, tmp_path, [(two, one), (one, Kind(stage=0, tier="device", ranks=2, param="fp16"))], 2)


@pytest.mark.full(
    "tests/checkpoint/test_any_to_any.py::test_masters_moments_and_counts_go_from_layout_to_layout_exactly"
)
def test_every_kind_is_saved_and_every_kind_loads_one_of_another(pool: Pool, tmp_path: Path) -> None:
    kinds = every_kind("uneven", few=True)
    check(pool, tmp_path, around(kinds), 16)


@pytest.mark.slow
@pytest.mark.parametrize("net", ["uneven", "tied"])
def test_so_they_do_of_all_stages_tiers_and_numbers_of_ranks(pool: Pool, tmp_path: Path, net: str) -> None:
    """48 kinds each way, paired at random: all rows and columns of the full matrix."""
    check(pool, tmp_path, around(every_kind(net)), 48)


def around(kinds: list[Kind]) -> list[tuple[Kind, Kind]]:
    return [*zip(kinds, [*kinds[7:], *kinds[:7]], strict=True)]


@pytest.mark.full(
    "tests/checkpoint/test_any_to_any.py::test_masters_moments_and_counts_go_from_layout_to_layout_exactly"
)
def test_states_over_all_ranks_are_saved_in_parts_that_any_mesh_loads_and_back(pool: Pool, tmp_path: Path) -> None:
    """2 x 2 with states over all four (shards and parts uneven and empty), 2 x 2, 1 x 4, one rank."""
    over_all = Kind(stage=2, tier="device", ranks=4, replicate=2, optimizer_shard_axes=("replicate", "shard"), **STATES)
    fp32 = Kind(stage=1, tier="host", ranks=4, replicate=2, optimizer_shard_axes=("replicate", "shard"), param="fp32")
    on_disk = Kind(stage=3, tier="disk", ranks=4, replicate=2, optimizer_shard_axes=("replicate", "shard"))
    hybrid = Kind(stage=3, tier="device", ranks=4, replicate=2)
    flat, alone = Kind(stage=3, tier="host", ranks=4, **STATES), Kind(stage=0, tier="device", ranks=1)
    there = [(over_all, hybrid), (over_all, flat), (fp32, alone), (on_disk, over_all)]
    check(pool, tmp_path, [*there, (hybrid, fp32), (flat, on_disk), (alone, over_all)], 7)


def check(pool: Pool, tmp_path: Path, ways: list[tuple[Kind, Kind]], count: int) -> None:
    """Save each of what is loaded, and load it."""
    kinds = [*dict.fromkeys(source for source, _ in ways)]
    held: dict[Kind, dict[str, Tensor]] = {}
    for ranks in (1, 2, 3, 4):
        held |= pool.run(saved, ranks, [kind for kind in kinds if kind.ranks == ranks], tmp_path, timeout_s=600)[0]
    pairs: dict[int, list[tuple[Kind, Kind]]] = defaultdict(list)
    for source, kind in ways:
        pairs[kind.ranks].append((source, kind))
    assert sum(map(len, pairs.values())) == count
    for ranks, of_ranks in pairs.items():
        for (source, kind), got in zip(
            of_ranks, pool.run(loaded, ranks, of_ranks, tmp_path, timeout_s=600)[0], strict=True
        ):
            want = expected(held[source], kind)
            assert got.keys() == want.keys()
            assert [key for key in want if not torch.equal(got[key], want[key])] == [], f"{source} -> {kind}"

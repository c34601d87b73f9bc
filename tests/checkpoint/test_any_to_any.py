"""A checkpoint of any stage, tier, kind of master and number of ranks loads into any other, exactly."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from kinds import Kind, every_kind, loaded, saved
from pool import Pool
from torch import Tensor

from dzero.zero.working import to_working

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


def check(pool: Pool, tmp_path: Path, kinds: list[Kind]) -> None:
    """Each is saved, and loads what another one saved."""
    held: dict[Kind, dict[str, Tensor]] = {}
    for ranks in (1, 2, 3, 4):
        held |= pool.run(saved, ranks, [kind for kind in kinds if kind.ranks == ranks], tmp_path, timeout_s=600)[0]
    pairs: dict[int, list[tuple[Kind, Kind]]] = defaultdict(list)
    for source, kind in zip(kinds, [*kinds[7:], *kinds[:7]], strict=True):
        pairs[kind.ranks].append((source, kind))
    assert sum(map(len, pairs.values())) == len(kinds)
    for ranks, of_ranks in pairs.items():
        for (source, kind), got in zip(
            of_ranks, pool.run(loaded, ranks, of_ranks, tmp_path, timeout_s=600)[0], strict=True
        ):
            want = expected(held[source], kind)
            assert got.keys() == want.keys()
            assert [key for key in want if not torch.equal(got[key], want[key])] == [], f"{source} -> {kind}"


def test_every_kind_is_saved_and_every_kind_loads_one_of_another(pool: Pool, tmp_path: Path) -> None:
    kinds = every_kind("uneven", few=True)
    assert len(kinds) == 16
    check(pool, tmp_path, kinds)


@pytest.mark.slow
@pytest.mark.parametrize("net", ["uneven", "tied"])
def test_so_they_do_of_all_stages_tiers_and_numbers_of_ranks(pool: Pool, tmp_path: Path, net: str) -> None:
    """48 kinds each way, paired at random: all rows and columns of the full matrix."""
    kinds = every_kind(net)
    assert len(kinds) == 48
    check(pool, tmp_path, kinds)

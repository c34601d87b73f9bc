"""Runs are what they were when tests/golden.json was written: what they send and keep, and their bits.

    python tests/test_golden.py     writes golden.json anew, and says which runs changed, for the commit that means it

What runs send and keep, and the table they print, depend on nothing. Their bits are those of torch's products and sums:
golden.json has them by a digest of how plain torch trains the same nets (`recorded.arithmetic`), which differs between
kinds of processors, and may between releases of torch: 2.13.0 and 2.14.1 give the same bits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).with_name("support")))

import pytest
import recorded
import torch
from pool import Pool

FILE = Path(__file__).with_name("golden.json")


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


@pytest.fixture(scope="module")
def known(pool: Pool, golden: dict[str, Any]) -> dict[str, Any]:
    """Bits by run, of this torch on a processor like this one."""
    (key,) = pool.run(recorded.arithmetic, 1)
    if key not in golden["bits"]:
        pytest.skip("golden.json knows no bits of this torch on this kind of processor")
    found: dict[str, Any] = golden["bits"][key]["runs"]
    return found


@pytest.mark.product(keep=24)
@pytest.mark.parametrize("name", recorded.RUNS)
def test_a_run_sends_and_keeps_what_it_did(pool: Pool, name: str, golden: dict[str, Any]) -> None:
    assert recorded.counts(recorded.recorded(pool, name)) == golden["counts"][name]


@pytest.mark.product(keep=24)
@pytest.mark.parametrize("name", recorded.RUNS)
def test_a_run_has_the_bits_that_it_had(pool: Pool, name: str, known: dict[str, Any]) -> None:
    assert recorded.bits(recorded.recorded(pool, name)) == known[name]


def test_every_run_is_known(golden: dict[str, Any]) -> None:
    for kept in (golden["counts"], *(each["runs"] for each in golden["bits"].values())):
        assert kept.keys() == recorded.RUNS.keys()


def write() -> None:
    """Write what this machine finds; where that changes the bits of a run, those of other machines are dropped."""
    old = json.loads(FILE.read_text()) if FILE.exists() else {"counts": {}, "bits": {}}
    with Pool() as pool:
        (key,) = pool.run(recorded.arithmetic, 1)
        records = {name: recorded.recorded(pool, name) for name in recorded.RUNS}
    counts = {name: recorded.counts(record) for name, record in records.items()}
    bits = {name: recorded.bits(record) for name, record in records.items()}
    known = old["bits"].get(key, {"runs": {}})["runs"]
    for what, before, now in (("sends or keeps", old["counts"], counts), ("bits", known, bits)):
        for name in now:
            if name in before and before[name] != now[name]:
                print(f"{what} of {name}: changed")
    is_same = known == bits or not known
    others = {other: each for other, each in old["bits"].items() if is_same and each["runs"].keys() == bits.keys()}
    found = {"counts": counts, "bits": others | {key: {"cpu": torch.backends.cpu.get_cpu_capability(), "runs": bits}}}
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write()

"""Recorded runs of the table against the oracle, the formulas, each other, and what they were: tests/golden.json.

    python tests/test_recorded.py     writes golden.json anew, and says which runs changed, for the commit that means it

What runs send and keep, and the table and schedule they print, depend on nothing. Their bits are those of torch's
products and sums: golden.json has them by a digest of how plain torch trains the same nets (`recorded.arithmetic`),
which differs between kinds of processors, and may between releases of torch: 2.13.0 and 2.14.1 give the same bits. The
oracle trains on the same processor, so that there bits are compared everywhere.
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
from recorded import RUNS
from training_loops import joined_master

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


KEPT = 14


def is_counted(run: recorded.Run) -> bool:
    """Whether the bytes of the run's states are those of the table, each wholly on one tier."""
    return run.rule == "adamw" and "frozen" not in run.precision and not any("fraction" in key for key in run.offload)


every_run = pytest.mark.parametrize("name", RUNS)


@pytest.mark.product(keep=10)
@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if recorded.has_oracle(run)])
def test_a_run_has_the_bits_of_the_oracle(pool: Pool, name: str) -> None:
    record, want = recorded.recorded(pool, name), recorded.oracle(RUNS[name])
    assert record.norms == [None if skipped else norm for norm, skipped in zip(want.norms, want.skipped, strict=True)]
    assert record.scales == want.scales
    for param, states in record.states.items():
        got = {"value": states["value"]}
        expected = {"value": want.params[param]}
        if param in want.moments:
            got |= {"master": joined_master(states), "m": states["exp_avg"], "v": states["exp_avg_sq"]}
            expected |= {"master": want.masters[param], **dict(zip("mv", want.moments[param], strict=True))}
        assert [key for key in expected if not torch.equal(got[key], expected[key])] == [], param


@pytest.mark.product(keep=KEPT)
@every_run
def test_a_run_sends_what_the_table_says(pool: Pool, name: str) -> None:
    record = recorded.recorded(pool, name)
    assert record.sent == record.expected


@pytest.mark.product(keep=KEPT)
@every_run
def test_a_run_keeps_what_the_table_says(pool: Pool, name: str) -> None:
    """The first rank has what the formula says, others as much or less, where a dim does not divide by the ranks."""
    run, record = RUNS[name], recorded.recorded(pool, name)
    for rank, (kept, resting) in enumerate(zip(record.kept, record.resting, strict=True)):
        moments = sum(count for key, count in kept.items() if key.startswith("exp_avg"))
        pairs = {
            "param": (kept["value"], resting["param"] + resting["frozen"]),
            "master": (kept.get("master", 0) + kept.get("remainder", 0), resting["master"]),
            "moments": (moments, resting["moments"]),
        }
        if run.rule != "adamw":
            del pairs["moments"]  # the formula's are two for each parameter
        if "frozen" in run.precision:
            del pairs["param"]  # what a parameter shows is decoded
        assert [kind for kind, (found, said) in pairs.items() if found > said or (rank == 0 and found < said)] == []


@pytest.mark.product(keep=10)
@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if is_counted(run)])
def test_what_is_off_the_device_is_not_on_it(pool: Pool, name: str) -> None:
    run, record = RUNS[name], recorded.recorded(pool, name)
    off = {kind: tier for kind, tier in run.offload.items() if kind in recorded.STATES}
    for kept, resting, tiers in zip(record.kept, record.resting, record.tiers, strict=True):
        of_kind = {
            "param": resting["param"] + resting["frozen"],  # FSDP2 pads its own shards
            "master": kept.get("master", 0) + kept.get("remainder", 0),
            "moments": sum(count for key, count in kept.items() if key.startswith("exp_avg")),
        }
        assert tiers["device"] == sum(count for kind, count in of_kind.items() if kind not in off)
        assert (tiers["host"] > 0, tiers["disk"] > 0) == (bool(off), "disk" in off.values())
        away = sum(count for kind, count in of_kind.items() if kind in off)
        assert tiers["disk" if "disk" in off.values() else "host"] >= away


@pytest.mark.product(keep=KEPT)
@every_run
def test_a_run_sends_and_keeps_what_it_did(pool: Pool, name: str, golden: dict[str, Any]) -> None:
    assert recorded.counts(recorded.recorded(pool, name)) == golden["counts"][name]


@pytest.mark.product(keep=KEPT)
@every_run
def test_a_run_has_the_bits_that_it_had(pool: Pool, name: str, known: dict[str, Any]) -> None:
    assert recorded.bits(recorded.recorded(pool, name)) == known[name]


def test_every_run_is_known(golden: dict[str, Any]) -> None:
    for kept in (golden["counts"], *(each["runs"] for each in golden["bits"].values())):
        assert kept.keys() == RUNS.keys()


def write() -> None:
    """Write what this machine finds; where that changes the bits of a run, those of other machines are dropped."""
    old = json.loads(FILE.read_text()) if FILE.exists() else {"counts": {}, "bits": {}}
    with Pool() as pool:
        (key,) = pool.run(recorded.arithmetic, 1)
        records = {name: recorded.recorded(pool, name) for name in RUNS}
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

"""Names of the runs of a sweep."""

from __future__ import annotations

import pytest

from dzero.monitor.run_names import MOST_CHARACTERS, run_name


@pytest.mark.parametrize(
    ("command_line", "given", "name"),
    [
        ("--multirun zero.stage=0,3 train.steps=9", "zero.stage=3 train.steps=9", "zero.stage=3"),
        ("-m zero.stage=0,3 offload=none,host", "zero.stage=3 offload=host", "zero.stage=3,offload=host"),
        ("-m optim.lr=range(1,3)", "optim.lr=2", "optim.lr=2"),
        ("-m data.path=/a/b,/a_b", "data.path=/a/b", "data.path=_a_b,1"),  # the other run's name is data.path=_a_b
        ("-m train.seed=7,7", "train.seed=7", "train.seed=7,1"),
        ("-m model=glob(b*)", "model=bench_21m", "model=bench_21m,1"),
        ("--multirun zero.stage=2", "zero.stage=2", "zero.stage=2,1"),
        ("--multirun", "", "1"),
    ],
)
def test_a_run_is_named_by_what_sets_it_apart_and_by_its_number_where_that_is_not_enough(
    command_line: str, given: str, name: str
) -> None:
    assert run_name(1, given.split(), command_line.split()) == name


def test_a_long_name_is_cut_and_numbered() -> None:
    values = [letter * 300 for letter in "ab"]
    names = {run_name(at, [f"data.name={value}"], [f"data.name={','.join(values)}"]) for at, value in enumerate(values)}
    assert len(names) == 2
    assert all(len(name) < MOST_CHARACTERS + 5 for name in names)

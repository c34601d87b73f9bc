"""Folder names of runs."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from dzero.monitor.run_names import MOST_CHARACTERS, run_name, settings_name
from dzero.overrides import spelt_out


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


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ([], ""),
        (["zero.stage=3", "optim.lr=1e-3"], "_zero.stage=3_optim.lr=1e-3"),
        (["data.path=/texts/of a man/good.txt"], "_data.path=good.txt"),
        (["offload.disk.paths=[/nvme0,/nvme1]", "+extra=x", "~profile"], "_offload.disk.paths=nvme1_extra=x_profile"),
        (["model.name_or_path='org/name'"], "_model.name_or_path=name"),
        (["data.sources={a:1,b:2}"], "_data.sources=-a-1-b-2"),
    ],
)
def test_a_run_has_its_settings_in_its_name(given: list[str], name: str) -> None:
    assert settings_name(given) == name


def test_a_name_of_a_run_can_stand_in_a_setting_without_quotes() -> None:
    given = ["zero.stage=3", "data.path=/a/b c,d.txt", "note='(x) ${y} #:%'", "words=[a,b]", "far=" + "x" * 300]
    name = settings_name(given)
    assert name.endswith("_words=-a-b_and-1-more")
    folder = f"outputs/2026-11-30/15-04-05-678901{name}"
    assert shlex.split(folder) == [folder]
    (override,) = OverridesParser.create().parse_overrides(spelt_out([f"resume={folder}"]))
    assert (override.key_or_group, override.value(), override.is_sweep_override()) == ("resume.source", folder, False)

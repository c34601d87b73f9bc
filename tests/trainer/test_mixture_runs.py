"""Runs over several sources: resumed on other ranks they go on exactly, and what they took is told by source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from in_process import dzero as command
from pool import Pool
from published import chats_of, words
from small_runs import SMALL, ran, write_text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

LONG, SHORT = "long.txt", "short.txt"


def texts(folder: Path) -> list[Path]:
    """A long and a short text of other letters."""
    write_text(folder / LONG, 4000)
    (folder / SHORT).write_text("0123 4567 89 " * 120)
    return [folder / LONG, folder / SHORT]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_mixture_resumes_on_other_ranks_at_the_same_sample(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """Losses are means over the samples of a step, so that equal losses are of the same samples."""
    settings = [*SMALL.split(), f"data.paths=[{','.join(map(str, texts(tmp_path)))}]", "data.weights=[0.75,0.25]"]
    settings += ["precision=fp32", "train.steps=4", "train.global_sequences=8", "train.accumulate=null"]
    settings += ["train.evaluate_every_steps=2", "checkpoint.every=2", "checkpoint.keep=9", "optim.rule=SGD"]
    settings += ["monitor.tensorboard=false"]
    whole = pool.run(ran, 2, [*settings, f"checkpoint.folder={tmp_path / 'a'}"], tmp_path)[0]
    own = [f"resume.source={tmp_path / 'a' / 'step_00000002'}", f"checkpoint.folder={tmp_path / 'b'}"]
    part = pool.run(ran, ranks, [*settings, *own], tmp_path)[0]
    assert part.losses == pytest.approx(whole.losses[2:], rel=1e-6)  # sums of fp32 in another order
    assert epochs(part.told) == epochs(whole.told)
    told = re.findall(rf"held_out_loss=(\S+) .*\[{LONG}\]=(\S+) .*\[{SHORT}\]=(\S+)", whole.told)
    for total, first, second in told:  # printed with four digits
        assert float(total) == pytest.approx(0.75 * float(first) + 0.25 * float(second), abs=1e-4)
    assert len(told) == 2
    assert {name: count for name, count, _ in taken(whole.told)} == {LONG: str(4 * 6 * 32), SHORT: str(4 * 2 * 32)}


def taken(told: str) -> list[tuple[str, str, str]]:
    """Of each source: its name, tokens that counted, and epochs."""
    return re.findall(r"from (\S+) +(\S+(?: k)?) tokens counted, (\S+) epochs", told)


def epochs(told: str) -> dict[str, str]:
    return {name: count for name, _, count in taken(told)}


def test_one_source_has_the_losses_of_the_run_without_a_mixture(pool: Pool, tmp_path: Path) -> None:
    (path, _) = texts(tmp_path)
    settings = [*SMALL.split(), "monitor.tensorboard=false"]
    alone = pool.run(ran, 2, [*settings, f"data.path={path}"], tmp_path)[0]
    one = pool.run(ran, 2, [*settings, f"data.paths=[{path}]", "data.weights=[3]"], tmp_path)[0]
    assert (one.losses, one.held_out) == (alone.losses, alone.held_out)


def test_a_run_over_chats_of_two_files_tells_what_it_took(pool: Pool, model: Path, tmp_path: Path) -> None:
    lines = chats_of(model).read_text().splitlines(keepends=True)
    for name, part in (("many", lines[:12]), ("few", lines[12:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    given = [word for word in words(model, tmp_path) if not word.startswith(("data.path", "monitor"))]
    given += [f"data.paths=[{tmp_path}/many.jsonl,{tmp_path}/few.jsonl]", "data.weights=[1,1]", "data.held_out=0.4"]
    given += ["train.epochs=2", "train.evaluate_every_steps=8", "train.answer_tokens=4", "monitor.plan=false"]
    (found,) = pool.run(ran, 1, given, tmp_path)
    assert re.search(r"50\.0% from \S*many\.jsonl: ", found.told)
    assert re.search(
        r"held_out_loss=\S+ .*held_out_loss\[many.jsonl\]=\S+ .*held_out_loss\[few.jsonl\]=\S+", found.told
    )
    assert re.search(r"answers '<\|im_start\|>user.*' with '", found.told)
    told = epochs(found.told)
    assert told.keys() == {"many.jsonl", "few.jsonl"}
    least, most = sorted(map(float, told.values()))  # shares are equal, sizes are not
    assert least < 2 < most
    tags = {*EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]}
    assert {"data/few.jsonl_tokens", "data/few.jsonl_epochs", "loss/held_out_few.jsonl"} <= tags
    shown = command("tokenize", *[each for each in given if each.startswith(("data", "model"))])
    assert re.search(r"many.jsonl:\n12 samples(.*\n)*few.jsonl:\n4 samples", shown.stdout), shown.stderr

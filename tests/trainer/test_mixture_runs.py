"""Runs over several sources: resumed on other ranks they go on exactly, and what they took is told by source."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from small_runs import ROOT, settled, write_text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_finetune import CHATS, model, words  # noqa: F401  (a fixture)

from dzero.monitor.records import RunSummary
from dzero.trainer.trainer import Trainer

TOKENS = 32


def texts(folder: Path) -> list[Path]:
    """A long and a short text of other letters."""
    (folder / "data").mkdir()
    write_text(folder / "data" / "long.txt", 4000)
    (folder / "data" / "short.txt").write_text("0123 4567 89 " * 120)
    return [folder / "data" / "long.txt", folder / "data" / "short.txt"]


def ran(rank: int, ranks: int, data: Path, folder: Path, settings: list[str]) -> dict[str, Any]:
    trainer = Trainer(settled(data, *settings), folder, torch.device("cpu"))
    summary: RunSummary = trainer.run()
    return {
        "losses": trainer.recorder.losses,
        "held_out": (summary.held_out_loss, dict(summary.held_out_by_source)),
        "sources": {name: tuple(use) for name, use in summary.sources.items()},
        "params": {name: param.to_local().clone() for name, param in trainer.sharded.named_params().items()},
    }


def test_a_mixture_resumes_on_other_ranks_at_the_same_sample(pool: Pool, tmp_path: Path) -> None:
    paths = texts(tmp_path)
    settings = [
        "data.path=null",
        f"data.paths=[{paths[0]},{paths[1]}]",
        "data.weights=[0.75,0.25]",
        "precision=fp32",
        "train.steps=8",
        "train.global_sequences=8",
        "train.accumulate=null",
        "train.evaluate_every_steps=4",
        "checkpoint.every=4",
        "checkpoint.keep=9",
    ]
    whole = pool.run(ran, 2, paths[0], tmp_path, [*settings, f"checkpoint.folder={tmp_path / 'a'}"])[0]
    settings += [f"resume.source={tmp_path / 'a' / 'step_00000004'}"]
    for ranks in (1, 4):
        own = [*settings, f"checkpoint.folder={tmp_path / str(ranks)}"]
        part = pool.run(ran, ranks, paths[0], tmp_path, own)[0]
        assert part["losses"] == pytest.approx(whole["losses"][4:], rel=1e-6)
        assert {name: use[1] for name, use in part["sources"].items()} == {
            name: use[1] for name, use in whole["sources"].items()
        }
    total, by_source = whole["held_out"]
    assert total == pytest.approx(0.75 * by_source["long.txt"] + 0.25 * by_source["short.txt"], rel=1e-12)
    tokens = {name: use[0] for name, use in whole["sources"].items()}
    assert tokens == {"long.txt": 8 * 6 * TOKENS, "short.txt": 8 * 2 * TOKENS}


def test_one_source_has_the_bits_of_the_run_without_a_mixture(pool: Pool, tmp_path: Path) -> None:
    (path, _) = texts(tmp_path)
    alone = pool.run(ran, 2, path, tmp_path, [])[0]
    one = pool.run(ran, 2, path, tmp_path, ["data.path=null", f"data.paths=[{path}]", "data.weights=[3]"])[0]
    assert one["losses"] == alone["losses"]
    assert one["held_out"] == alone["held_out"]
    assert all(torch.equal(param, one["params"][name]) for name, param in alone["params"].items())


def test_the_command_trains_on_chats_of_two_files_and_tells_what_it_took(
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    lines = CHATS.read_text().splitlines(keepends=True)
    for name, part in (("many", lines[:48]), ("few", lines[48:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    settings = [word for word in words(model, tmp_path) if not word.startswith(("data.path", "monitor"))]
    settings += ["data.paths=[many.jsonl,few.jsonl]", "data.weights=[1,1]", "data.held_out=0.2", "monitor.plan=false"]
    settings += ["train.epochs=2", "train.evaluate_every_steps=8", "train.answer_tokens=4", "launch.workers=1"]
    line = [sys.executable, str(ROOT / "train.py"), *settings]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "50.0% from many.jsonl: " in ended.stdout
    assert re.search(r"held_out_loss=\S+ held_out_loss\[many.jsonl\]=\S+ held_out_loss\[few.jsonl\]=\S+", ended.stdout)
    told = dict(re.findall(r"from (\w+).jsonl +\S+(?: k)? tokens counted, (\S+) epochs", ended.stdout))
    assert float(told["few"]) > 2 > float(told["many"])
    (board,) = tmp_path.glob("outputs/*/*")
    events = EventAccumulator(str(board)).Reload()
    assert {"data/few.jsonl_tokens", "data/few.jsonl_epochs", "loss/held_out_few.jsonl"} <= {*events.Tags()["scalars"]}
    tokenize = [
        sys.executable,
        "-m",
        "dzero",
        "tokenize",
        *[each for each in settings if each.startswith(("data", "model"))],
    ]
    shown = subprocess.run(tokenize, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert re.search(r"many.jsonl:\n48 samples(.*\n)*few.jsonl:\n16 samples", shown.stdout), shown.stderr

"""Random damage to the newest of several checkpoints: the run lands on the right step, with the right bits.

DZERO_DAMAGES=300 pytest -m slow tests/stress/test_damages.py      writes benchmarks/results/checkpoint_damages.json
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pool import Pool
from rows import SMALL, WAYS, count, words, write_row
from small_runs import settled, train, write_text
from written_checkpoints import LATEST, MANIFEST, body_of, data_name, flip, index_name

SEED, LAST = 0, 6


def flipped(path: Path, draw: random.Random, start: int = 0) -> None:
    """Flip one bit at or behind `start`."""
    flip(path, draw.randrange(8 * start, 8 * path.stat().st_size))


def in_data(folder: Path, draw: random.Random) -> None:
    """Flip a bit of a tensor that a resumed run reads; a header is for other programs."""
    rank = draw.randrange(2)
    flipped(folder / data_name(rank), draw, body_of(folder / index_name(rank))["data_start"])


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


Damage = Callable[[Path, random.Random], object]
KINDS: dict[str, tuple[Damage, bool]] = {
    "a bit of a tensor": (in_data, True),
    "a bit of an index": (lambda f, draw: flipped(f / index_name(draw.randrange(2)), draw), True),
    "a bit of the manifest": (lambda f, draw: flipped(f / MANIFEST, draw), True),
    "a bit of the pointer": (lambda f, draw: flipped(f.parent / LATEST, draw), False),
    "a file cut short": (lambda f, draw: cut(draw.choice(sorted(f.iterdir())), draw), True),
    "a file deleted": (lambda f, draw: draw.choice(sorted(f.iterdir())).unlink(), True),
    "the pointer cut short": (lambda f, draw: cut(f.parent / LATEST, draw), False),
    "the pointer deleted": (lambda f, _: (f.parent / LATEST).unlink(), False),
    "the checkpoint deleted": (lambda f, _: shutil.rmtree(f), True),
}
"""What is done to a checkpoint, and whether it is lost by that."""


def tensors(folder: Path) -> list[bytes]:
    """The last checkpoint's."""
    return [path.read_bytes() for path in sorted((folder / f"step_{LAST + 1:08d}").glob("*.safetensors"))]


@pytest.mark.slow
def test_a_run_lands_on_the_newest_step_that_is_whole_with_its_bits(pool: Pool, tmp_path: Path) -> None:
    """A run of `LAST` steps is hurt, and goes on to the step behind them, as a whole one did."""
    text, draw, damages, wrong = write_text(tmp_path / "words.txt"), random.Random(SEED), count("DAMAGES"), list[str]()
    done, landed = Counter[str](), Counter[str]()
    want: dict[str, list[bytes]] = {}
    for number in range(damages):
        way, kind = [*WAYS][number % len(WAYS)], draw.choice([*KINDS])
        of_way = [*SMALL, *words(way, tmp_path), "checkpoint.keep=9", "schedule.kind=constant", "resume=auto"]

        def steps(folder: Path, last: int, of_way: list[str] = of_way) -> int:
            """Train up to `last`; how many steps that took."""
            config = settled(text, *of_way, f"train.steps={last}", f"checkpoint.folder={folder}")
            return len(pool.run(train, 2, config, tmp_path, timeout_s=600.0)[0].losses)

        made = tmp_path / f"made {[*WAYS].index(way)}"
        if way not in want:
            steps(made, LAST)
            whole = Path(shutil.copytree(made, tmp_path / "whole"))
            steps(whole, LAST + 1)
            want[way] = tensors(whole)
            shutil.rmtree(whole)
        shelf = Path(shutil.copytree(made, tmp_path / "hurt"))
        damage, lost = KINDS[kind]
        damage(shelf / f"step_{LAST:08d}", draw)
        if (made_again := steps(shelf, LAST + 1)) != (2 if lost else 1):
            wrong.append(f"{number}: {way}, {kind}: made {made_again} steps")
        elif tensors(shelf) != want[way]:
            wrong.append(f"{number}: {way}, {kind}: other bits")
        done[kind] += 1
        landed[way] += 1
        shutil.rmtree(shelf)
    question = "Does a run with a randomly damaged newest checkpoint go on from the newest whole one, bit by bit?"
    figures = {"seed": SEED, "wrong": wrong, "damaged": dict(done), "ways": dict(landed)}
    write_row("checkpoint_damages", question, __file__, {"DAMAGES": damages}, **figures)
    assert wrong == []

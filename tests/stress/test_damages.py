"""Random damage to the newest of several checkpoints: the run lands on the right step, with the right bits.

DZERO_DAMAGES=300 pytest -m slow tests/stress/test_damages.py      writes benchmarks/results/checkpoint_damages.json
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pool import Pool
from rows import SMALL, WAYS, count, words, write_row
from small_runs import settled, write_text

from dzero.checkpoint import saver
from dzero.checkpoint.format import MANIFEST, data_name, index_name
from dzero.checkpoint.store import LATEST
from dzero.config import RunConfig
from dzero.trainer.trainer import Trainer

SEED, SECONDS, LAST = 0, 600.0, 6


def flipped(path: Path, draw: random.Random, start: int = 0) -> None:
    """Flip one bit at or behind `start`."""
    bit = draw.randrange(8 * start, 8 * path.stat().st_size)
    with path.open("r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, bit // 8)
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)


def in_data(folder: Path, draw: random.Random) -> None:
    """Flip a bit of a tensor that a resumed run reads; a header is for other programs."""
    rank = draw.randrange(2)
    start = json.loads((folder / index_name(rank)).read_bytes())["body"]["data_start"]
    flipped(folder / data_name(rank), draw, start)


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


def trained(rank: int, ranks: int, run: RunConfig, folder: Path) -> tuple[int, list[str]]:
    """A whole run, whose files have many blocks: the step that it went on from, and what it was told."""
    before, saver.BLOCK_BYTES = saver.BLOCK_BYTES, 4096
    try:
        trainer = Trainer(run, folder, torch.device("cpu"))
        trainer.run()
    finally:
        saver.BLOCK_BYTES = before
    return trainer.done_steps, trainer.saves.notes


def tensors(folder: Path, step: int) -> list[bytes]:
    newest = max(folder.glob(f"step_{step:08d}*"), key=lambda path: path.stat().st_mtime_ns)
    return [path.read_bytes() for path in sorted(newest.glob("*.safetensors"))]


@pytest.mark.slow
def test_a_run_lands_on_the_newest_step_that_is_whole_with_its_bits(pool: Pool, tmp_path: Path) -> None:
    text, draw, began_s = write_text(tmp_path / "words.txt"), random.Random(SEED), time.monotonic()
    damages, wrong = count("DAMAGES"), list[str]()
    done, landed = Counter[str](), Counter[str]()
    made, want = dict[str, Path](), dict[str, list[bytes]]()
    for number in range(damages):
        way, kind = [*WAYS][number % len(WAYS)], draw.choice([*KINDS])
        of_way = [*SMALL, *words(way, tmp_path), "checkpoint.keep=3"]

        def run(folder: Path, *more: str, of_way: list[str] = of_way) -> list[tuple[int, list[str]]]:
            config = settled(text, *of_way, f"train.steps={LAST}", *more, f"checkpoint.folder={folder}")
            found: list[tuple[int, list[str]]] = pool.run(trained, 2, config, tmp_path, timeout_s=SECONDS)
            return found

        if way not in made:
            made[way] = tmp_path / f"made {len(made)}"
            run(made[way])
            want[way] = tensors(made[way], LAST)
        shelf = Path(shutil.copytree(made[way], tmp_path / "hurt"))
        damage, lost = KINDS[kind]
        damage(shelf / f"step_{LAST:08d}", draw)
        # The run is finished but for what was lost; two more steps would need another reference.
        step = LAST - 1 if lost else LAST
        if lost:
            found = run(shelf, "resume=auto")
            if [each[0] for each in found] != [step, step]:
                wrong.append(f"{number}: {way}, {kind}: went on from {[each[0] for each in found]}: {found[0][1]}")
            elif tensors(shelf, LAST) != want[way]:
                wrong.append(f"{number}: {way}, {kind}: other bits")
        else:
            config = settled(text, *of_way, f"train.steps={LAST}", "resume=auto", f"checkpoint.folder={shelf}")
            landings = pool.run(landing, 2, config, tmp_path, timeout_s=SECONDS)
            if landings != [step, step]:
                wrong.append(f"{number}: {way}, {kind}: went on from {landings}")
        done[kind] += 1
        landed[way] += 1
        shutil.rmtree(shelf)
    row = {
        "question": "Does a run with a randomly damaged newest checkpoint go on from the newest whole one, bit by bit?",
        "command": f"DZERO_DAMAGES={damages} pytest -m slow tests/stress/test_damages.py",
        "seed": SEED,
        "damages": damages,
        "wrong": wrong,
        "damaged": dict(done),
        "ways": dict(landed),
        "seconds": round(time.monotonic() - began_s, 1),
    }
    write_row("checkpoint_damages", row)
    assert wrong == []


def landing(rank: int, ranks: int, run: RunConfig, folder: Path) -> int:
    """The step that a run goes on from."""
    trainer = Trainer(run, folder, torch.device("cpu"))
    with trainer.saves:
        return trainer.done_steps

"""What the trainer's tests run: a small configuration, composed as train.py does, on the ranks of the pool."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import torch
from hydra import compose, initialize_config_dir

from dzero import config
from dzero.comm.ledger import EXCEPTIONAL
from dzero.config import RunConfig
from dzero.monitor.records import RunSummary
from dzero.monitor.summary import INSIDE
from dzero.overrides import spelt_out
from dzero.trainer.trainer import Trainer

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
SMALL = (
    "model.hidden_size=32 model.layers=2 model.heads=2 model.kv_heads=1 model.ffn_size=48 "
    "train.steps=3 train.sequence_tokens=32 train.microbatch_sequences=2 data.held_out=0.1"
)


class Told(NamedTuple):
    """What one rank's trainer knows after its run; `agrees`: whether measured traffic was the theory's, in `phases`."""

    losses: list[float]
    held_out: float | None
    skipped_steps: int
    agrees: bool
    phases: frozenset[str]


def write_text(path: Path, words: int = 8000) -> Path:
    """Seeded text that can be learnt: words of a small vocabulary."""
    drawn = random.Random(0)
    vocabulary = ["".join(drawn.choices("abcdefghijklmnop", k=drawn.randint(2, 6))) for _ in range(40)]
    path.write_text(" ".join(drawn.choices(vocabulary, k=words)))
    return path


def settled(data: Path, *settings: str) -> RunConfig:
    """The small run on the text or tokens at `data`, with `settings` over it; without a plan, which takes longer."""
    config.register()
    quick = [] if any(setting.startswith("monitor.") for setting in settings) else ["monitor.plan=false"]
    words = [*SMALL.split(), *quick, f"data.path={data}", *spelt_out(settings)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return config.resolve(compose("config", overrides=words))


def train(rank: int, ranks: int, run: RunConfig, folder: Path) -> Told:
    """A whole run, as every worker makes it."""
    trainer = Trainer(run, folder, torch.device("cpu"))
    summary = trainer.run()
    phases = frozenset(entry.phase for entry in summary.expected.keys() & summary.traffic.keys())
    return Told(trainer.recorder.losses, summary.held_out_loss, summary.skipped_steps, agrees(summary), phases)


def agrees(summary: RunSummary) -> bool:
    """Whether a run moved what theory says."""
    theory = {entry: (t.calls * summary.steps, t.sent_bytes * summary.steps) for entry, t in summary.expected.items()}
    theory |= {entry: (t.calls, t.sent_bytes) for entry, t in summary.routed.items()}
    untold = (*INSIDE, EXCEPTIONAL) if summary.skipped_steps else INSIDE
    told = {entry.phase for entry in theory} | {entry.phase for entry in summary.traffic if entry.phase not in untold}
    moved = {entry: t for entry, t in summary.traffic.items() if entry.phase in told}
    return {entry: (t.calls, t.sent_bytes) for entry, t in moved.items()} == theory

"""What the trainer's tests run: a small configuration, composed as train.py does, on the ranks of the pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra import compose, initialize_config_dir

from dzero import config, save_pretrained, testing
from dzero.comm.ledger import EXCEPTIONAL
from dzero.config import RunConfig
from dzero.monitor.records import RunSummary
from dzero.monitor.summary import INSIDE
from dzero.overrides import composed, spelt_out
from dzero.plan.preflight import resolve_run
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


def resolved(words: Sequence[str]) -> RunConfig:
    """The run that words of train.py describe, as it is checked before anything starts."""
    return resolve_run(composed(words, CONF), words)


class Ran(NamedTuple):
    """What one rank knows of a run."""

    losses: list[float]  # of each step
    norms: list[float]  # of each step, before clipping
    held_out: list[float]  # losses of evaluations
    best: dict[str, Any]  # loss and step of the lowest, of this run or those that it resumed, and how many came after
    steps: int  # in all
    kept: dict[str, int]  # bytes of states between steps
    foreseen: dict[str, int]  # the same by the table
    agrees: bool  # whether measured traffic was the theory's
    sent: dict[str, int]  # bytes of the whole run by phase
    told: str  # what was printed


class Watched(Trainer):
    """Keeps the norm of each step."""

    norms: list[float]

    def step(self, *given: Any, **named: Any) -> Any:
        shared = super().step(*given, **named)
        self.norms.append(self.optim.last_decision.norm)
        return shared


def ran(rank: int, ranks: int, words: Sequence[str], folder: Path, *saved: str) -> Ran:
    """`train.py words` on the ranks of the pool; the run's folder is `folder`.

    saved: before the first step the model, or its adapters, are saved into the folder's `before` if that is named;
    after the last one, the merged model into `merged`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with redirect_stdout(StringIO()) as told:
        trainer = Watched(composed(words, CONF), folder, torch.device("cpu"))
        trainer.norms = []
        if "before" in saved:
            save_pretrained(trainer.sharded, folder / "before")
        summary, steps = None, trainer.done_steps
        if trainer.is_done:
            trainer.close()
        else:
            summary = trainer.run()
            steps += summary.steps
        if "merged" in saved:
            save_pretrained(trainer.sharded, folder / "merged", merge=True)
    sent = testing.by_phase(summary.traffic) if summary is not None else {}
    return Ran(
        losses=trainer.recorder.losses,
        norms=trainer.norms,
        held_out=trainer.held_out.losses,
        best=trainer.held_out.state_dict(),
        steps=steps,
        kept=trainer.optim.state_bytes(),
        foreseen=testing.resting_bytes(trainer.sharded),
        agrees=summary is None or agrees(summary),
        sent={phase: traffic.sent_bytes for phase, traffic in sent.items()},
        told=told.getvalue(),
    )

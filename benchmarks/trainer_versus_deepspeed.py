"""Is `DzeroTrainer` with a ds_config.json as exact, fast and small as DeepSpeed itself, both in transformers' Trainer?

    DS_ACCELERATOR=cpu python benchmarks/trainer_versus_deepspeed.py
    DS_ACCELERATOR=cpu python benchmarks/trainer_versus_deepspeed.py --parts losses
    DS_ACCELERATOR=cpu python benchmarks/trainer_versus_deepspeed.py --parts speed --precisions bf16 --rounds 5

Two gloo ranks of one thread each, on a CPU; the sides: benchmarks/trainer_sides.py. Plain Trainer with DDP is what both
are held against. `losses`: a tiny Llama and chats of very different lengths, 100 steps of 4 microbatches, with warm-up,
cosine, clipping that bites and evaluation; the largest difference from plain Trainer over the steps. `speed`: 24 M
parameters, steps of 2 microbatches of 256 tokens per rank; the three sides of a configuration take turns, two steps
each.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from children import Children
from harness import RANKS, Measured, measure
from report import append_row, table, write_table
from stats import ratio_of_medians
from trainer_sides import SIDES, Setting, log, serve

NAME = "trainer_versus_deepspeed"
ALLOWED = 1e-3
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
CPU = {"device": "cpu"}
ZERO: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 1, offload": {"stage": 1, "offload_optimizer": CPU},
    "stage 2, offload": {"stage": 2, "offload_optimizer": CPU},
    "stage 3, offload": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}
TIMED = ("stage 1", "stage 2", "stage 3", "stage 2, offload", "stage 3, offload")
CHATS = Setting(
    hidden=64,
    layers=2,
    vocab=256,
    tokens=96,
    samples=2,
    accumulate=4,
    chats=True,
    evaluate=True,
    max_norm=0.5,
    lr=3e-3,
    samples_held=512,
    steps=100,
    warm_up=10,
)
LARGE = Setting(
    hidden=512,
    layers=6,
    vocab=4096,
    tokens=256,
    samples=1,
    accumulate=2,
    chats=False,
    evaluate=False,
    max_norm=0.5,
    lr=3e-4,
    samples_held=512,
    steps=10_000,
    warm_up=10,
)
Logs = list[dict[str, float]]


def configured(setting: Setting, zero: str, folder: Path, *, bf16: bool) -> Setting:
    """The setting with a ds_config.json in `folder`."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": ZERO[zero],
        "optimizer": OPTIMIZER,
        "steps_per_print": 1 << 40,
    }
    path = folder / f"{zero.replace(', ', '_').replace(' ', '_')}.json"
    path.write_text(json.dumps(config))
    return replace(setting, file=str(path), bf16=bf16)


@dataclass(frozen=True)
class Deviation:
    """The largest difference from plain Trainer over the steps; of the norm, relative; None: not logged.

    rate_after: of the logged rate from plain Trainer's at the next step.
    """

    loss: float
    evaluated: float
    norm: float | None
    rate: float
    rate_after: float
    last_loss: float

    @classmethod
    def of(cls, logs: Logs, truth: Logs) -> Deviation:
        """Compare step by step."""
        norm, norms = series(logs, "grad_norm"), series(truth, "grad_norm")
        rate, rates = series(logs, "learning_rate"), series(truth, "learning_rate")
        return cls(
            loss=largest(series(logs, "loss"), series(truth, "loss")),
            evaluated=largest(series(logs, "eval_loss"), series(truth, "eval_loss")),
            norm=max(abs(a / b - 1) for a, b in zip(norm, norms, strict=True)) if norm else None,
            rate=largest(rate, rates),
            rate_after=largest(rate[:-1], rates[1:]),
            last_loss=series(logs, "loss")[-1],
        )


def series(logs: Logs, key: str) -> list[float]:
    """What was logged under a key, step by step."""
    return [row[key] for row in logs if key in row]


def largest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def logged(side: str, settings: Sequence[Setting], ranks: int = RANKS) -> list[Logs]:
    """What rank 0 of a side logs with each setting."""
    with tempfile.TemporaryDirectory() as folder:
        children = Children(ranks, log, side, settings, f"{folder}/group", ranks)
        children.close()
        found: list[Logs] = children.first[0]
        return found


def losses(folder: Path, *, bf16: bool) -> dict[str, Any]:
    """Deviations by side and configuration."""
    truth_of = configured(CHATS, "stage 0", folder, bf16=False)
    truth = logged("plain", [truth_of])[0]
    alone = logged("plain", [replace(truth_of, samples=RANKS * CHATS.samples)], ranks=1)[0]
    found = {"plain, one rank": Deviation.of(alone, truth)}
    if bf16:
        found["plain, bf16"] = Deviation.of(logged("plain", [replace(truth_of, bf16=True)])[0], truth)
    settings = [configured(CHATS, zero, folder, bf16=bf16) for zero in ZERO]
    for side in ("dzero", "deepspeed"):
        for zero, logs in zip(ZERO, logged(side, settings), strict=True):
            found[f"{side}, {zero}"] = Deviation.of(logs, truth)
    clipped = sum(norm > CHATS.max_norm for norm in series(truth, "grad_norm"))
    first, *_, last = series(truth, "loss")
    return {
        "clipped_steps": clipped,
        "plain": {"first_loss": first, "last_loss": last},
        "deviations": {name: asdict(each) for name, each in found.items()},
    }


def losses_text(found: dict[str, Any], precision: str) -> str:
    columns = {
        "loss": "loss",
        "evaluated": "evaluated loss",
        "norm": "norm, relative",
        "rate": "rate",
        "rate_after": "rate, from the next step's",
    }
    rows = []
    for name, each in found["deviations"].items():
        cells = ["not logged" if each[key] is None else f"{each[key]:.1e}" for key in columns]
        within = "yes" if max(each["loss"], each["evaluated"]) <= ALLOWED else "no"
        rows.append([name, *cells, f"{each['last_loss']:.4f}", within])
    plain = found["plain"]
    title = (
        f"{precision}: largest difference over {CHATS.steps} steps from plain Trainer in fp32, two ranks, which clips "
        f"{found['clipped_steps']} steps and whose loss goes from {plain['first_loss']:.4f} to {plain['last_loss']:.4f}"
    )
    header = ["side", *columns.values(), "last loss", f"losses within {ALLOWED:g}"]
    return f"{title}\n\n{table(header, rows)}"


def speed(zero: str, folder: Path, *, bf16: bool, rounds: int, steps: int) -> dict[str, Any]:
    """The three sides of one configuration, by turns."""
    setting = configured(LARGE, zero, folder, bf16=bf16)
    before = os.getloadavg()
    results = measure(SIDES, setting, rounds=rounds, steps=steps, serve=serve)
    return {"load": [before, os.getloadavg()], "sides": {side: asdict(each) for side, each in results.items()}}


def speed_text(found: dict[str, Any], precision: str) -> str:
    tokens, rows = RANKS * LARGE.accumulate * LARGE.samples * LARGE.tokens, []
    for zero, each in found.items():
        sides = {side: Measured(**values) for side, values in each["sides"].items()}
        step_s = {side: m.step_s for side, m in sides.items()}
        cpu_s = {side: m.cpu_s for side, m in sides.items()}
        peaks = {side: m.peak_bytes for side, m in sides.items()}
        load = f"{each['load'][0][0]:.1f} to {each['load'][1][0]:.1f}"
        rows.append(
            [
                zero,
                " · ".join(f"{tokens / median(step_s[side]):.0f}" for side in SIDES),
                ratio_of_medians(step_s["deepspeed"], step_s["dzero"]),
                ratio_of_medians(cpu_s["deepspeed"], cpu_s["dzero"]),
                ratio_of_medians(step_s["plain"], step_s["dzero"]),
                ratio_of_medians(cpu_s["plain"], cpu_s["dzero"]),
                " · ".join(f"{peaks[side] / 2**20:.0f}" for side in SIDES),
                f"{peaks['dzero'] / peaks['deepspeed']:.2f}",
                load,
            ]
        )
    sides = " · ".join(SIDES)
    header = ["configuration", f"tokens/s: {sides}", "dzero over DeepSpeed", "by processor time"]
    header += ["dzero over plain", "by processor time", f"peak MiB per rank: {sides}", "dzero over DeepSpeed", "load"]
    return f"{precision}: speed and peak resident memory above the start\n\n{table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["losses", "speed"], default=["losses", "speed"])
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--zero", nargs="+", choices=list(TIMED), default=list(TIMED), help="for speed")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="per side and round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for part, precision in product(options.parts, options.precisions):
            bf16, found = precision == "bf16", {}
            if part == "losses":
                setting, found = CHATS, losses(folder, bf16=bf16)
                text = losses_text(found, precision)
            else:
                setting = LARGE
                for zero in options.zero:
                    found[zero] = speed(zero, folder, bf16=bf16, rounds=options.rounds, steps=options.steps)
                    print(speed_text({zero: found[zero]}, precision), flush=True)
                text = speed_text(found, precision)
            config = {**asdict(setting), "precision": precision, "ranks": RANKS, "threads": 1, "turn": options.steps}
            append_row(NAME, {"part": part, "config": config, "found": found})
            write_table(f"{NAME}_{part}_{precision}", text)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()

"""What do the recorder, the board and the rest of the trainer cost per step, beside forward, backward and update?

    python benchmarks/recording.py                     1 rank, models of 8 to 128 layers, board and log written

Processor milliseconds of the main thread in a whole `train.py` run, by what is called; medians of the steps after the
tenth. `data` is the next batch of a tokenised text. The figures that the trainer takes from the optimizer's own step
(norm, traffic) cost nothing here.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from report import append_row, table, write_table

from dzero import config
from dzero.data.stream import SequenceStream
from dzero.monitor.meter import Meter
from dzero.monitor.sinks import Monitor
from dzero.trainer.metrics import MetricsRecorder
from dzero.trainer.trainer import Trainer

CONF = Path(__file__).parents[1] / "conf"
WARMUP = 10
TINY = "model.hidden_size=16 model.heads=2 model.kv_heads=1 model.ffn_size=16 train.sequence_tokens=16"
CALLED: dict[str, list[tuple[type, str]]] = {
    "record": [(Meter, "begin"), *((MetricsRecorder, name) for name in ("share", "before_update", "end_step"))],
    "log and board": [(Monitor, "step")],
    "data": [(SequenceStream, "next")],
}


class Timed:
    """Adds up the thread's processor seconds inside of some methods, by their name in `CALLED`."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []
        for what, methods in CALLED.items():
            for owner, name in methods:
                setattr(owner, name, self._timed(what, getattr(owner, name)))

    def _timed(self, what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent_s[what] += time.thread_time() - began_s

        return run

    def end_step(self) -> None:
        """Keep what was spent since the last call."""
        self.steps.append(dict(self.spent_s))
        self.spent_s.clear()


def measured(timed: Timed, layers: int, steps: int, folder: Path) -> dict[str, float]:
    """Median milliseconds of a step, by what is called, and of all of the step."""
    settings = [*TINY.split(), f"model.layers={layers}", f"train.steps={steps}", "train.evaluate_batches=0"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        run = config.resolve(compose("config", overrides=[*settings, "zero.stage=3", "monitor.plan=false"]))
    trainer = Trainer(run, folder, torch.device("cpu"))
    step, whole = trainer.step, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        shared = step(*args, **kwargs)
        whole.append(time.thread_time() - began_s)
        timed.end_step()
        return shared

    trainer.step = counted  # type: ignore[method-assign]
    timed.steps.clear()
    timed.spent_s.clear()
    trainer.run()
    found = {what: 1e3 * median(each.get(what, 0.0) for each in timed.steps[WARMUP:]) for what in CALLED}
    return {**found, "whole step": 1e3 * median(whole[WARMUP:])}


def main() -> None:
    """Measure, keep a row, write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config.register()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            timed = Timed()
            found = {
                layers: measured(timed, layers, options.steps, Path(folder) / str(layers)) for layers in options.layers
            }
    finally:
        dist.destroy_process_group()
    append_row("recording", {"config": {"steps": options.steps, "settings": TINY}, "ms": found})
    rows = [[layers, *(f"{each:.2f}" for each in ms.values())] for layers, ms in found.items()]
    title = "processor ms of a step, main thread, one rank of train.py at stage 3"
    write_table("recording", f"{title}\n\n{table(['layers', *CALLED, 'whole step'], rows)}")


if __name__ == "__main__":
    main()

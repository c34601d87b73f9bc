"""What does the loss of a 1 B model cost on one GPU, through train.py's own step, and how is it computed best?

    python benchmarks/gpu_loss.py --samples 8

    side       the loss
    whole      logits of all tokens in fp32 at once (block.loss_tiles=1)
    compiled   the same, with torch.compile over what comes after the head: for comparison, no setting of train.py
    4, 32      in so many tiles, by tokens, their logits computed again in backward
    default    what train.py takes unasked: tiles of 128 MiB of logits

One rank, stage 0, blocks compiled. Timed is `Trainer.step` as `python train.py` makes it: data, metrics and update too.
Every side is a trainer of its own from the same weights and the same tokens, one after the other; its row and the table
are written at once, so a run that is cut off keeps what it had. Needs CUDA; `--device cpu` tries the code, tiny.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import torch
from devices import Device
from report import append_row, results_kept, table, write_table

from dzero.errors import first_line
from dzero.hardware import peak_flops
from dzero.launch.worker import choose_allocator
from dzero.overrides import composed
from dzero.parallel.loss import sum_of_losses
from dzero.trainer.trainer import Trainer

CONF = Path(__file__).parent.parent / "conf"
SIDES: dict[str, int | None] = {"whole": 1, "compiled": 1, "4": 4, "32": 32, "default": None}
"""block.loss_tiles of each."""
WARM_STEPS = 4
TINY = "model.hidden_size=64 model.layers=2 model.heads=2 model.kv_heads=1 model.ffn_size=96 block.compile=false"
HEADER = ["sequences", "loss", "tokens/s", "step, ms", "MFU", "peak GiB", "last loss"]


def main() -> None:
    options = _options()
    choose_allocator()  # as train.py does, before CUDA begins
    device = Device(options.device)
    rows: list[list[object]] = []
    with device.group(), tempfile.TemporaryDirectory() as folder:
        for samples in options.samples:
            for side in options.sides:
                try:
                    rows.append(_measure(side, samples, options, device, Path(folder)))
                except torch.OutOfMemoryError as error:
                    rows.append([samples, side, *[""] * 4, "out of memory"])
                    append_row("gpu_loss", {"config": {"samples": samples, "side": side}, "finding": first_line(error)})
                torch.compiler.reset()
                device.free()
                write_table("gpu_loss", f"{device.name}, stage 0, blocks compiled\n\n{table(HEADER, rows)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 8, 16], help="sequences per step")
    parser.add_argument("--tokens", type=int, default=2048, help="per sequence")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each side")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    options = parser.parse_args()
    if options.device == "cpu":
        options.samples, options.tokens, options.steps = [32], 32, 2
    return options


@contextmanager
def train_steps(
    device: Device, folder: Path, *, samples: int, tokens: int, steps: int, tiles: int | None
) -> Iterator[tuple[Callable[[], float], float | None]]:
    """Give a trainer's step on random tokens, which returns its loss, and the model FLOPs of a token, if known.

    Raises AssertionError in a step beyond `steps`, of which the schedule knows.
    """
    ids, vocab = folder / f"{samples}_{steps}.npy", 128_256 if device.on_gpu else 512
    np.save(ids, np.random.default_rng(0).integers(vocab, size=2 * steps * samples * (tokens + 1)).astype(np.int32))
    words = [f"data.path={ids}", f"data.vocab_size={vocab}", f"model.vocab_size={vocab}", "zero.stage=0"]
    words += [f"train.sequence_tokens={tokens}", f"train.microbatch_sequences={samples}", f"train.steps={steps}"]
    words += ["model=llama_1b"] if device.on_gpu else TINY.split()
    words += [f"block.loss_tiles={'null' if tiles is None else tiles}", "monitor.tensorboard=false"]
    words += [f"launch.device={device.torch.type}"]
    trainer = Trainer(composed(words, CONF), folder, device.torch)
    heard, count = mock.Mock(), iter(range(1, steps + 1))

    def step() -> float:
        number = next(count, 0)
        assert number, f"more than {steps} steps"
        return trainer.step(number, heard).loss

    try:
        yield step, trainer.built.flops_per_token
    finally:
        trainer.optim.synchronize()


def _measure(side: str, samples: int, options: argparse.Namespace, device: Device, folder: Path) -> list[object]:
    """Train the warm and the measured steps of one side, append its row, and return its line of the table."""
    backend = "inductor" if device.on_gpu else "eager"
    loss = torch.compile(sum_of_losses, backend=backend) if side == "compiled" else sum_of_losses
    found: list[float] = []
    sizes = {"samples": samples, "tokens": options.tokens}
    with (
        mock.patch("dzero.parallel.tiling.loss.sum_of_losses", loss),
        train_steps(device, folder, **sizes, steps=WARM_STEPS + options.steps, tiles=SIDES[side]) as (step, flops),
    ):
        for _ in range(WARM_STEPS):
            step()
        device.reset_peak()
        seconds = [device.seconds(lambda: found.append(step())) for _ in range(options.steps)]
    peak_bytes, peak = device.peak_bytes(), peak_flops(device.torch, torch.bfloat16)
    speed = samples * options.tokens / median(seconds)
    share = speed * flops / peak if flops and peak else None
    mfu = "" if share is None else f"{share:.1%}"
    finding = f"{samples} sequences, loss {side}: {speed:.0f} tokens/s, MFU {mfu or 'unknown'}"
    row = {"config": {**sizes, "side": side, "steps": options.steps}, "gpu": device.name, "finding": finding}
    append_row("gpu_loss", {**row, "step_s": seconds, "losses": found, "mfu": share, "peak_bytes": peak_bytes})
    milliseconds = f"{median(seconds) * 1e3:.1f}"
    return [samples, side, f"{speed:.0f}", milliseconds, mfu, f"{peak_bytes / 2**30:.1f}", f"{found[-1]:.4f}"]


if __name__ == "__main__":
    with results_kept(sys.argv[1:]):
        main()

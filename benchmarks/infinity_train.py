"""How many tokens/s does a llama train with its states on each tier? The device is the CPU, which offload takes time
from and gives no memory to; on a GPU: gpu_offload.py.

    python benchmarks/infinity_train.py --path DIR --rounds 11
    python benchmarks/infinity_train.py --smoke

    side        one turn: a step that fills the pipeline, then `--steps` on the clock
    compute     forward and backward, no optimizer
    device      all states on the device
    host        gradients, masters and moments on the host (offload=host)
    disk        masters and moments on disk (offload=disk)
    all_disk    parameters and gradients too (offload=infinity, stage 3)
    transfer    the store alone: the pieces of `disk`, in and out side by side

The losses of all tiers must be the same.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median

import torch
import torch.distributed as dist
from infinity_rounds import Found, Series, Setting, Turn, efficiency_bound, measure
from infinity_sides import Transfers, bandwidth
from report import append_row, table, write_table
from sides import ADAM
from stats import ratio_of_medians
from workload import Batches, Workload, loss_of

from dzero import AdamW, ZeroConfig, shard
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama
from dzero.offload.direct_io import Direction

FILL_STEPS = 1
TIERS = ("device", "host", "disk", "all_disk")


class Training:
    """The llama with its states somewhere. `compute`: without an optimizer."""

    def __init__(self, setting: Setting, side: str) -> None:
        workload = Workload(model="21m", samples=setting.samples, tokens=setting.tokens)
        shape = LlamaShape(vocab_size=256, hidden_size=64, layers=2, heads=2, kv_heads=2, ffn_size=128)
        torch.manual_seed(0)
        model = Llama(shape) if setting.small else workload.build()
        self.params = sum(param.numel() for param in model.parameters())
        zero = ZeroConfig(stage=3 if side == "all_disk" else 2)
        self._sharded = shard(model, zero, offload=setting.offload(side))
        self.optim = None if side == "compute" else AdamW(self._sharded, **ADAM, threads=setting.threads)
        self._batches, self._done, self._steps = Batches(workload), 0, setting.steps

    def __call__(self) -> Found:
        for _ in range(FILL_STEPS):
            self._step()
        if self.optim is not None:
            self.optim.offload.take_use()
        start = time.perf_counter()
        losses = [self._step() for _ in range(self._steps)]
        found: Found = {"step_s": (time.perf_counter() - start) / self._steps, "params": self.params}
        if self.optim is not None:
            found["losses"] = [float(loss) for loss in losses]
            use = self.optim.offload.take_use()
            found["bytes"] = sum(use[lane].moved_bytes for lane in use if lane.startswith(("LOAD", "SPILL")))
            found["bytes"] /= self._steps
            found["waited_s"] = sum(each.waited_s for each in use.values()) / self._steps
            self.optim.synchronize()
        return found

    def _step(self) -> torch.Tensor:
        loss = loss_of(self._sharded.model, self._batches.get(self._done, dist.get_rank()))
        self._done += 1
        loss.backward()  # type: ignore[no-untyped-call]
        if self.optim is None:
            self._sharded.model.zero_grad()
        else:
            self.optim.step()
        return loss.detach()


def train_sides(setting: Setting) -> dict[str, Turn]:
    """Every tier, the model alone, and the store alone."""
    sides = {side: Training(setting, side) for side in ("compute", *TIERS)}
    on_disk = sides["disk"].optim
    assert on_disk is not None
    alone = Transfers.like(on_disk, setting)
    return {**sides, "transfer": lambda: alone.turn(Direction.READ, Direction.WRITE)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the disk")
    parser.add_argument("--samples", type=int, default=4, help="of a step")
    parser.add_argument("--tokens", type=int, default=256, help="of a sample")
    parser.add_argument("--threads", type=int, default=2, help="of kernels")
    parser.add_argument("--block-mib", type=int, default=16)
    parser.add_argument("--io-threads", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="on the clock, per turn")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--smoke", action="store_true", help="seconds: tiny, nothing is written")
    options = parser.parse_args()
    if options.smoke:
        vars(options).update({"rounds": 2, "block_mib": 1, "samples": 1, "tokens": 32, "steps": 1})
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        setting = Setting(
            path=folder,
            threads=options.threads,
            block_bytes=options.block_mib << 20,
            io_threads=options.io_threads,
            tokens=options.tokens,
            samples=options.samples,
            steps=options.steps,
            small=options.smoke,
        )
        series, _ = measure({"train": train_sides}, setting, 1, options.rounds)
    text = report(series, options)
    if options.smoke:
        print(text)
    else:
        write_table("infinity_train", text)


def report(series: Series, options: argparse.Namespace) -> str:
    """Row and table. Raises RuntimeError where a tier changes the losses."""
    for side in TIERS:
        if series[side]["losses"] != series["device"]["losses"]:
            raise RuntimeError(f"the losses of {side} are not those of device")
    step_s = {side: found["step_s"] for side, found in series.items() if "step_s" in found}
    tokens, params, compute_s = options.samples * options.tokens, series["compute"]["params"][0], step_s["compute"]
    rows = []
    for side, seconds in step_s.items():
        found = series[side]
        moved, waited = median(found.get("bytes", [0])), median(found.get("waited_s", [0.0])) * 1e3
        bound = efficiency_bound(params, tokens, moved, bandwidth(series), median(compute_s)) if moved else 1.0
        speeds = [f"{tokens / median(seconds):,.0f}", ratio_of_medians(step_s["device"], seconds)]
        reached = ratio_of_medians(compute_s, seconds)
        rows.append([side, *speeds, f"{moved / 1e6:.0f}", f"{waited:.0f}", f"{bound:.2f}", reached])
    if not options.smoke:
        config = {key: value for key, value in vars(options).items() if key not in ("path", "smoke")}
        append_row("infinity_train", {"device": "cpu", "config": config, "sides": series})
    title = f"{params / 1e6:.0f} M parameters, {tokens} tokens per step, 1 rank, {options.rounds} rounds"
    title += f", the CPU as the device; the same losses on every tier; the disk: {bandwidth(series) / 1e9:.2f} GB/s"
    header = ["states", "tokens/s", "over device", "MB to and from disk", "waited, ms"]
    return "\n".join([title, "", table([*header, "efficiency bound", "measured"], rows)])


if __name__ == "__main__":
    main()

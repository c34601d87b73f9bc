"""How much of one GPU does a 1 B model in bf16 use?

    python benchmarks/gpu_1b.py --samples 4 --tokens 2048

For each stage and with torch.compile per block off and on: tokens/s, MFU against the datasheet's dense bf16 peak (empty
for GPUs that dzero/hardware.py does not list), the same FLOPs against a matmul ceiling measured in this run, and peak
memory. One rank, nccl. Combinations run one after another, each from the same weights; the ceiling is measured before
and after, so that a GPU that slows down when warm shows it. Needs CUDA.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from devices import TINY, Device
from omegaconf import OmegaConf
from report import append_row, results_kept, table, write_table

from dzero import AdamW, ZeroConfig, make_mesh, shard
from dzero.hardware import peak_flops
from dzero.models.build import build, flops_per_token, materialiser
from dzero.models.config import ModelConfig
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig

CONF = Path(__file__).parent.parent / "conf" / "model" / "llama_1b.yaml"
WARM_STEPS = 5
SIZE = {True: "1.24 B parameters", False: "a tiny model"}
"""What a GPU trains, and what a CPU."""


@dataclass(frozen=True)
class Outcome:
    """One combination: seconds of each step, model FLOPs of a step, losses, peak bytes allocated."""

    stage: int
    compiled: bool
    step_s: list[float]
    step_flops: float
    losses: list[float]
    peak_bytes: int


def main() -> None:
    options = _options()
    device = Device(options.device)
    with device.group():
        ceilings = [matmul_ceiling(device)]
        combinations = [(stage, compiled) for stage in options.stages for compiled in options.compile]
        outcomes = [_train(stage, compiled, options, device) for stage, compiled in combinations]
        ceilings.append(matmul_ceiling(device))
    _report(options, outcomes, ceilings, device)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the code, tiny")
    parser.add_argument("--samples", type=int, default=4, help="sequences per step")
    parser.add_argument("--tokens", type=int, default=2048, help="per sequence")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each combination")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 2, 3])
    parser.add_argument("--checkpoint", default="none", help="activation checkpointing: none, selective, full")
    parser.add_argument("--compile", choices=["both", "on", "off"], default="both", help="blocks by torch.compile")
    options = parser.parse_args()
    options.compile = {"both": [False, True], "on": [True], "off": [False]}[options.compile]
    if options.device == "cpu":
        options.samples, options.tokens, options.steps, options.compile = 1, 32, 2, [False]
    return options


def matmul_ceiling(device: Device, repeats: int = 50) -> float:
    """FLOP/s of large square bf16 matmuls, the best this device does now."""
    size = 8192 if device.on_gpu else 128
    a, b = (torch.randn(size, size, device=device.torch, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(10):
        torch.mm(a, b, out=out)
    return 2 * size**3 / min(device.seconds(lambda: torch.mm(a, b, out=out)) for _ in range(repeats))


def _train(stage: int, compiled: bool, options: argparse.Namespace, device: Device) -> Outcome:
    step, flops = llama_step(device, options, stage, compiled)
    for _ in range(WARM_STEPS):
        step()
    device.reset_peak()
    seconds, losses = [], []
    for _ in range(options.steps):
        device.synchronize()
        start = time.perf_counter()
        loss = step()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    outcome = Outcome(stage, compiled, seconds, flops, losses, device.peak_bytes())
    ms = f"{median(seconds) * 1e3:.1f} ms a step"  # at once: a run that is cut off has told what it had
    print(f"stage {stage}, compile {'on' if compiled else 'off'}: {ms}, loss {losses[-1]:.4f}", flush=True)
    del step, loss
    torch.compiler.reset()
    device.free()
    return outcome


def llama_step(
    device: Device, options: argparse.Namespace, stage: int, compiled: bool
) -> tuple[Callable[[], torch.Tensor], float]:
    """Return a step on random tokens (its time does not depend on them) and its model FLOPs."""
    values = OmegaConf.to_container(OmegaConf.load(CONF))
    assert isinstance(values, dict)
    config = ModelConfig(**{str(key): value for key, value in values.items()}) if device.on_gpu else TINY
    model = build(config)
    flops = flops_per_token(model, options.tokens) * options.samples * options.tokens
    kind = device.torch.type
    apply_blocks(model, BlockConfig(activation_checkpoint=options.checkpoint, compile=compiled), kind)
    fill = materialiser(config, model, seed=0, device=device.torch)
    sharded = shard(model, ZeroConfig(stage=stage), mesh=make_mesh(kind), init=fill)
    optimizer = AdamW(sharded, lr=1e-4)
    generator = torch.Generator(device=device.torch).manual_seed(0)
    shape = (options.samples, options.tokens + 1)

    def step() -> torch.Tensor:
        batch = torch.randint(config.vocab_size or 0, shape, device=device.torch, generator=generator)
        logits = sharded.model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, flops


def _report(options: argparse.Namespace, outcomes: list[Outcome], ceilings: list[float], device: Device) -> None:
    peak, ceiling = peak_flops(device.torch, torch.bfloat16), max(ceilings)
    rows = []
    for o in outcomes:
        speed = o.step_flops / median(o.step_s)
        rows.append(
            [
                f"stage {o.stage}",
                "on" if o.compiled else "off",
                f"{options.samples * options.tokens / median(o.step_s):.0f}",
                f"{speed / peak:.1%}" if peak else "",
                f"{speed / ceiling:.1%}",
                f"{o.peak_bytes / 2**30:.1f}",
                f"{o.losses[-1]:.4f}",
            ]
        )
    best = max(rows, key=lambda row: float(row[2]))
    finding = f"{SIZE[device.on_gpu]}: {best[0]} with compile {best[1]} is fastest, {best[2]} tokens/s, MFU {best[3]}, "
    finding += f"{best[4]} of a matmul ceiling of {ceiling / 1e12:.0f} TFLOP/s"
    gpu = {"name": device.name, "peak_flops": peak, "matmul_flops": ceilings}
    sides = [vars(o) for o in outcomes]
    append_row("gpu_1b", {"config": vars(options), "gpu": gpu, "finding": finding, "sides": sides})
    header = ["side", "compile", "tokens/s", "MFU", "of measured matmul", "peak GiB", "last loss"]
    title = f"{device.name}, matmul {ceiling / 1e12:.0f} TFLOP/s, {options.samples} x {options.tokens} tokens"
    write_table("gpu_1b", f"{title}\n\n{table(header, rows)}")


if __name__ == "__main__":
    with results_kept(sys.argv[1:]):
        main()

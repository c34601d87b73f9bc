"""How much of one GPU does a 1 B model in bf16 use?

    python benchmarks/gpu_1b.py --samples 4 --tokens 2048

For each stage and with torch.compile per block off and on: tokens/s, MFU against the datasheet's dense bf16 peak (empty
for GPUs that dzero/hardware.py does not list), the same FLOPs against a matmul ceiling measured in this run, and peak
memory. One rank, nccl. Combinations run one after another, each from the same weights; the ceiling is measured before
and after, so that a GPU that slows down when warm shows it. Needs CUDA.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import OmegaConf
from report import append_row, table, write_table

from dzero import AdamW, ZeroConfig, shard
from dzero.hardware import peak_flops
from dzero.models.build import build, flops_per_token, materialiser
from dzero.models.config import ModelConfig
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig

CONF = Path(__file__).parent.parent / "conf" / "model" / "llama_1b.yaml"
WARM_STEPS = 5


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
    if not torch.cuda.is_available():
        raise SystemExit("gpu_1b.py measures a CUDA GPU and torch finds none here; on a CPU run step_time.py")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            init_method=f"file://{folder}/group",
            rank=0,
            world_size=1,
            timeout=timedelta(minutes=5),
            device_id=device,
        )
        try:
            ceilings = [matmul_ceiling()]
            combinations = [(stage, compiled) for stage in options.stages for compiled in (False, True)]
            outcomes = [_train(stage, compiled, options) for stage, compiled in combinations]
            ceilings.append(matmul_ceiling())
        finally:
            dist.destroy_process_group()
    _report(options, outcomes, ceilings, device)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4, help="sequences per step")
    parser.add_argument("--tokens", type=int, default=2048, help="per sequence")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each combination")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 2, 3])
    parser.add_argument("--checkpoint", default="none", help="activation checkpointing: none, selective, full")
    return parser.parse_args()


def matmul_ceiling(size: int = 8192, repeats: int = 50) -> float:
    """FLOP/s of large square bf16 matmuls, the best this GPU does now."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(10):
        torch.mm(a, b, out=out)
    return 2 * size**3 / min(_timed(lambda: torch.mm(a, b, out=out)) for _ in range(repeats))


def _timed(run: Callable[[], object]) -> float:
    """Seconds of `run` on an idle GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _train(stage: int, compiled: bool, options: argparse.Namespace) -> Outcome:
    step, flops = _build(stage, compiled, options)
    for _ in range(WARM_STEPS):
        step()
    torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for _ in range(options.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    outcome = Outcome(stage, compiled, seconds, flops, losses, torch.cuda.max_memory_allocated())
    del step, loss
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return outcome


def _build(stage: int, compiled: bool, options: argparse.Namespace) -> tuple[Callable[[], torch.Tensor], float]:
    """A step on random tokens (its time does not depend on them) and its model FLOPs."""
    values = OmegaConf.to_container(OmegaConf.load(CONF))
    assert isinstance(values, dict)
    config = ModelConfig(**{str(key): value for key, value in values.items()})
    model = build(config)
    flops = flops_per_token(model, options.tokens) * options.samples * options.tokens
    apply_blocks(model, BlockConfig(activation_checkpoint=options.checkpoint, compile=compiled), "cuda")
    fill = materialiser(config, model, seed=0, device=torch.device("cuda", 0))
    sharded = shard(model, ZeroConfig(stage=stage), materialise=fill)
    optimizer = AdamW(sharded, lr=1e-4)
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (options.samples, options.tokens + 1)

    def step() -> torch.Tensor:
        batch = torch.randint(config.vocab_size or 0, shape, device="cuda", generator=generator)
        logits = sharded.model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, flops


def _report(options: argparse.Namespace, outcomes: list[Outcome], ceilings: list[float], device: torch.device) -> None:
    peak, ceiling = peak_flops(device, torch.bfloat16), max(ceilings)
    gpu = {"name": torch.cuda.get_device_name(device), "peak_flops": peak, "matmul_flops": ceilings}
    append_row("gpu_1b", {"config": vars(options), "gpu": gpu, "sides": [vars(o) for o in outcomes]})
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
    header = ["side", "compile", "tokens/s", "MFU", "of measured matmul", "peak GiB", "last loss"]
    title = f"{gpu['name']}, matmul {ceiling / 1e12:.0f} TFLOP/s, {options.samples} x {options.tokens} tokens"
    write_table("gpu_1b", f"{title}\n\n{table(header, rows)}")


if __name__ == "__main__":
    main()

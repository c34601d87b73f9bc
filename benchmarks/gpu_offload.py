"""Is offloaded training practical on one GPU, and how large a model does it reach? Needs CUDA; `--device cpu` tries it.

    python benchmarks/gpu_offload.py --rounds 7        # speed
    python benchmarks/gpu_offload.py --largest         # size

Speed (sides: offload_sides.py): tokens/s over dzero_resident's. Goal: 0.9 for dzero's sides on the host wherever its
update (busy time of its lane, where that side runs) takes no longer than the compute (a step of dzero_resident, its own
update included). Sides on disk have no goal here: `disk, ms` is the busy time of their busiest lane of the disk. A step
is one batch of `--samples` sequences, since torchao does not accumulate; activations are recomputed, since who offloads
is short of memory (`--checkpoint none` for the harder case). One process, one rank, the same weights and tokens for
all. Sides take turns in shuffled order; a turn visits every batch size: 2 steps that fill the pipeline, then `--steps`
on the clock, which stops with updates under way as it started. Sides stay alive between turns where all of them fit the
memory, since page-locking takes longer than a turn; else each is built anew for its turn, and its losses start over.
The report says which. What is out of memory or cannot run is left out with a note. `clipped`: part of dzero's steps
whose norm was above the limit; there overlap=backward undoes what it did early.

Size: bisection over the layers of a llama (offload_largest.py) that begins with the goal, every candidate in a process
of its own: built on meta, filled part by part, two steps, finite losses. Goal: 16 bytes per parameter (bf16 weight and
gradient, fp32 master and moments) are 0.85 of HBM and DRAM together.

`--device cpu` trains a tiny model to see that the code runs, and leaves no results: "device" and "host" are one there.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import replace
from statistics import median

import torch
from devices import TINY, Device
from offload_largest import candidate, largest
from offload_sides import SIDES, LeftOutError, Setting, Side
from omegaconf import OmegaConf
from report import append_row, plot_bars, results_kept, table, write_table
from stats import ratio_of_medians
from torch import Tensor
from workload import CONF, Batches, Workload

from dzero.hardware import device_memory_bytes, format_bytes, host_available_bytes, host_memory_bytes
from dzero.models.build import build, count
from dzero.models.config import ModelConfig
from dzero.parallel.config import BlockConfig
from dzero.zero.offload_config import DiskConfig

GOAL, RESIDENT, PEER, BATCHES = 0.9, "dzero_resident", "fsdp2_cpu", 8
Series = dict[int, dict[str, dict[str, list[float]]]]
"""By samples, side and quantity: one number per turn, of `losses` one per step."""


def main() -> None:
    options = _options()
    if options.largest and options.candidate is None:
        largest(options)
        return
    device = Device(options.device)
    name = "llama_8b" if options.largest else "llama_1b"
    config = replace(_model(name), vocab_size=options.vocab) if device.on_gpu else TINY
    blocks = BlockConfig(activation_checkpoint=options.checkpoint, compile=options.compile)
    with device.group(), tempfile.TemporaryDirectory(dir=options.disk) as folder:
        setting = Setting(config, device.torch, blocks, options.max_norm, DiskConfig(paths=[folder]))
        if options.largest:
            candidate(options, setting)
        else:
            show(options, setting, *measure(options, setting, device))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 8, 16], help="sequences per step")
    parser.add_argument("--tokens", type=int, default=2048, help="per sequence")
    parser.add_argument("--vocab", type=int, default=32_000, help="smaller than the published, whose logits fill a GPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="on the clock, per turn and batch size")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further round after so many")
    parser.add_argument("--rebuild", action="store_true", help="sides for each turn, also where all would fit")
    parser.add_argument("--checkpoint", default="full", help="activation checkpointing: none, selective, full")
    parser.add_argument("--compile", action="store_true", help="blocks")
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a directory on the disk of dzero_disk")
    parser.add_argument("--largest", action="store_true", help="find the largest model instead")
    parser.add_argument("--layers-max", type=int, help="--largest: try no more")
    parser.add_argument("--tries", type=int, default=20, help="--largest: no more; the first is the goal")
    parser.add_argument("--timeout-s", type=float, default=900, help="--largest: of a candidate, which then failed")
    parser.add_argument("--cap-mib", type=float, help="--largest: host memory to pretend; on a CPU, the device's too")
    parser.add_argument("--candidate", type=int, help="layers; for --largest's own use")
    options = parser.parse_args()
    if RESIDENT not in options.sides:
        parser.error(f"--sides: {RESIDENT} is what the others are compared with")
    if options.device == "cpu":
        options.samples, options.tokens, options.rounds, options.steps = [1, 2], 32, 2, 2
    return options


def _model(name: str) -> ModelConfig:
    values = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(values, dict)
    return ModelConfig(**{str(key): value for key, value in values.items()})


def measure(options: argparse.Namespace, setting: Setting, device: Device) -> tuple[Series, list[str]]:
    """Series, and notes: which sides are missing and why, and whether they were kept."""
    kept, note = _fits(options, setting)
    series: Series = {samples: {} for samples in options.samples}
    batches = {samples: _batches(samples, options.tokens, setting.device) for samples in options.samples}
    names, alive, notes, shuffle = list(options.sides), dict[str, Side](), [note], random.Random(0)
    began_s = time.monotonic()
    for done in range(options.rounds):
        if done and time.monotonic() - began_s > options.seconds:
            notes.append(f"{done} of {options.rounds} rounds, because of --seconds {options.seconds:g}")
            break
        for name in shuffle.sample(names, len(names)):
            side = alive.pop(name, None)
            try:
                side = side or _build(name, setting, [batches[samples][0] for samples in options.samples])
                for samples in options.samples:
                    found = series[samples].setdefault(name, {})
                    for key, values in _turn(side, batches[samples], options.steps).items():
                        found.setdefault(key, []).extend(values)
                if kept:
                    alive[name] = side
            except (LeftOutError, MemoryError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "out of memory" not in str(error):
                    raise
                names.remove(name)
                for sides in series.values():
                    sides.pop(name, None)
                notes.append(f"{name} left out: {(str(error) or repr(error)).splitlines()[0]}")
            del side
            if not kept:  # what is built anew is compiled anew, for which the compiler has a limit per function
                torch.compiler.reset()
            device.free()
        print(f"round {done + 1}/{options.rounds}", flush=True)
    return series, notes


def _fits(options: argparse.Namespace, setting: Setting) -> tuple[bool, str]:
    """Whether all sides may stay alive, and why."""
    elems = count(build(setting.config))
    device = elems * sum(SIDES[name].device_bytes for name in options.sides)
    host = elems * sum(SIDES[name].host_bytes for name in options.sides)
    has, free = device_memory_bytes(setting.device), host_available_bytes()
    kept = device <= 0.4 * has and host <= 0.9 * free and not options.rebuild
    how = "kept between turns" if kept else "built for each turn"
    needs = f"{format_bytes(device)} of the device's {format_bytes(has)} (0.4 may go to states)"
    needs += f" and {format_bytes(host)} of {format_bytes(free)} of free host memory (0.9 may)"
    why = "as asked" if options.rebuild else f"together they keep at most {needs}"
    return kept, f"sides were {how}: {why}"


def _batches(samples: int, tokens: int, device: torch.device) -> list[Tensor]:
    text = Batches(Workload(samples=samples, tokens=tokens))
    return [text.get(step, 0).to(device) for step in range(BATCHES)]


def _build(name: str, setting: Setting, firsts: list[Tensor]) -> Side:
    """One step of each size, the largest first: kernels are compiled, memory is taken, or there is too little."""
    side = SIDES[name].build(setting)
    for batch in sorted(firsts, key=len, reverse=True):
        side.step(batch)
    return side


def _turn(side: Side, batches: list[Tensor], steps: int) -> dict[str, list[float]]:
    """`Side.turn`, and the device memory that it took beyond what all living sides keep."""
    if side.setting.device.type != "cuda":
        return side.turn(batches, steps)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    return {**side.turn(batches, steps), "work_bytes": [float(torch.cuda.max_memory_allocated() - held)]}


def show(options: argparse.Namespace, setting: Setting, series: Series, notes: list[str]) -> None:
    """Row, table and plot."""
    rows, goals = [], []
    panels: dict[str, dict[str, float]] = {}
    for samples, sides in series.items():
        if RESIDENT not in sides:
            raise SystemExit("\n".join(notes))
        tokens, resident_s = samples * options.tokens, sides[RESIDENT]["step_s"]
        bars = panels[f"tokens/s over resident, {tokens} tokens"] = {}
        for name in (name for name in SIDES if name in sides):
            found = sides[name]
            middle = {key: median(values) for key, values in found.items()}
            speed = ratio_of_medians(resident_s, found["step_s"])
            over_peer = ratio_of_medians(sides[PEER]["step_s"], found["step_s"]) if PEER in sides else ""
            bars[name], verdict, update_s = speed.value, "", middle.get("update_s", 0.0)
            if SIDES[name].goal:
                asked, met = update_s <= median(resident_s), speed.value >= GOAL
                goal = {"side": name, "tokens": tokens, "update_s": update_s, "compute_s": median(resident_s)}
                goals.append({**goal, **vars(speed), "bound": GOAL, "asked": asked, "met": met})
                verdict = ("met" if met else "missed") if asked else "update > compute"
            shown = [f"{middle[key] * 1e3:.0f}" if key in middle else "" for key in ("update_s", "disk_s", "waited_s")]
            shown += [f"{middle['clipped']:.2f}" if "clipped" in middle else ""]
            shown += [f"{middle['work_bytes'] / 2**30:.1f}" if "work_bytes" in middle else ""]
            speeds = [f"{tokens / middle['step_s']:.0f}", f"{middle['step_s'] * 1e3:.0f}", speed, over_peer]
            rows.append([tokens, name, *speeds, *shown, f"{found['losses'][-1]:.3f}", verdict])
    elems, on_gpu = count(build(setting.config)), setting.device.type == "cuda"
    gpu = torch.cuda.get_device_name(setting.device) if on_gpu else "cpu"
    memory = {"device": device_memory_bytes(setting.device), "host": host_memory_bytes()}
    facts = {"part": "speed", "config": vars(options), "params": elems, "gpu": gpu, "memory_bytes": memory}
    best = max(goals, key=lambda goal: float(goal["value"]), default=None)
    finding = (
        "no side of dzero ran on the host"
        if best is None
        else (
            f"{elems / 1e9:.2f} B parameters: {best['side']} reaches {best['value']:.2f} of the resident speed with "
            f"{best['tokens']} tokens a step; {sum(goal['met'] for goal in goals)} of {len(goals)} reach {GOAL}"
        )
    )
    append_row("gpu_offload", {**facts, "finding": finding, "sides": series, "goals": goals, "notes": notes})
    title = f"{gpu}, {elems / 1e6:.0f} M parameters, bf16, clipped at {options.max_norm:g}"
    header = ["tokens", "side", "tokens/s", "step, ms", "over resident", f"over {PEER}", "host update, ms", "disk, ms"]
    header += ["waited, ms", "clipped", "device GiB beside states", "last loss", f"goal ≥ {GOAL}"]
    write_table("gpu_offload", "\n".join([title, "", table(header, rows), *(f"- {note}" for note in notes)]))
    plot_bars("gpu_offload", title, panels)


if __name__ == "__main__":
    with results_kept(sys.argv[1:]):
        main()

"""What do parts of large units (zero.unit_bytes) give where optimizer states are on disk: host memory, and seconds?

    python benchmarks/unit_parts.py --path DIR
    python benchmarks/unit_parts.py --smoke

One update of a net of large blocks, each of equal layers, on one rank. States of a unit are loaded, updated and written
as one, in host slots that units take turns in. Parts need less memory, and hide less: the slots hold what is loaded
ahead during forward and backward, which for `whole` with one block is everything. `ahead` has slots for 12 parts.

    side        what is timed, from optimizer.step() until optimizer.synchronize()
    whole       masters and moments on disk, a unit for each block
    parts       the same with zero.unit_bytes, so that each layer is a unit
    ahead       the same with offload.prefetch_units=AHEAD
    host        masters and moments on the host
    transfer    the store alone: the bytes of `parts`, the same pieces, in and out side by side

Goals: parts / max(transfer, host) at most 1.15, as for small units (infinity.py); host memory of the slots that units
take turns in at most three times that of the largest part.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch
from infinity_rounds import Series, Setting, Turn, measure
from infinity_sides import Step, Transfers
from report import append_row, table, write_table
from stats import ratio_of_medians
from torch import nn

from dzero import OffloadConfig
from dzero.offload.direct_io import Direction

WIDTH, BOUND, AHEAD = 2048, 1.15, 11
STATES = 14  # bytes per element in turn slots: master and two moments in fp32, and the new working copy in bf16


class Block(nn.Module):
    """Equal Linears, as wide as they are narrow by turns."""

    def __init__(self, layers: int, elems: int) -> None:
        super().__init__()
        narrow, wide = WIDTH, elems // WIDTH
        for index in range(layers):
            size = (narrow, wide) if index % 2 == 0 else (wide, narrow)
            self.add_module(f"layer{index}", nn.Linear(*size, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def net(setting: Setting, blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(setting.units // blocks, setting.elems) for _ in range(blocks)))


def sides(blocks: int, setting: Setting) -> dict[str, Turn]:
    """All of them."""
    made = partial(net, setting, blocks)
    whole, host = Step(setting, "disk", made), Step(setting, "host", made)
    parts, ahead = (Step(setting, "disk", made, 2 * setting.elems, units) for units in (2, AHEAD))
    alone = Transfers.like(parts.optim, setting)
    ways = (Direction.READ, Direction.WRITE)
    return {"whole": whole, "parts": parts, "ahead": ahead, "host": host, "transfer": partial(alone.turn, *ways)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the disk")
    parser.add_argument("--layers", type=int, default=16, help="of all blocks together")
    parser.add_argument("--elems", type=int, default=8 << 20, help="parameters per layer")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4], help="each count in a run of its own")
    parser.add_argument("--threads", type=int, default=2, help="of kernels")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="seconds: tiny, nothing is written")
    options = parser.parse_args()
    if options.smoke:
        vars(options).update({"layers": 4, "elems": 1 << 16, "blocks": [2], "rounds": 2})
    texts = []
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        setting = Setting(
            path=folder,
            units=options.layers,
            elems=options.elems,
            threads=options.threads,
            block_bytes=(1 if options.smoke else 16) << 20,
            io_threads=8,
        )
        for blocks in options.blocks:
            series, _ = measure({"parts": partial(sides, blocks)}, setting, 1, options.rounds)
            texts.append(report(series, setting, blocks, options))
    print("\n".join(texts)) if options.smoke else write_table("unit_parts", "\n".join(texts))


def report(series: Series, setting: Setting, blocks: int, options: argparse.Namespace) -> str:
    """Row and table."""
    update_s = {side: found["update_s"] for side, found in series.items()}
    bound_by = max(("transfer", "host"), key=lambda side: median(update_s[side]))
    turns = {side: series[side]["turn_bytes"][0] for side in ("whole", "parts", "ahead")}
    most = (1 + OffloadConfig().prefetch_units) * STATES * setting.elems
    over, faster = (
        ratio_of_medians(update_s["parts"], update_s[bound_by]),
        ratio_of_medians(update_s["whole"], update_s["parts"]),
    )
    goals: list[dict[str, Any]] = [
        {"what": f"parts / {bound_by}", **asdict(over), "bound": BOUND, "met": over.value <= BOUND},
        {"what": "turn slots of parts", "value": turns["parts"], "bound": most, "met": turns["parts"] <= most},
    ]
    if not options.smoke:
        config = {key: value for key, value in vars(options).items() if key not in ("path", "smoke", "blocks")}
        append_row("unit_parts", {"config": config | {"blocks": blocks}, "sides": series, "goals": goals})
    rows = [
        [
            side,
            f"{median(seconds) * 1e3:.0f}",
            ratio_of_medians(seconds, update_s[bound_by]),
            f"{median(series[side]['step_s']) * 1e3:.0f}" if side in turns else "",
            f"{turns[side] / 2**20:.1f}" if side in turns else "",
        ]
        for side, seconds in update_s.items()
    ]
    steps = series["whole"]["step_s"], series["parts"]["step_s"]
    goal = "{what}: goal at most {bound}: {verdict}.\n"
    lines = [goal.format(**each, verdict="met" if each["met"] else "missed") for each in goals]
    count = "1 block" if blocks == 1 else f"{blocks} blocks"
    size = f"{setting.units // blocks} layers of {setting.elems / 1e6:.1f} M parameters"
    return "\n".join(
        [
            f"Update, {count} of {size}, 1 rank, {options.rounds} rounds",
            "",
            table(["side", "ms", f"over {bound_by}", "step, ms", "turn slots, MiB"], rows),
            f"whole / parts, update: {faster}; step: {ratio_of_medians(*steps)}.\n",
            *lines,
        ]
    )


if __name__ == "__main__":
    main()

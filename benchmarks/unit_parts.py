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
from functools import partial

import torch
from infinity_rounds import STATES, Series, Setting, Turn, measure, slots_report
from infinity_sides import Step, Transfers
from report import append_row, write_table
from torch import nn

from dzero import OffloadConfig
from dzero.offload.direct_io import Direction

WIDTH, AHEAD = 2048, 11


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
    goals, lines = slots_report(series, "parts", (1 + OffloadConfig().prefetch_units) * STATES * setting.elems)
    if not options.smoke:
        config = {key: value for key, value in vars(options).items() if key not in ("path", "smoke", "blocks")}
        append_row("unit_parts", {"config": config | {"blocks": blocks}, "sides": series, "goals": goals})
    count = "1 block" if blocks == 1 else f"{blocks} blocks"
    size = f"{setting.units // blocks} layers of {setting.elems / 1e6:.1f} M parameters"
    return "\n".join([f"Update, {count} of {size}, 1 rank, {options.rounds} rounds", "", *lines])


if __name__ == "__main__":
    main()

"""Sides that build their states on one disk, in turn: each group of sides has processes of its own, one per rank.

Within a round sides take turns in shuffled order; the first round is left out. A time is that of the slowest rank;
bytes and operations are those of all ranks.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from children import Children, process_group
from report import table
from stats import ratio_of_medians

from dzero import OffloadConfig
from dzero.zero.offload_config import DiskConfig

Found = dict[str, Any]
Turn = Callable[[], Found]
Series = dict[str, dict[str, list[Any]]]
"""By side and quantity, one number per round."""
BOUND = 1.15
"""Goal of an update with states on disk, over what bounds it."""
STATES = 14
"""Bytes per element in turn slots: master and two moments in fp32, and the new working copy in bf16."""
FLOPS_PER_PARAM = 6
"""Per token, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """units x elems: of the net of equal units. large: how many of them the first is as large as, where it is larger.
    threads: of kernels, per rank. block_bytes, io_threads: of dzero's store. samples x tokens: of a step of the llama;
    steps: on the clock, per turn."""

    path: str
    threads: int
    block_bytes: int
    io_threads: int
    units: int = 0
    elems: int = 0
    large: int = 1
    tokens: int = 0
    samples: int = 0
    steps: int = 0
    small: bool = False

    @property
    def params(self) -> int:
        """Of the net."""
        return self.units * self.elems

    @property
    def disk(self) -> DiskConfig:
        """Of every store."""
        return DiskConfig(paths=[self.path], block_bytes=self.block_bytes, threads=self.io_threads)

    def offload(self, tier: str) -> OffloadConfig | None:
        """As conf/offload: host, disk, or all_disk (infinity)."""
        disk = {"disk": self.disk} if tier != "host" else {}
        kinds = {
            "host": {"grad": "host", "master": "host", "moments": "host"},
            "disk": {"grad": "host", "master": "disk", "moments": "disk"},
            "all_disk": {"param": "disk", "grad": "disk", "master": "disk", "moments": "disk"},
        }
        return OffloadConfig(**kinds[tier], **disk) if tier in kinds else None  # type: ignore[arg-type]


class LeftOutError(Exception):
    """A group of sides cannot run here."""


Sides = Callable[[Setting], dict[str, Turn]]


def measure(groups: dict[str, Sides], setting: Setting, ranks: int, rounds: int) -> tuple[Series, list[str]]:
    """All sides of these groups in turn, and notes on groups left out."""
    setting, notes, running = replace(setting, threads=max(1, setting.threads // ranks)), [], list[_Group]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, sides in groups.items():
                try:
                    running.append(_Group(ranks, _serve, sides, setting, ranks, str(Path(folder) / name)))
                except LeftOutError as error:
                    notes.append(f"{name} left out: {error}")
            of = {side: group for group in running for side in group.first[0]}
            series: Series = {side: {} for side in of}
            shuffle = random.Random(0)
            for done in range(rounds + 1):
                for side in shuffle.sample([*of], len(of)):
                    found = of[side].turn(side)
                    for key, value in found.items() if done else ():
                        series[side].setdefault(key, []).append(value)
                print(f"{'+'.join(groups)}, {ranks} ranks: round {done}/{rounds}", flush=True)
            for group in running:
                group.ask(None)
            return series, notes
        finally:
            for group in running:
                group.close()


class _Group(Children):
    """The processes of one group of sides."""

    def turn(self, side: str) -> Found:
        """Times of the slowest rank; bytes and operations of all."""
        found = self.ask(side)
        return {key: _over_ranks(key, [each[key] for each in found]) for key in found[0]}


def _over_ranks(key: str, values: list[Any]) -> Any:
    return sum(values) if key.endswith(("bytes", "flops")) else max(values)


def _serve(pipe: Connection, build: Sides, setting: Setting, ranks: int, rendezvous: str, rank: int) -> None:
    """A child process. Says what its sides are called, then gives turns to those it is sent."""
    import torch

    try:
        torch.set_num_threads(setting.threads)
        with process_group(rank, ranks, rendezvous):
            sides = build(setting)
            pipe.send([*sides])
            while (side := pipe.recv()) is not None:
                pipe.send(sides[side]())
            pipe.send(None)
            sides.clear()
    except BaseException as error:
        kind = LeftOutError if isinstance(error, LeftOutError) else RuntimeError
        pipe.send(kind(f"rank {rank}: {error if kind is LeftOutError else repr(error)}"))
        raise


def efficiency_bound(params: int, tokens: int, moved_bytes: float, bandwidth: float, compute_s: float) -> float:
    """compute / step without overlap (ZeRO-Infinity, section 4): ait * bw / (ait * bw + peak).

    ait: operations per byte that a side moves to and from disk, tokens / 4 for fp32 masters and moments. bw: bytes per
    second of the disk (side `transfer`). peak: the operations per second that forward and backward reached.
    """
    flops = FLOPS_PER_PARAM * params * tokens
    ait, peak = flops / moved_bytes, flops / compute_s
    return ait * bandwidth / (ait * bandwidth + peak)


def slots_report(series: Series, side: str, most_slot_bytes: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Goals and lines of a comparison of `whole`, `side` and others with what bounds them, `transfer` or `host`."""
    update_s = {each: found["update_s"] for each, found in series.items()}
    bound_by = max(("transfer", "host"), key=lambda each: median(update_s[each]))
    slots = {each: found["turn_bytes"][0] for each, found in series.items() if each not in ("transfer", "host")}
    over, faster = (
        ratio_of_medians(update_s[side], update_s[bound_by]),
        ratio_of_medians(update_s["whole"], update_s[side]),
    )
    goals: list[dict[str, Any]] = [
        {"what": f"{side} / {bound_by}", **asdict(over), "bound": BOUND, "met": over.value <= BOUND},
        {
            "what": f"turn slots of {side}",
            "value": slots[side],
            "bound": most_slot_bytes,
            "met": slots[side] <= most_slot_bytes,
        },
    ]
    rows = [
        [
            each,
            f"{median(seconds) * 1e3:.0f}",
            ratio_of_medians(seconds, update_s[bound_by]),
            f"{median(series[each]['step_s']) * 1e3:.0f}" if each in slots else "",
            f"{slots[each] / 2**20:.1f}" if each in slots else "",
        ]
        for each, seconds in update_s.items()
    ]
    steps = ratio_of_medians(series["whole"]["step_s"], series[side]["step_s"])
    goal = "{what}: goal at most {bound}: {verdict}.\n"
    return goals, [
        table(["side", "ms", f"over {bound_by}", "step, ms", "turn slots, MiB"], rows),
        f"whole / {side}, update: {faster}; step: {steps}.\n",
        *(goal.format(**each, verdict="met" if each["met"] else "missed") for each in goals),
    ]

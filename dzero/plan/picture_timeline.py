"""Timeline panel of the picture, with a row per lane. Of many microbatches only the first and the last are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dzero.estimate.forecast import Forecast
from dzero.estimate.timeline import KINDS, LANES, Bar, Timeline
from dzero.hardware import format_count
from dzero.plan.colours import INK, WORK

GAP = 0.05
"""Fraction of the width, for the omitted microbatches."""
LANE_HEIGHT, EDGES_HEIGHT = 0.55, 1.15
"""Inches of a lane, and of the margins above and below the lanes together."""
NARROW = 1 / 350
"""Fraction of the width: narrower bars are merged where they touch."""
LETTER = 1 / 240
LEAST = 1 / 1500
"""Fraction of the width: minimum width of a drawn bar."""
ARROWS = {"device to host": "device → host", "host to device": "host → device"}


class _Axis:
    """Mapping from seconds of the step to seconds on the axis, which omits all but the first and last microbatch."""

    def __init__(self, timeline: Timeline) -> None:
        begun = timeline.microbatches_s
        self.left_out = max(0, len(begun) - 2)
        self.cut_s = (begun[1], begun[-1]) if self.left_out else (timeline.end_s, timeline.end_s)
        seen_s = timeline.end_s - (self.cut_s[1] - self.cut_s[0])
        self.gap_s = GAP * seen_s if self.left_out else 0.0
        self.width_s, self.end_s = seen_s + self.gap_s, timeline.end_s

    def at(self, moment_s: float) -> float:
        """Return the position of a moment; an omitted one is in the gap."""
        first, last = self.cut_s
        if moment_s <= first:
            return moment_s
        return moment_s - (last - first) + self.gap_s if moment_s >= last else first + self.gap_s / 2

    def seen(self, bar: Bar) -> list[tuple[float, float]]:
        """Return (start, end) of the parts of a bar that are not omitted."""
        first, last = self.cut_s
        parts = [(bar.start_s, min(bar.end_s, first)), (max(bar.start_s, last), bar.end_s)]
        return [(self.at(start), self.at(end)) for start, end in parts if start < end]

    def ticks(self) -> list[float]:
        """Return the moments that get a tick."""
        from matplotlib.ticker import MaxNLocator

        every = MaxNLocator(10, steps=[1, 2, 5, 10]).tick_values(0, self.width_s)
        step, first, last = float(every[1] - every[0]), *self.cut_s
        moments = [step * n for n in range(int(self.end_s / step) + 1)]
        return [each for each in moments if each <= first or each >= last]


def height_of(timeline: Timeline) -> float:
    """Return the height of the panel in inches."""
    return EDGES_HEIGHT + LANE_HEIGHT * len(timeline.busy_s())


def draw_timeline(figure: Any, forecast: Forecast, timeline: Timeline) -> None:
    """Draw the timeline on all of `figure`."""
    axes, axis, busy = figure.subplots(), _Axis(timeline), timeline.busy_s()
    lanes = [lane for lane in LANES if busy.get(lane)]
    bars = sorted(timeline.bars, key=lambda bar: (bar.lane, bar.start_s))
    for lane, of_lane in groupby(bars, key=lambda bar: bar.lane):
        _draw_lane(axes, axis, lanes.index(lane), [*of_lane])
    name, factor = ("s", 1.0) if axis.width_s >= 2 else ("ms", 1e3) if axis.width_s >= 2e-3 else ("µs", 1e6)
    for kind in KINDS:
        if any(bar.kind == kind for bar in timeline.bars):
            axes.bar(0, 0, color=WORK[kind], label=kind.replace("_", "-"))
    if axis.left_out:
        left, right = axis.cut_s[0], axis.cut_s[0] + axis.gap_s
        axes.axvspan(left, right, facecolor="white", hatch="...", edgecolor="#d0d5da", linewidth=0, zorder=3)
        told = f"{axis.left_out} more microbatch{'es' * (axis.left_out > 1)}"
        look = {"rotation": 90, "ha": "center", "va": "center", "fontsize": 9, "color": INK, "zorder": 4}
        axes.text((left + right) / 2, (len(lanes) - 1) / 2, told, bbox={"color": "white", "pad": 2}, **look)
    ticks = axis.ticks()
    axes.set_xticks([axis.at(each) for each in ticks], [f"{each * factor:g}" for each in ticks], fontsize=8)
    shares = [f"{ARROWS.get(lane, lane)}\n{_seconds(busy[lane])}, {busy[lane] / axis.end_s:.0%}" for lane in lanes]
    axes.set_yticks(range(len(lanes)), shares, fontsize=8)
    axes.set(xlim=(0, axis.width_s), ylim=(len(lanes) - 0.45, -0.55), xlabel=name)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(_title(forecast, timeline), fontsize=10, color=INK)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


def _draw_lane(axes: Any, axis: _Axis, row: int, bars: Sequence[Bar]) -> None:
    """Draw the bars of one lane in time order, with unit names where they fit."""
    axes.axhspan(row - 0.36, row + 0.36, color="#f4f6f8", linewidth=0)
    for kind in KINDS:
        seen = [(bar.unit, *part) for bar in bars if bar.kind == kind for part in axis.seen(bar)]
        narrow = sum(end - start for _, start, end in seen) < NARROW * axis.width_s * len(seen)
        wide = [(start, max(end, start + LEAST * axis.width_s)) for _, start, end in seen]
        spans = [(start, end - start) for start, end in (_joined(wide, LEAST / 2 * axis.width_s) if narrow else wide)]
        edge = {"linewidth": 0} if narrow else {"edgecolor": "white", "linewidth": 0.4}
        axes.broken_barh(spans, (row - 0.36, 0.72), facecolor=WORK[kind], **edge)
        for unit, start, end in seen:
            if end - start > LETTER * (len(unit) + 1) * axis.width_s:
                text = {"ha": "center", "va": "center", "fontsize": 6.5, "color": INK}
                axes.text((start + end) / 2, row, unit, clip_on=True, **text)


def _joined(parts: Sequence[tuple[float, float]], gap_s: float) -> list[tuple[float, float]]:
    """Merge neighbors that are at most `gap_s` apart."""
    joined = list(parts[:1])
    for start, end in parts[1:]:
        if start - joined[-1][1] <= gap_s:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _title(forecast: Forecast, timeline: Timeline) -> str:
    """Return a title with the expected time, the lower bound, and the length of the drawn timeline."""
    pace, bound = forecast.pace, forecast.bound
    rate = f", {format_count(int(forecast.tokens_per_s))} tokens/s" if forecast.tokens_per_s else ""
    mfu = "" if forecast.mfu is None else f", MFU {forecast.mfu:.0%}"
    least = f"; lower bound {_seconds(bound.step_s or 0.0)}, at datasheet rates"
    least = "" if forecast.hardware.reaches_its_rates else least
    return (
        f"one step: expected {_seconds(pace.step_s or 0.0)}{rate}{mfu}, at the pace of {pace.bound}{least}\n"
        f"expected: {forecast.assumed}; {_seconds(timeline.end_s)} where units wait for each other as drawn"
    )


def _seconds(seconds: float) -> str:
    for least, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= least:
            return f"{seconds / least:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"

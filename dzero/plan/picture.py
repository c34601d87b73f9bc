"""Picture of a forecast, for a file or for TensorBoard.

    panel          contents                                                           drawn by
    tiers          stacked bar per tier: bytes by kind, and the tier's capacity       _draw_tier
    device         the same kinds while each unit runs                                _draw_moments
    step           lanes over time (`estimate/timeline.py`)                           `picture_timeline.py`

A kind of state and the work that moves or updates it have the same color in all panels. matplotlib is an optional
dependency, so it is imported only when it is used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dzero.errors import RunError
from dzero.estimate.forecast import DEVICE, TIERS, Forecast
from dzero.estimate.memory import MemoryMoment
from dzero.estimate.microbatch_costs import BACKWARD, FORWARD
from dzero.hardware import dtype_name, format_bytes, format_count
from dzero.plan.colours import HOST, INK, RED, colour_of, hatch_of
from dzero.plan.picture_timeline import draw_timeline, height_of
from dzero.plan.tables import tables
from dzero.utils.terminal import plain
from dzero.zero.units import ROOT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
NO_MATPLOTLIB = "the plan's picture needs matplotlib: pip install 'dzero[plot]'"
DPI = 130
WIDTH, MEMORY_HEIGHT, NOTE_HEIGHT = 14.0, 4.9, 0.5
SHOWN_CAPACITY = 2.5
"""Capacities above this multiple of the used bytes are not drawn, since the bar would be too small to read."""
TICKS = 42


def check_file(path: Path) -> None:
    """Raise RunError, before any work is done, if `draw` cannot write to `path` or matplotlib is missing."""
    if path.suffix not in FORMATS:
        raise RunError(f"--picture={path}: the name must end with one of {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise RunError(f"--picture={path}: there is no folder {path.parent}; make it, or name another")
    if path.is_dir():
        raise RunError(f"--picture={path}: this is a folder; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RunError(f"--picture={path}: this user may not write there; name another place")
    _figure_class()


def draw(forecast: Forecast, path: Path) -> None:
    """Write the picture to `path`, with `described` in its metadata; RunError if that fails."""
    check_file(path)
    figure = figure_of(forecast)
    key = "Subject" if path.suffix == ".pdf" else "Description"
    try:
        figure.savefig(path, dpi=DPI, metadata={key: described(forecast)})
    except OSError as error:
        raise RunError(f"--picture={path}: it could not be written: {error.strerror or error}") from error


def described(forecast: Forecast) -> str:
    """Return a text version of the picture: the tables, the verdict, and a digest of its bars."""
    timeline = forecast.timeline()
    drawn = [f"{moment.when} {moment.total_bytes}" for moment in forecast.memory.device]
    bars = [] if timeline is None else timeline.bars
    drawn += [f"{bar.lane} {bar.unit} {bar.kind} {bar.start_s:.3g} {bar.end_s:.3g}" for bar in bars]
    digest = hashlib.sha256("\n".join(drawn).encode()).hexdigest()[:16]
    return f"{plain(tables(forecast))}\n\n{forecast.verdict()}\n{len(drawn)} moments and bars: {digest}"


def pixels(forecast: Forecast) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the picture as uint8 [height, width, RGB]; raises RunError without matplotlib."""
    figure = figure_of(forecast)
    figure.set_dpi(DPI)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def figure_of(forecast: Forecast) -> Figure:
    """Return the figure with all panels; a note replaces the timeline if the hardware lacks figures for it."""
    figure_class = _figure_class()
    timeline = forecast.timeline()
    below = height_of(timeline) if timeline else NOTE_HEIGHT
    figure = figure_class(figsize=(WIDTH, MEMORY_HEIGHT + below), layout="constrained")
    memory, step = figure.subfigures(2, 1, height_ratios=(MEMORY_HEIGHT, below), squeeze=False)[:, 0]
    used = [name for name in TIERS if forecast.tiers[name].kinds]
    axes = memory.subplots(1, len(used) + 1, width_ratios=[*[1] * len(used), 10 - 1.4 * len(used)])
    for each, name in zip(axes, used, strict=False):
        _draw_tier(each, forecast, name)
    _draw_moments(axes[-1], forecast)
    if timeline:
        draw_timeline(step, forecast, timeline)
    else:
        lacks = ", ".join(forecast.pace.unknown)
        step.text(
            0.5, 0.5, f"no timeline: {lacks} unknown; python -m dzero hardware measures this machine", ha="center"
        )
    memory.suptitle(_title(forecast), color=INK if forecast.fits else RED, fontsize=12, weight="bold")
    return figure


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunError(NO_MATPLOTLIB) from error
    return Figure


def _title(forecast: Forecast) -> str:
    layout = forecast.layout
    axes = f"{layout.replicate} replicate x {layout.shard} shard" if layout.hybrid else f"{layout.ranks} ranks"
    what = (
        f"{format_count(forecast.params)} parameters in {dtype_name(layout.param.dtype)}, stage {layout.stage}, {axes}"
    )
    accumulated = f", {layout.microbatches} microbatches" if layout.microbatches > 1 else ""
    return f"{what}{accumulated}: {forecast.verdict()}"


def _draw_tier(axes: Any, forecast: Forecast, name: str) -> None:
    """Draw a tier as a stacked bar with its own axis, and its capacity as a dashed line if that is near."""
    tier, bottom = forecast.tiers[name], 0.0
    total, capacity = tier.total_bytes, tier.capacity_bytes
    near = capacity if capacity is not None and capacity < SHOWN_CAPACITY * total else None
    top = 1.04 * max(total, near or 0)
    scale, unit = scale_of(top)
    for kind, count in tier.kinds.items():
        axes.bar(0, count / scale, 0.9, bottom / scale, color=colour_of(kind), hatch=hatch_of(kind), edgecolor="white")
        if count > 0.035 * top:
            label = f"{kind}\n{format_bytes(count)}" if count > 0.09 * top else kind
            look = {"ha": "center", "va": "center", "fontsize": 7.5, "color": INK}
            box = {"facecolor": colour_of(kind), "linewidth": 0, "pad": 0.6}
            axes.text(0, (bottom + count / 2) / scale, label, bbox=box, **look)
        bottom += count
    if near is not None:
        axes.axhline(near / scale, color=RED if tier.short_bytes else INK, linestyle="--", linewidth=1.2)
    of = "of unknown" if capacity is None else f"of {format_bytes(capacity)}"
    axes.set_title(
        f"{name}\n{format_bytes(total)}\n{of}", fontsize=9, color=RED if tier.short_bytes else INK, linespacing=1.3
    )
    axes.set(xlim=(-0.5, 0.5), ylim=(0, top / scale), xticks=[], ylabel=unit)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _draw_moments(axes: Any, forecast: Forecast) -> None:
    """Draw the device's memory by kind, unit by unit."""
    moments = _told(forecast)
    kinds = [kind for kind in moments[0].kinds if any(moment.kinds.get(kind) for moment in moments)]
    peak = max(moment.total_bytes for moment in moments)
    scale, unit = scale_of(peak)
    edges = [0, *[at + 0.5 for at in range(len(moments))], len(moments)]

    def stepped(values: Sequence[float]) -> list[float]:
        return [values[0], *values, values[-1]]

    below = np.zeros(len(moments) + 2)
    for kind in kinds:
        above = below + stepped([moment.kinds.get(kind, 0) / scale for moment in moments])
        colours = {"facecolor": colour_of(kind), "edgecolor": "white", "linewidth": 0.3, "hatch": hatch_of(kind)}
        axes.fill_between(edges, below, above, step="mid", label=kind, **colours)
        below = above
    _mark_phases(axes, moments)
    _mark_peak(axes, moments, peak / scale)
    capacity = forecast.tiers[DEVICE].capacity_bytes
    if capacity is not None and capacity < 1.5 * peak:
        axes.axhline(capacity / scale, color=RED if capacity < peak else INK, linestyle="--", linewidth=1.2)
    axes.set(xlim=(0, len(moments)), ylim=(0, 1.2 * peak / scale), ylabel=unit)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("on the device while each unit is at work, last microbatch of a step", fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


def _told(forecast: Forecast) -> list[MemoryMoment]:
    """Return the moments to draw: without those of an idle root between two units, and on a CPU with the host tier."""
    moments, spans = forecast.memory.device, forecast.costs.spans
    host = {kind: count for kind, count in forecast.tiers[DEVICE].kinds.items() if kind.endswith(HOST)}
    between = {
        at
        for at, (before, span, after) in enumerate(zip(spans, spans[1:], spans[2:], strict=False), 1)
        if span.unit == ROOT and not span.work.flops and {before.direction, after.direction} == {span.direction}
    }
    kept = [each for at, each in enumerate(moments) if at not in between or each is forecast.memory.peak]
    return [MemoryMoment(each.when, {**each.kinds, **host}) for each in kept]


def _mark_phases(axes: Any, moments: Sequence[MemoryMoment]) -> None:
    """Label each moment (or every nth) with its unit, and each direction with its name and a line."""
    every = -(-len(moments) // TICKS)
    shown = range(0, len(moments), every)
    names = [moments[at].when.removeprefix(FORWARD).removeprefix(BACKWARD).strip() for at in shown]
    axes.set_xticks([at + 0.5 for at in shown], names, rotation=90, fontsize=7)
    directions = [moment.when.split()[0] for moment in moments]
    look = {"ha": "center", "va": "top", "fontsize": 9, "color": INK}
    for direction in (FORWARD, BACKWARD):
        first, count = directions.index(direction), directions.count(direction)
        axes.text(first + count / 2, 0.985, direction, transform=axes.get_xaxis_transform(), **look)
        axes.axvline(first + count, color=INK, linewidth=0.6, linestyle=":")


def _mark_peak(axes: Any, moments: Sequence[MemoryMoment], height: float) -> None:
    """Mark the moment at which the device is fullest, with its bytes."""
    at = max(range(len(moments)), key=lambda at: moments[at].total_bytes)
    moment = moments[at]
    side = "right" if at > len(moments) / 2 else "left"
    text = f"{format_bytes(moment.total_bytes)} at {moment.when}"
    axes.plot([at + 0.5], [height], "v", color=INK, markersize=5, clip_on=False)
    look = {"ha": side, "fontsize": 8.5, "color": INK, "bbox": {"facecolor": "white", "linewidth": 0, "pad": 1.5}}
    axes.annotate(text, (at + 0.5, height), (0, 8), textcoords="offset points", **look)


def scale_of(count: float) -> tuple[float, str]:
    """Return the bytes of the unit (KiB to TiB) that suits `count` bytes, and its name."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB")):
        if count >= 1024**power:
            return 1024.0**power, name
    return 1024.0, "KiB"

"""A forecast as a picture: what each tier holds, and what lies on the device through one microbatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dzero.errors import RunError
from dzero.plan.forecast import TIERS, Forecast

FORMATS = (".png", ".svg", ".pdf")
GB = 1e9


def draw(forecast: Forecast, path: Path) -> None:
    """Write it to `path`. Raises RunError for another format than `FORMATS`, and without matplotlib."""
    if path.suffix not in FORMATS:
        raise RunError(f"--picture={path}: the name must end with one of {', '.join(FORMATS)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunError("--picture needs matplotlib: pip install 'dzero[plot]'") from error
    figure = Figure(figsize=(12, 5), layout="constrained")
    tiers, moments = figure.subplots(1, 2, width_ratios=(1, 2))
    _draw_tiers(tiers, forecast)
    _draw_moments(moments, forecast)
    layout = forecast.layout
    figure.suptitle(
        f"{forecast.params / 1e9:.3g} B parameters, stage {layout.stage}, {layout.ranks} ranks: {forecast.verdict()}"
    )
    figure.savefig(path)


def _draw_tiers(axes: Any, forecast: Forecast) -> None:
    """A stacked bar per tier, and its capacity."""
    used = [name for name in TIERS if forecast.tiers[name].kinds]
    for at, name in enumerate(used):
        tier, bottom = forecast.tiers[name], 0.0
        for number, (kind, count) in enumerate(tier.kinds.items()):
            axes.bar(at, count / GB, 0.6, bottom, color=f"C{number}", edgecolor="white")
            if count > 0.04 * tier.total_bytes:
                axes.text(at, bottom + count / GB / 2, kind, ha="center", va="center", fontsize=8)
            bottom += count / GB
        if tier.capacity_bytes is not None and tier.capacity_bytes < 3 * tier.total_bytes:
            axes.hlines(tier.capacity_bytes / GB, at - 0.4, at + 0.4, color="black", linestyle="--")
    axes.set_xticks(range(len(used)), used)
    axes.set_ylabel("GB per rank (dashed: what there is)")


def _draw_moments(axes: Any, forecast: Forecast) -> None:
    """The device's kinds, unit by unit."""
    moments = forecast.memory.device
    kinds = [kind for kind in moments[0].kinds if any(moment.kinds.get(kind) for moment in moments)]
    stacked = [[moment.kinds.get(kind, 0) / GB for moment in moments] for kind in kinds]
    axes.stackplot(range(len(moments)), stacked, labels=kinds, step="mid")
    every = max(1, len(moments) // 24)
    axes.set_xticks(range(0, len(moments), every), [m.when for m in moments[::every]], rotation=90, fontsize=7)
    axes.set_title("on the device while each unit is at work, last microbatch of a step", fontsize=9)
    axes.legend(loc="upper left", fontsize=8)

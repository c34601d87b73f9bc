"""A forecast as tables."""

from __future__ import annotations

from dzero.hardware import format_bytes, format_count
from dzero.mesh import EXPERT
from dzero.plan.durations import link_of
from dzero.plan.forecast import TIERS, Forecast
from dzero.terminal import OK, Table


def tables(forecast: Forecast) -> list[Table]:
    """Memory by tier, what is moved, and the pace."""
    return [table for table in (_memory(forecast), _moved(forecast), _pace(forecast)) if table.rows]


def _memory(forecast: Forecast) -> Table:
    rows = []
    for name in TIERS:
        tier = forecast.tiers[name]
        rows += [(name, kind, format_bytes(count), "", "") for kind, count in tier.kinds.items()]
        if tier.kinds:
            capacity, state = "unknown", ""
            if tier.capacity_bytes is not None:
                capacity = format_bytes(tier.capacity_bytes)
                state = f"{format_bytes(tier.short_bytes)} short" if tier.short_bytes else OK
            rows.append((name, "together", format_bytes(tier.total_bytes), capacity, state))
    title = f"memory of one rank of {forecast.layout.world}; the device is fullest at {forecast.when}"
    if forecast.costs.beside.get(EXPERT, 1) > 1:
        title += "; more where tokens do not choose all experts alike"
    return Table(title, ("tier", "kind", "bytes", "of", ""), tuple(rows), left=2)


def _moved(forecast: Forecast) -> Table:
    moved = forecast.moved
    rows = [(f"along {axis}", format_bytes(count), _calls(forecast, axis)) for axis, count in moved.axes.items()]
    for what, count in (
        ("device to host", moved.out),
        ("host to device", moved.back),
        ("read from disk", moved.read),
        ("written to disk", moved.written),
    ):
        if count:
            rows.append((what, format_bytes(count), ""))
    return Table("moved by one rank in a step", ("link", "bytes", "collectives"), tuple(rows))


def _calls(forecast: Forecast, axis: str) -> str:
    """How many collectives, over which link, at what rate."""
    link = link_of(forecast.layout, forecast.hardware, axis, forecast.costs.beside)
    speed = "" if link.rate is None else f" at {format_count(link.rate)}B/s"
    return f"{forecast.moved.calls[axis]} {'within nodes' if link.within_node else 'across nodes'}{speed}"


def _pace(forecast: Forecast) -> Table:
    pace = forecast.pace
    rows = [
        (what, f"{seconds * 1e3:.1f} ms", "<- sets the pace" if what == pace.bound and pace.step_s else "")
        for what, seconds in pace.seconds.items()
    ]
    if pace.step_s is None:
        rows.append(("a step", "unknown", f"the hardware does not say {', '.join(pace.unknown)}"))
    else:
        rate = f"{format_count(int(forecast.tokens_per_s or 0))} tokens/s"
        mfu = "" if forecast.mfu is None else f", MFU {forecast.mfu:.0%}"
        rows.append(("a step", f"{pace.step_s * 1e3:.1f} ms", f"{rate}{mfu}"))
    return Table(f"a step on {forecast.hardware.name}", ("what", "takes", ""), tuple(rows))

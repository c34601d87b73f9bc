"""Tables of a forecast."""

from __future__ import annotations

import math

from dzero.estimate.durations import link_of
from dzero.estimate.forecast import TIERS, Forecast
from dzero.hardware import format_bytes, format_count
from dzero.mesh import EXPERT
from dzero.utils.terminal import OK, Table


def tables(forecast: Forecast) -> list[Table]:
    """Return tables of memory by tier, traffic, pace, and the meaning of the seconds."""
    return [table for table in (_memory(forecast), _moved(forecast), _pace(forecast), _meant(forecast)) if table.rows]


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
    """Return the number of collectives along an axis, their link, and its rate."""
    link = link_of(forecast.layout, forecast.hardware, axis, forecast.costs.beside)
    speed = "" if link.rate is None else f" at {format_count(link.rate)}B/s"
    return f"{forecast.moved.calls[axis]} {'within nodes' if link.within_node else 'across nodes'}{speed}"


def _pace(forecast: Forecast) -> Table:
    """Return a table with a row for each lane and for the step; measured hardware has no column of datasheet rates."""
    pace, bound, title = forecast.pace, forecast.bound, f"a step on {forecast.hardware.name}"
    rows = [(what, _ms(bound.seconds.get(what, 0.0)), _ms(each), "") for what, each in pace.seconds.items()]
    if pace.step_s is None or bound.step_s is None:
        rows.append(("a step", "unknown", "unknown", f"the hardware does not say {', '.join(pace.unknown)}"))
    else:
        rows = [(*row[:3], "<- sets the pace" if row[0] == pace.bound else "") for row in rows]
        used = "" if forecast.mfu is None else f"MFU {forecast.mfu:.0%}"
        rows.append(("a step", _ms(bound.step_s), _ms(pace.step_s), used))
        most, expected = (format_count(int(forecast.step_tokens / each)) for each in (bound.step_s, pace.step_s))
        rows.append(("tokens/s", most, expected, ""))
    if forecast.hardware.reaches_its_rates:
        return Table(
            f"{title}, at the rates that it showed", ("what", "takes", ""), tuple((row[0], *row[2:]) for row in rows)
        )
    return Table(title, ("what", "lower bound", "expected", ""), tuple(rows))


def _meant(forecast: Forecast) -> Table:
    """Return the meanings of the words in the table of seconds."""
    if forecast.pace.step_s is None or forecast.hardware.reaches_its_rates:
        return Table("", (), ())
    rows = [
        ("lower bound", "datasheet rates, operators one by one, lanes overlap fully"),
        ("expected", forecast.assumed),
    ]
    if forecast.mfu is not None:
        made = "" if forecast.hfu is None else f"; with it {forecast.hfu:.0%} of the peak"
        rows.append(("MFU", f"FLOPs of the model over the peak, as expected; recomputation is not counted{made}"))
    return Table("what these seconds are", ("word", "means"), tuple(rows), left=2)


def _ms(seconds: float) -> str:
    return "unknown" if math.isnan(seconds) else f"{seconds * 1e3:.1f} ms"

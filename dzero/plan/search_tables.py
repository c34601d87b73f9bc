"""A ranking for people: what fits, what would be faster, and what is lacking where nothing fits."""

from __future__ import annotations

from collections.abc import Mapping

from dzero.hardware import format_bytes, format_count, format_seconds
from dzero.plan.forecast import DEVICE, DISK, HOST, Forecast, Tier
from dzero.plan.search import HEADROOM, STAGE, Candidate, Fits, Ranking, Settings
from dzero.terminal import Table

REFUSED = 5
GROUPS = {  # settings of conf/offload: of param, grad, master and moments
    ("device", "host", "host", "host"): "host",
    ("host", "host", "host", "host"): "host_all",
    ("device", "host", "disk", "disk"): "disk",
    ("disk", "disk", "disk", "disk"): "infinity",
}
MEND = {
    DEVICE: "fewer train.sequence_tokens, block.tiles and block.loss_tiles, more ranks, or devices with more memory",
    HOST: "nodes with more host memory, more nodes, or precision=bf16_remainder and precision.moments=bf16",
    DISK: "more scratch space (offload.disk.paths), more nodes, or precision=bf16_remainder and precision.moments=bf16",
}


def words(settings: Settings, defaults: Settings) -> str:
    """As on the command line: the stage, and what is not its default; groups of conf/offload by their names."""
    told = {key: value for key, value in settings.items() if key == STAGE or value != defaults[key]}
    tiers = tuple(settings.get(f"offload.{kind}") for kind in ("param", "grad", "master", "moments"))
    group = GROUPS.get(tiers)  # type: ignore[arg-type]  # a pinned kind is in no group
    if group is not None:
        told = {key: value for key, value in told.items() if key.count("_fraction") or not key.startswith("offload.")}
        stage = {STAGE: told.pop(STAGE)} if STAGE in told else {}
        told = stage | {"offload": group} | told
    return " ".join(f"{key}={value}" for key, value in told.items())


def headline(fits: Fits, defaults: Settings) -> str:
    """The choice on a line."""
    forecast, tier = fits.forecast, fits.forecast.tiers[DEVICE]
    pace = "pace unknown" if forecast.pace.step_s is None else f"{format_seconds(forecast.pace.step_s)} a step"
    used = f"{format_bytes(tier.total_bytes)} of {_capacity(tier)} on the device"
    return f"zero=auto chose: {words(fits.candidate.settings, defaults)}: {pace}, {used}"


def ranking_tables(ranking: Ranking, defaults: Settings) -> list[Table]:
    """The best that fit, and the fastest of those that do not and would be faster."""
    return [table for table in (_best(ranking, defaults), _refused(ranking, defaults)) if table.rows]


def nothing_fits(ranking: Ranking, defaults: Settings) -> str:
    """What the closest candidate needs of each tier, what there is, and what would have to change."""
    assert ranking.closest is not None, "where nothing fits, something is closest"
    candidate, forecast = ranking.closest.candidate, ranking.closest.forecast
    lines = [
        f"zero=auto: of {ranking.candidates} candidates none fits {forecast.hardware.name} on {forecast.layout.ranks} "
        f"ranks with {HEADROOM:.0%} of each tier kept free. The closest is {words(candidate.settings, defaults)}, "
        "of which each rank needs"
    ]
    for name, tier in forecast.tiers.items():
        if not tier.total_bytes:
            continue
        lines.append(f"  {name:<6}  {_need(tier)}")
        if _lacks(tier):
            most = max(tier.kinds, key=lambda kind: tier.kinds[kind])
            lines.append(f"          mostly {most} ({format_bytes(tier.kinds[most])}); to mend it: {MEND[name]}")
    return "\n".join(lines)


def _need(tier: Tier) -> str:
    """`1.20 GiB of 1.00 GiB, 0.95 GiB with headroom: 256 MiB short`."""
    if tier.capacity_bytes is None:
        return f"{format_bytes(tier.total_bytes)}, but how much there is is unknown"
    room = int((1 - HEADROOM) * tier.capacity_bytes)
    state = f"{format_bytes(_lacks(tier))} short" if _lacks(tier) else "fits"
    need, there = format_bytes(tier.total_bytes), format_bytes(tier.capacity_bytes)
    return f"{need} of {there} ({format_bytes(room)} usable): {state}"


def _lacks(tier: Tier) -> int:
    return max(0, tier.total_bytes - int((1 - HEADROOM) * (tier.capacity_bytes or 0)))


def _best(ranking: Ranking, defaults: Settings) -> Table:
    rows = tuple((words(each.candidate.settings, defaults), *_figures(each.forecast)) for each in ranking.best)
    title = f"what fits, the best of {ranking.candidates} candidates first"
    if any(each.forecast.pace.step_s is None for each in ranking.best):
        unknown = dict.fromkeys(key for each in ranking.best for key in each.forecast.pace.unknown)
        title += f"; without {', '.join(unknown)} of the hardware the simplest, not the fastest"
    return Table(title, ("settings", "a step", "tokens/s", "pace set by", "tier", "needs", "left"), rows)


def _figures(forecast: Forecast) -> tuple[str, ...]:
    """Its pace, and the tier that is fullest."""
    step_s, rate = forecast.pace.step_s, forecast.tokens_per_s
    used = {name: tier for name, tier in forecast.tiers.items() if tier.total_bytes and tier.capacity_bytes}
    name = max(used, key=lambda each: used[each].total_bytes / (used[each].capacity_bytes or 1))
    tier = used[name]
    return (
        "unknown" if step_s is None else format_seconds(step_s),
        "unknown" if rate is None else format_count(int(rate)),
        "unknown" if step_s is None else forecast.pace.bound,
        name,
        format_bytes(tier.total_bytes),
        f"{1 - tier.total_bytes / (tier.capacity_bytes or 1):.0%}",
    )


def _refused(ranking: Ranking, defaults: Settings) -> Table:
    rows = []
    for each in ranking.refused[:REFUSED]:
        step = "unknown" if each.step_s is None else format_seconds(each.step_s)
        rows.append((_words(each.candidate, defaults), step, _lacking(each.short)))
    more = f"; {len(ranking.refused) - REFUSED} more" if len(ranking.refused) > REFUSED else ""
    return Table(f"faster or simpler, but too large{more}", ("settings", "a step", "each rank lacks"), tuple(rows))


def _words(candidate: Candidate, defaults: Settings) -> str:
    return words(candidate.settings, defaults)


def _lacking(short: Mapping[str, int]) -> str:
    return " and ".join(f"{format_bytes(count)} on the {name}" for name, count in short.items())


def _capacity(tier: Tier) -> str:
    return "an unknown size" if tier.capacity_bytes is None else format_bytes(tier.capacity_bytes)

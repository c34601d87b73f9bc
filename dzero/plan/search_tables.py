"""Report of a search: what fits, what would be faster, and what is missing if nothing fits."""

from __future__ import annotations

from dzero.estimate.candidates import STAGE, Settings
from dzero.estimate.forecast import DEVICE, DISK, HOST, Tier, listed
from dzero.estimate.search import HEADROOM, Fits, Ranking, Refused, room_bytes, short_bytes
from dzero.hardware import format_bytes, format_count, format_seconds
from dzero.utils.terminal import Table
from dzero.zero.offload_config import KINDS

REFUSED = 8
GROUPS = {  # tiers of param, grad, master and moments -> option of conf/offload
    ("device", "device", "device", "device"): "none",
    ("device", "host", "host", "host"): "host",
    ("host", "host", "host", "host"): "host_all",
    ("device", "host", "disk", "disk"): "disk",
    ("disk", "disk", "disk", "disk"): "infinity",
}
TIER_KEYS = [f"offload.{kind}" for kind in KINDS]
MEND = {
    DEVICE: "fewer train.sequence_tokens, a smaller zero.unit_bytes, block.tiles and block.loss_tiles, more ranks, or "
    "devices with more memory",
    HOST: "nodes with more host memory, more nodes, precision=bf16_remainder and precision.moments=bf16, or for states "
    "on disk a smaller zero.unit_bytes, block.embedding_tiles and block.loss_tiles",
    DISK: "more scratch space (offload.disk.paths), more nodes, or precision=bf16_remainder and precision.moments=bf16",
}


def words(settings: Settings, known: Settings) -> str:
    """Return settings that differ from `known`, as on the command line; the stage first, offload groups by name."""
    told = {key: value for key, value in settings.items() if key not in known or value != known[key]}
    tiers = tuple(settings.get(f"offload.{kind}", "") for kind in KINDS)
    first = {STAGE: told.pop(STAGE)} if STAGE in told else {}
    if tiers in GROUPS and any(key in TIER_KEYS for key in told):
        first |= {"offload": GROUPS[tiers]}
        told = {key: value for key, value in told.items() if key not in TIER_KEYS}
    return " ".join(f"{key}={value}" for key, value in (first | told).items()) or "the settings as they are"


def headline(fits: Fits, defaults: Settings) -> str:
    """Return the choice in one line."""
    tier = fits.forecast.tiers[DEVICE]
    pace = "pace unknown" if fits.step_s is None else f"{format_seconds(fits.step_s)} a step"
    used = f"{format_bytes(tier.total_bytes)} of {_capacity(tier)} on the device"
    return f"zero=auto chose: {words(fits.candidate.settings, defaults)}: {pace}, {used}"


def ranking_tables(ranking: Ranking, defaults: Settings) -> list[Table]:
    """Return tables of the best candidates that fit, and of faster ones that do not."""
    return [table for table in (_best(ranking, defaults), _refused(ranking, defaults)) if table.rows]


def nothing_fits(ranking: Ranking, defaults: Settings) -> str:
    """Return a text on the closest candidate: what it needs of each tier, what is available, and what to change."""
    assert ranking.closest is not None, "where nothing fits, something is closest"
    candidate, forecast = ranking.closest.candidate, ranking.closest.forecast
    lacking = short_bytes(forecast.tiers)
    lines = [
        f"zero=auto: of {ranking.candidates} candidates none fits {forecast.hardware.name} on {forecast.layout.world} "
        f"ranks with {HEADROOM:.0%} of each tier kept free. The closest is {words(candidate.settings, defaults)}, "
        "of which each rank needs"
    ]
    for name, tier in forecast.tiers.items():
        if not tier.total_bytes:
            continue
        lines.append(f"  {name:<6}  {_need(tier, lacking.get(name, 0))}")
        if name in lacking:
            most = max(tier.kinds, key=lambda kind: tier.kinds[kind])
            lines.append(f"          mostly {most} ({format_bytes(tier.kinds[most])}); to mend it: {MEND[name]}")
    return "\n".join(lines)


def _need(tier: Tier, short: int) -> str:
    """Return e.g. `1.20 GiB of 1.00 GiB (0.95 GiB usable): 256 MiB short`."""
    if tier.capacity_bytes is None:
        return f"{format_bytes(tier.total_bytes)}, but how much there is is unknown"
    state = f"{format_bytes(short)} short" if short else "fits"
    need, there, room = map(format_bytes, (tier.total_bytes, tier.capacity_bytes, room_bytes(tier)))
    return f"{need} of {there} ({room} usable): {state}"


def _best(ranking: Ranking, defaults: Settings) -> Table:
    rows = tuple((words(each.candidate.settings, defaults), *_figures(each)) for each in ranking.best)
    title = f"what fits, the best of {ranking.candidates} candidates first"
    if any(each.forecast.pace.step_s is None for each in ranking.best):
        unknown = dict.fromkeys(key for each in ranking.best for key in each.forecast.pace.unknown)
        title += f"; without {', '.join(unknown)} of the hardware the simplest, not the fastest"
    return Table(title, ("settings", "a step", "tokens/s", "pace set by", "tier", "needs", "left"), rows)


def _figures(fits: Fits) -> tuple[str, ...]:
    """Return the speed of a candidate, and its fullest tier."""
    step_s, forecast = fits.step_s, fits.forecast
    rate = forecast.step_tokens / step_s if step_s else None
    used = {name: tier for name, tier in forecast.tiers.items() if tier.total_bytes and tier.capacity_bytes}
    name = max(used, key=lambda each: used[each].total_bytes / (used[each].capacity_bytes or 1))
    tier = used[name]
    return (
        _seconds(step_s),
        "unknown" if rate is None else format_count(int(rate)),
        "unknown" if step_s is None else forecast.pace.bound,
        name,
        format_bytes(tier.total_bytes),
        f"{1 - tier.total_bytes / (tier.capacity_bytes or 1):.0%}",
    )


def _refused(ranking: Ranking, defaults: Settings) -> Table:
    """Return the table of candidates that do not fit; of each kind, the one with the fewest missing bytes."""
    kinds: dict[tuple[object, ...], Refused] = {}
    for each in ranking.refused:
        known = kinds.setdefault(each.candidate.kind, each)
        if sum(each.short.values()) < sum(known.short.values()):
            kinds[each.candidate.kind] = each
    rows = [
        (words(each.candidate.settings, defaults), _seconds(each.step_s), listed(each.short)) for each in kinds.values()
    ]
    more = f"; of {len(rows)} kinds {REFUSED}" if len(rows) > REFUSED else ""
    title = f"what would come before, but is too large{more}"
    return Table(title, ("settings", "a step", "each rank lacks"), tuple(rows[:REFUSED]))


def _seconds(step_s: float | None) -> str:
    return "unknown" if step_s is None else format_seconds(step_s)


def _capacity(tier: Tier) -> str:
    return "an unknown size" if tier.capacity_bytes is None else format_bytes(tier.capacity_bytes)

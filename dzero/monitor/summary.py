"""Tables of the closing summary."""

from __future__ import annotations

import torch

from dzero.comm.ledger import EXCEPTIONAL, Traffic
from dzero.hardware import dtype_name, format_bytes, format_count, format_seconds
from dzero.monitor.memory import PROCESS
from dzero.monitor.records import RunSummary, shown_perplexity
from dzero.utils.terminal import DIFFERS, OK, Table

SHOWN_RANKS = 8
INSIDE = ("context", "tensor")
"""Phases within the model; formulas exist only for some models."""


def summary_tables(summary: RunSummary) -> list[Table]:
    """Return result, memory per rank, offload and traffic per step, without empty tables."""
    tables = [result_table(summary), memory_table(summary), offload_table(summary), traffic_table(summary)]
    return [table for table in tables if table.rows]


def result_table(summary: RunSummary) -> Table:
    """Return a table of losses, speed, skipped steps, sources of a mixture, and rank 0's measured and planned peak."""
    speed, held_out = summary.speed, summary.held_out_loss
    rate = "unknown: no step after the warm-up"
    if speed.tokens_per_s is not None:
        rate = f"{speed.tokens_per_s:,.0f} ({summary.counted_steps} steps, warm-up left out)"
    mfu = "unknown peak" if summary.peak_flops is None else "unknown"
    if speed.mfu is not None and summary.peak_flops is not None:
        mfu = f"{speed.mfu:.1%} of {summary.peak_flops / 1e12:.4g} TFLOP/s per device"
    tokens = f"{format_count(summary.tokens)} tokens"
    if summary.counted_tokens is not None:
        tokens += f" ({format_count(summary.counted_tokens)} of them counted)"
    by_source = ", ".join(f"{name} {loss:.4f}" for name, loss in summary.held_out_by_source.items())
    by_source = f" ({by_source})" if by_source else ""
    rows = [
        ("steps", f"{summary.steps}, {tokens} in {format_seconds(summary.seconds)}"),
        ("loss", f"{summary.loss:.4f} (first step {summary.first_loss:.4f})"),
        ("held-out loss", "not evaluated" if held_out is None else f"{held_out:.4f}{by_source}"),
        *([] if held_out is None else [("held-out perplexity", shown_perplexity(held_out))]),
        ("tokens/s", rate),
        ("MFU", mfu),
        ("skipped steps", str(summary.skipped_steps)),
        *(
            (f"from {name}", f"{format_count(use.tokens)} tokens counted, {use.epochs:.3g} epochs")
            for name, use in summary.sources.items()
        ),
    ]
    if summary.planned_bytes is not None:
        peak = sum(count for kind, count in summary.peak_bytes[0].items() if kind != PROCESS)
        rows.append(("device peak", f"{format_bytes(peak)}, predicted {format_bytes(summary.planned_bytes)}"))
    return Table("result", ("quantity", "value"), tuple(rows), left=2)


def memory_table(summary: RunSummary) -> Table:
    """Return peak bytes by kind, one row per rank; of many ranks, only those with the least and the most."""
    kinds = tuple(dict.fromkeys(kind for rank in summary.peak_bytes for kind in rank))
    totals = [sum(rank.values()) for rank in summary.peak_bytes]
    shown = {rank: str(rank) for rank in range(len(totals))}
    if len(totals) > SHOWN_RANKS:
        least, most = totals.index(min(totals)), totals.index(max(totals))
        shown = {least: f"{least} (least)", most: f"{most} (most)"}
    rows = tuple(
        (name, *(format_bytes(summary.peak_bytes[rank].get(kind, 0)) for kind in kinds), format_bytes(totals[rank]))
        for rank, name in shown.items()
    )
    return Table("peak memory per rank", ("rank", *kinds, "total"), rows)


def offload_table(summary: RunSummary) -> Table:
    """Return what each offload lane did in a step of rank 0, and how long the step waited for it.

    share: Fraction of a step's time in which the lane is busy; the largest is the bottleneck.
    feeds: FLOP/s that the lane could sustain, which is arithmetic intensity (FLOPs per byte moved) x bandwidth.
    bound: Efficiency of a step that overlaps nothing with the lane, feeds / (feeds + peak) (ZeRO-Infinity, section
    4.1).
    """
    steps = max(1, summary.steps)
    rows = []
    for lane, use in sorted(summary.lanes.items()):
        moves = bool(use.moved_bytes and use.busy_s)
        rate = f"{format_bytes(use.moved_bytes / use.busy_s)}/s" if moves else ""
        moved = format_bytes(use.moved_bytes / steps) if use.moved_bytes else ""
        share = f"{use.busy_s / summary.seconds:.0%}" if summary.seconds else ""
        feeds = summary.step_flops * steps / use.busy_s if moves and summary.step_flops else None
        fed = "" if feeds is None else f"{feeds / 1e12:.3g} TFLOP/s"
        bound = f"{feeds / (feeds + summary.peak_flops):.1%}" if feeds and summary.peak_flops else ""
        busy, waited = format_seconds(use.busy_s / steps), format_seconds(use.waited_s / steps)
        rows.append((lane, busy, share, waited, moved, rate, fed, bound))
    title = f"offload per step of rank 0, {format_bytes(summary.host_bytes)} of host memory"
    if summary.lanes:
        most, use = max(summary.lanes.items(), key=lambda lane: lane[1].busy_s)
        title += f"; busiest lane {most}"
    if spilled := [use.moved_bytes for lane, use in summary.lanes.items() if lane.startswith("SPILL")]:
        title += f"; {format_bytes(sum(spilled))} written to disk in {steps} steps"
    header = ("lane", "at work", "share", "waited for", "moved", "while moving", "feeds", "bound")
    return Table(title, header, tuple(rows))


def traffic_table(summary: RunSummary) -> Table:
    """Return this rank's collectives per step beside theory: `ok` if calls and bytes are exactly equal, else `≠`.

    Rows without theory have no mark: traffic within some models, and traffic that only a skipped step sends.
    """
    steps = max(1, summary.traffic_steps)
    rows = []
    every_step = {e: Traffic(each.calls * steps, each.sent_bytes * steps) for e, each in summary.expected.items()}
    expected = {**every_step, **summary.routed}
    for entry in sorted(summary.traffic.keys() | expected.keys()):
        sent, due = summary.traffic.get(entry, Traffic()), expected.get(entry, Traffic())
        mark = OK if sent == due else DIFFERS
        due_calls, due_bytes = f"{due.calls / steps:.5g}", format_bytes(due.sent_bytes / steps)
        if entry.phase in (*INSIDE, EXCEPTIONAL) and not any(each.phase == entry.phase for each in expected):
            mark = due_calls = due_bytes = ""
        where = (entry.phase, entry.kind, entry.axis, dtype_name(getattr(torch, entry.dtype)))
        calls, sent_bytes = f"{sent.calls / steps:.5g}", format_bytes(sent.sent_bytes / steps)
        rows.append((*where, calls, due_calls, sent_bytes, due_bytes, mark))
    header = ("phase", "kind", "axis", "dtype", "calls", "theory", "sent", "theory", "")
    return Table("collectives per step of rank 0, measured against theory", header, tuple(rows), left=4)

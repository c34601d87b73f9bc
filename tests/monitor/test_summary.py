"""The closing summary."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from sample_records import CONTROL, GATHER, MIB, REDUCE, SUMMARY

from dzero.comm.ledger import Traffic
from dzero.monitor.meter import Throughput
from dzero.monitor.summary import memory_table, result_table, summary_tables, traffic_table
from dzero.monitor.tensorboard import held_out_scalars
from dzero.utils.terminal import plain


def test_traffic_is_ok_only_when_calls_and_bytes_equal_the_theory_exactly() -> None:
    marks = {row[:3]: row[-1] for row in traffic_table(SUMMARY).rows}
    assert marks[GATHER.phase, GATHER.kind, GATHER.axis] == "ok"
    assert marks[REDUCE.phase, REDUCE.kind, REDUCE.axis] == "≠"  # one call too many in 300 steps
    assert marks[CONTROL.phase, CONTROL.kind, CONTROL.axis] == "ok"
    one_byte = replace(SUMMARY, traffic={GATHER: Traffic(1500, 300_001)}, expected={GATHER: Traffic(5, 1000)})
    assert traffic_table(one_byte).rows[0][-1] == "≠"


def test_traffic_that_only_theory_or_only_the_ledger_knows_differs() -> None:
    missing = replace(SUMMARY, traffic={}, expected={GATHER: Traffic(5, 1000)})
    assert [row[-1] for row in traffic_table(missing).rows] == ["≠"]
    surplus = replace(SUMMARY, traffic={REDUCE: Traffic(5, 1000)}, expected={})
    assert [row[-1] for row in traffic_table(surplus).rows] == ["≠"]


def test_what_a_model_moves_inside_has_no_mark_where_there_is_no_formula_for_it() -> None:
    inside = replace(REDUCE, phase="tensor", axis="tp")
    unknown = replace(SUMMARY, traffic={inside: Traffic(10, 1000)}, expected={})
    assert [row[-1] for row in traffic_table(unknown).rows] == [""]
    known = replace(unknown, expected={replace(inside, kind="all_gather"): Traffic(5, 1000)})
    assert [row[-1] for row in traffic_table(known).rows] == ["≠", "≠"]


def test_traffic_is_shown_per_step() -> None:
    row = next(row for row in traffic_table(SUMMARY).rows if row[0] == GATHER.phase)
    assert row == ("unshard", "all_gather", "shard", "bf16", "5", "5", "1000 B", "1000 B", "ok")


def test_memory_has_a_row_per_rank_and_its_kinds_add_up() -> None:
    table = memory_table(SUMMARY)
    assert table.header == ("rank", "param", "activations", "total")
    assert table.rows == (("0", "10.0 MiB", "54.0 MiB", "64.0 MiB"), ("1", "11.0 MiB", "53.0 MiB", "64.0 MiB"))


def test_memory_of_many_ranks_is_shown_by_its_extremes() -> None:
    many = replace(SUMMARY, peak_bytes=[{"param": (rank * 7 % 64 + 1) * MIB} for rank in range(64)])
    assert [row[0] for row in memory_table(many).rows] == ["0 (least)", "9 (most)"]  # 9 * 7 = 63


@pytest.mark.parametrize(
    ("loss", "shown"), [(0.0, "1.000"), (2.5, "12.182"), (14.0, "1.2e+06"), (1e4, "inf"), (math.nan, "nan")]
)
def test_the_perplexity_is_the_exponential_of_the_held_out_loss_and_overflows_to_infinity(
    loss: float, shown: str
) -> None:
    assert dict(result_table(replace(SUMMARY, held_out_loss=loss)).rows)["held-out perplexity"] == shown
    assert held_out_scalars(loss, {"a": 0.0})["perplexity/held_out_a"] == 1.0


def test_what_is_not_known_is_said() -> None:
    values = dict(result_table(replace(SUMMARY, speed=Throughput(), peak_flops=None, held_out_loss=None)).rows)
    assert values["MFU"] == "unknown peak"
    assert values["held-out loss"] == "not evaluated"
    assert "held-out perplexity" not in values
    assert values["tokens/s"].startswith("unknown")
    known = dict(result_table(SUMMARY).rows)
    assert known["MFU"] == "42.1% of 989.4 TFLOP/s per device"
    assert known["tokens/s"].startswith("8,192 (297 steps")


def test_the_peak_stands_beside_what_was_planned_of_it() -> None:
    peaks = ({"param": 10 * 2**20, "activations": 54 * 2**20, "process": 2**30},)
    rows = dict(result_table(replace(SUMMARY, planned_bytes=63 * 2**20, peak_bytes=peaks)).rows)
    assert rows["device peak"] == "64.0 MiB, predicted 63.0 MiB"
    assert "device peak" not in dict(result_table(SUMMARY).rows)


def test_plain_tables_are_aligned() -> None:
    text = plain(summary_tables(SUMMARY))
    memory = text.split("\n\n")[1].splitlines()
    assert memory[0] == "peak memory per rank"
    assert len({len(line) for line in memory[1:]}) == 1


def test_a_table_with_nothing_to_say_is_left_out() -> None:
    alone = replace(SUMMARY, traffic={}, expected={}, peak_bytes=())
    assert [table.title for table in summary_tables(alone)] == ["result"]

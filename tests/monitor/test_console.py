"""The progress of a run, on a terminal and in a file."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

from rich.console import Console as Terminal
from sample_records import RECORD, SUMMARY, record_of

from dzero.monitor.console import Console, live_line
from dzero.monitor.meter import Throughput


def test_a_file_gets_plain_lines_of_keys_and_values() -> None:
    file = StringIO()
    Console(300, terminal=Terminal(file=file, width=40)).step(RECORD)
    assert file.getvalue() == (
        "step=1 loss=5.5000 lr=3.000e-04 grad_norm=1.25 loss_scale=65536 tokens_per_s=8192 mfu=0.4210 "
        "memory_mib=64 eta_s=83\n"
    )
    assert all(re.fullmatch(r"\w+=[^\s=]+", word) for word in file.getvalue().split())


def test_a_file_gets_the_first_the_last_and_every_nth_step() -> None:
    file = StringIO()
    console = Console(25, log_every_steps=10, terminal=Terminal(file=file))
    for step in range(1, 26):
        console.step(record_of(step))
    assert [line.split()[0] for line in file.getvalue().splitlines()] == ["step=1", "step=10", "step=20", "step=25"]


def test_a_file_gets_held_out_losses_and_notes_as_they_come() -> None:
    file = StringIO()
    console = Console(25, log_every_steps=100, terminal=Terminal(file=file))
    console.held_out(20, 3.25, {})
    console.note(21, "skipped: gradient of [layers.0.w] is not finite")
    assert file.getvalue() == (
        "step=20 held_out_loss=3.2500 held_out_perplexity=25.790\n"
        "step=21 skipped: gradient of [layers.0.w] is not finite\n"
    )


def test_a_file_gets_the_summary_without_escapes_or_rules() -> None:
    file = StringIO()
    Console(300, terminal=Terminal(file=file, width=30)).summary(SUMMARY)
    assert re.search(r"held-out loss +2\.5000", file.getvalue())
    assert re.search(r"reduce +reduce_scatter +shard .*≠", file.getvalue())
    assert "\x1b" not in file.getvalue()
    assert "──" not in file.getvalue()


def test_a_terminal_gets_one_live_line_and_ruled_tables() -> None:
    file = StringIO()
    terminal = Terminal(file=file, force_terminal=True, width=140, _environ={"TERM": "xterm"})
    console = Console(300, terminal=terminal)
    console.held_out(5, 3.25, {})
    for step in range(1, 8):
        console.step(record_of(step))
    console.note(7, "skipped: gradient of [w] is not finite")
    console.summary(SUMMARY)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "step 7/300" in shown
    assert "loss 5.430 · held-out 3.250 · 8,192 tokens/s · MFU 42.1% · 64.0 MiB · ETA 1:23" in shown
    assert "step=7 skipped: gradient of [w] is not finite" in shown
    assert "\x1b[2K" in file.getvalue()  # the line was redrawn in place
    assert "held-out loss" in shown
    assert "────" in shown


def test_a_live_line_leaves_out_what_is_not_known() -> None:
    bare = replace(RECORD, speed=Throughput(), eta_s=None, memory_bytes={}, skipped_steps=2)
    assert live_line(bare, None) == "loss 5.500 · 2 skipped"


def test_closing_twice_is_harmless() -> None:
    console = Console(3, terminal=Terminal(file=StringIO(), force_terminal=True))
    console.step(RECORD)
    console.close()
    console.close()

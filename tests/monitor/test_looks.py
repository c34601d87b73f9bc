"""What a user of a terminal of 80 columns sees of a run, and finds when it has ended."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from small_runs import resolved, write_text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dzero import RunError

ROOT = Path(__file__).parents[2]
COLUMNS = 80


def on_a_terminal(line: list[str], folder: Path) -> tuple[int, str]:
    """The exit code of a command on a terminal of `COLUMNS` columns, and all that it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    left_out = ("COLUMNS", "LINES", "NO_COLOR", "RANK", "WORLD_SIZE")
    env = {key: value for key, value in os.environ.items() if key not in left_out} | {"TERM": "xterm"}
    with subprocess.Popen(line, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = bytearray()
        try:
            while part := os.read(ours, 1 << 16):
                shown += part
        except OSError:  # EIO: nobody has the terminal any more
            pass
    os.close(ours)
    return process.returncode, shown.decode()


def test_a_run_on_80_columns_shows_speed_and_time_left_and_leaves_tracks_and_a_board(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    settings = ["zero.stage=2", "offload=host", f"data.path={text}", "train.steps=12", "train.sequence_tokens=32"]
    settings += ["monitor.plan=false", "profile=on", "profile.start_step=6", "profile.steps=1", "model.layers=2"]
    line = [sys.executable, str(ROOT / "train.py"), *settings, "train.evaluate_every_steps=5", "hydra.run.dir=out"]
    code, shown = on_a_terminal(line, tmp_path)
    assert code == 0, shown

    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    lines = (line.partition("USDT:")[0] for line in re.split(r"[\r\n]+", plain))  # that is torch's profiler
    bars = [line for line in lines if re.match(r"step +\d+/12 ", line)]
    late = [bar for bar in bars if "tokens/s" in bar and int(re.findall(r"\d+", bar)[0]) < 12]
    assert late, bars
    assert not [bar for bar in bars if len(bar.rstrip()) > COLUMNS]
    assert all(re.search(r"loss [\d.]+ .*tokens/s .*ETA ", bar) for bar in late), late

    assert re.search(r"^ +TensorBoard +tensorboard --logdir out\s*$", plain, re.MULTILINE)
    trace = r"^ +trace +out/profile/rank\*\.pt\.trace\.json\.gz: open one at https://ui\.perfetto\.dev\s*$"
    assert re.search(trace, plain, re.MULTILINE)

    for rank in (0, 1):
        with gzip.open(tmp_path / "out" / "profile" / f"rank{rank}.pt.trace.json.gz") as file:
            events = json.load(file)["traceEvents"]
        spans = [str(event.get("name")).split(" unit")[0] for event in events if event.get("ph") == "X"]
        assert spans.count("step update") == 1, "one step of twelve is in the trace"
        assert {"all_gather", "reduce_scatter", "forward", "backward"} <= {span.split(" ")[0] for span in spans}
        names = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
        assert {"training", "COMPUTE", "EVICT", "FETCH"} <= names
        processes = [event["args"]["name"] for event in events if event.get("name") == "process_name"]
        assert any(name.startswith(f"rank {rank} (") for name in processes)

    board = EventAccumulator(str(tmp_path / "out"))
    board.Reload()
    assert 0 < board.Scalars("memory/param_gib")[0].value < 1
    tags = board.Tags()["scalars"]
    assert not [tag for tag in tags if tag.endswith("_bytes")]
    states = {f"memory/{kind}_gib" for kind in ("param", "grad", "master", "moments", "activations")}
    traffic = {f"traffic/{kind}_gib" for kind in ("all_gather", "reduce_scatter")}
    optim = {f"optim/{name}" for name in ("lr", "grad_norm", "skipped_steps")}
    assert {"loss/train", "loss/held_out", "speed/step_s"} | states | traffic | optim <= {*tags}
    assert len(board.Scalars("loss/train")) == 12
    resolved = board.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert b"stage: 2" in resolved
    assert "summary/text_summary" in board.Tags()["tensors"]
    first = [entry for entry in board.Tensors("note/text_summary") if entry.step == 0]
    assert len(first) == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("monitor.log_every_steps=0", r"monitor\.log_every_steps=0"),
        ("monitor.tensorboard=false monitor.plan=false", r"monitor\.plan=false has no effect"),
        ("monitor.tensorboard=false monitor.scalars_every_steps=5", "scalars_every_steps=5 has no effect"),
        ("profile.steps=5", r"profile\.steps=5 has no effect with profile\.enabled=false"),
        ("profile.memory_snapshot=false", r"profile\.memory_snapshot=false has no effect"),
        ("profile=on profile.start_step=1", r"profile\.start_step=1: must be a whole number ≥ 2"),
        ("profile=on profile.steps=0", r"profile\.steps=0"),
    ],
)
def test_settings_without_effect_are_refused_by_their_keys(settings: str, told: str) -> None:
    with pytest.raises(RunError, match=told):
        resolved(["launch.workers=1", *settings.split()])

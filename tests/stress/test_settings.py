"""Random settings through the real command: no traceback, no hang, and an exit code of 0 or 1.

Every case is `train.py` in a process of its own, forked from one that imported torch and dzero, so that a case costs
seconds; some are started as a user starts them. A case hangs when its processes have taken more than `PROCESSOR_S` of
processor time, or `WALL_S` have passed, which is generous because the machine may be shared.

    python tests/stress/test_settings.py --cases 300 --seed 0     writes benchmarks/results/settings-stress-<seed>.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from small_runs import SMALL, write_text  # noqa: E402

import dzero  # noqa: E402
from dzero.__main__ import train  # noqa: E402
from dzero.launch import fork_server, warm_process  # noqa: E402

PROCESSOR_S, WALL_S = 20.0, 60.0
REAL_SHARE = 0.05
BASE = [*SMALL.split(), "train.steps=2", "train.evaluate_batches=1", "monitor.tensorboard=false"]
ABSURD = ["nan", "inf", "-inf", "-1", "0", "1", "2", "3", str(2**31), str(2**63), str(2**64), "1e308", "1e-300", "null"]
WORDS = {
    "zero.stage": ["0", "1", "2", "3"],
    "precision": ["bf16", "fp16", "fp32", "bf16_remainder"],
    "offload": ["none", "host", "host_all", "disk", "infinity"],
    "offload.overlap": ["auto", "step", "forward", "backward", "delayed"],
    "offload.activations": ["device", "host", "disk"],
    "block.activation_checkpoint": ["none", "selective", "full"],
    "optim.rule": ["adamw", "muon", "SGD", "Adafactor"],
    "zero.optimizer_shard_axes": ["[shard]", "[replicate,shard]"],
    "zero.reduction": ["auto", "exact", "native"],
    "schedule.kind": ["constant", "cosine", "wsd"],
    "mesh.pp_schedule": ["1f1b", "gpipe", "interleaved", "zero_bubble"],
    "mesh.cp_attention": ["all_gather", "ulysses", "ring"],
    "model": ["tiny", "tiny_moe"],
    "checkpoint.on_error": ["stop", "warn"],
    "monitor.log_every_steps": ["1", "5"],
}
NUMBERS = [
    *(
        "train.microbatch_sequences",
        "train.sequence_tokens",
        "train.accumulate",
        "train.global_sequences",
        "train.seed",
    ),
    *("train.seed", "train.evaluate_every_steps", "train.max_skipped_steps", "optim.lr", "optim.eps", "optim.max_norm"),
    *(
        "optim.weight_decay",
        "mesh.dp",
        "mesh.tp",
        "mesh.pp",
        "mesh.cp",
        "mesh.ep",
        "mesh.replicate",
        "mesh.pp_stages_per_rank",
    ),
    *("launch.workers", "launch.threads", "launch.timeout_s", "checkpoint.every", "checkpoint.keep"),
    *("checkpoint.deadline_s", "checkpoint.staging_bytes", "offload.prefetch_units", "offload.undo_bytes"),
    *("offload.delay_warmup_steps", "offload.param_fraction", "offload.master_fraction", "offload.disk.threads"),
    *("offload.disk.block_bytes", "block.tiles", "block.loss_tiles", "scaler.init", "scaler.growth_interval"),
    *("schedule.warmup_steps", "schedule.decay_steps", "schedule.final", "model.hidden_size", "model.layers"),
    *("model.heads", "model.kv_heads", "model.ffn_size", "model.vocab_size", "model.experts", "model.top_k"),
    *("model.rope_theta", "model.norm_eps", "data.held_out", "zero.reshard_after_forward", "profile.start_step"),
    *("profile.steps", "hardware.device_bytes", "verify.steps", "lr", "optim.betas"),
]


def drawn(source: random.Random) -> list[str]:
    """One to five random settings: words that exist, and numbers of which most are absurd."""
    words = [f"{key}={source.choice(WORDS[key])}" for key in source.sample([*WORDS], source.randint(0, 3))]
    chosen = source.sample(NUMBERS, source.choice([0, 0, 1, 1, 2]))
    return words + [f"{key}={source.choice(ABSURD)}" for key in chosen] or ["train.steps=1"]


class _Forked:
    """What `WarmProcess` needs of a process: `serve` in a fork of this one, which has imported everything."""

    def __init__(self, line: list[str], **_: Any) -> None:
        channel, launcher = int(line[3]), int(line[4])
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            channel = os.dup(channel)
            os.set_inheritable(channel, True)
            fork_server.serve(channel, launcher)

    def wait(self, timeout: float | None = None) -> int:
        until_s = time.monotonic() + (timeout if timeout is not None else WALL_S)
        while time.monotonic() < until_s:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("warm", timeout or WALL_S)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def run_forked(settings: list[str], folder: Path) -> tuple[int, str]:
    """The exit code and output of the command in a fork of this process; 124 where it hangs."""
    log = folder / "log.txt"
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(folder)
        out = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(PROCESSOR_S), int(PROCESSOR_S)))
        warm_process.subprocess.Popen = _Forked  # type: ignore[attr-defined, misc, assignment]
        sys.argv = ["train.py", *settings]
        _end_as_python_does()
    until_s = time.monotonic() + WALL_S
    while time.monotonic() < until_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 124, log.read_text(errors="replace")


def _end_as_python_does() -> None:
    code = 0
    try:
        train()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_real(settings: list[str], folder: Path) -> tuple[int, str]:
    """The same of `python train.py`."""
    line = [sys.executable, str(ROOT / "train.py"), *settings]
    try:
        ended = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=WALL_S, check=False)
    except subprocess.TimeoutExpired as error:
        return 124, str(error.stdout)
    return ended.returncode, ended.stdout + ended.stderr


@contextmanager
def text() -> Iterator[tuple[Path, Path]]:
    """A folder, and a text in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), write_text(Path(folder) / "text.txt")


def outcome(settings: list[str], *, real: bool = False) -> tuple[str, str]:
    """`trained`, `refused`, or what went wrong; and the output."""
    with text() as (folder, data):
        run = run_real if real else run_forked
        code, told = run([*BASE, f"data.path={data}", *settings], folder)
    if code == 124 or "Traceback" in told or code not in (0, 1):
        return ("hung" if code == 124 else "traceback" if "Traceback" in told else f"exit code {code}"), told
    return ("trained" if code == 0 else "refused"), told


def stress(cases: int, seed: int, until_s: float) -> dict[str, Any]:
    """Run `cases` random cases, fewer where the clock passes `until_s`; counts, and what went wrong."""
    source, counts, wrong, began_s = random.Random(seed), Counter[str](), list[dict[str, str]](), time.monotonic()
    slowest_s = 0.0
    for _ in range(cases):
        settings, real = drawn(source), source.random() < REAL_SHARE
        if time.monotonic() > until_s:
            break
        case_s = time.monotonic()
        how, told = outcome(settings, real=real)
        slowest_s = max(slowest_s, time.monotonic() - case_s)
        counts[how] += 1
        counts["real subprocesses"] += real
        if how not in ("trained", "refused"):
            wrong.append({"settings": " ".join(settings), "how": how, "told": told[-2000:]})
    ran = sum(counts.values()) - counts["real subprocesses"]
    seconds = round(time.monotonic() - began_s)
    took = {"seconds": seconds, "slowest_s": round(slowest_s, 1)}
    return {"seed": seed, "asked": cases, "ran": ran, **took, "counts": dict(counts), "wrong": wrong}


@pytest.mark.slow
def test_random_settings_train_or_are_refused() -> None:
    import_all()
    found = stress(300, seed=0, until_s=time.monotonic() + 3600)
    assert found["wrong"] == []
    assert found["ran"] == 300


def main() -> None:
    """Run it, and keep its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    import_all()
    found = stress(options.cases, options.seed, time.monotonic() + 60 * options.minutes)
    versions = {"python": platform.python_version(), "torch": sys.modules["torch"].__version__}
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, no GPU, shared"
    row = {"dzero": dzero.__version__, **versions, "hardware": machine, "commit": commit, **found}
    target = ROOT / "benchmarks" / "results" / f"settings-stress-{options.seed}.json"
    target.write_text(json.dumps(row, indent=1) + "\n")
    print({**row, "wrong": len(found["wrong"])})


def import_all() -> None:
    """Import what a run needs, once."""
    for name in (*warm_process.PRELOADED, "dzero.cli.train"):
        warm_process.import_module(name)


if __name__ == "__main__":
    main()

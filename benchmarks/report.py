"""Where results go: a row of JSON (one line, appended), a table in markdown, a plot; all in benchmarks/results/."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
COMMIT = ""
"""Of the tree, where git cannot tell it: a copy with no history or another, or a machine without git."""
PACKAGES = ("torch", "deepspeed", "numba", "torchao", "transformers", "accelerate")


def circumstances() -> dict[str, Any]:
    """When, on what, with what: hardware, versions, commit, and the load that others put on the machine."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "load_1min": round(os.getloadavg()[0], 2),
            **_gpu(),
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "malloc": {k: v for k, v in os.environ.items() if k.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))},
    }


def append_row(question: str, row: dict[str, Any]) -> Path:
    """Add `row` to results/<question>.jsonl."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{question}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({**circumstances(), **row}) + "\n")
    return path


@contextmanager
def results_kept(words: Sequence[str]) -> Iterator[None]:
    """Let results go to benchmarks/results while inside, or nowhere that stays where `words` ask for a CPU's."""
    global RESULTS
    with tempfile.TemporaryDirectory() as folder:
        if "--device=cpu" in words or ("--device", "cpu") in pairwise(words):
            RESULTS = Path(folder)
        yield


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def write_table(name: str, text: str) -> None:
    """Print `text` and keep it as results/<name>.md."""
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)


def plot_bars(name: str, title: str, panels: dict[str, dict[str, float]]) -> None:
    """One panel of horizontal bars per quantity, as results/<name>.png. Without matplotlib: a line that says so."""
    if (pyplot := _pyplot()) is None:
        return
    sides = list(next(iter(panels.values())))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6 * len(panels), 1 + 0.3 * len(sides)), sharey=True, squeeze=False
    )
    for axis, (quantity, values) in zip(axes[0], panels.items(), strict=True):
        colors = ["tab:blue" if side.startswith("dzero") else "tab:gray" for side in sides]
        bars = axis.barh(sides, [values[side] for side in sides], color=colors)
        axis.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        axis.set_title(quantity, fontsize=10)
        axis.margins(x=0.15)
    axes[0][0].invert_yaxis()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=120)


def plot_lines(name: str, title: str, series: dict[str, list[float]]) -> None:
    """One line per series over steps from 1, as results/<name>.png. Without matplotlib: a line that says so."""
    if (pyplot := _pyplot()) is None:
        return
    figure, axis = pyplot.subplots(figsize=(8, 5))
    for label, values in series.items():
        axis.plot(range(1, len(values) + 1), values, label=label, linewidth=1)
    axis.set_xlabel("step")
    axis.set_title(title)
    axis.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=120)


def plot_pairs(name: str, title: str, panels: dict[str, list[tuple[float, float]]], within: dict[str, float]) -> None:
    """(predicted, measured) per quantity beside the diagonal and a band of so large an error, as results/<name>.png."""
    if (pyplot := _pyplot()) is None:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 5), squeeze=False)
    for axis, (quantity, pairs) in zip(axes[0], panels.items(), strict=True):
        low, high = 0.9 * min(map(min, pairs)), 1.1 * max(map(max, pairs))
        error = within[quantity]
        axis.plot([low, high], [low, high], color="tab:gray", linewidth=1)
        axis.fill_between([low, high], [low * (1 - error), high * (1 - error)], [low * (1 + error), high * (1 + error)],
                          color="tab:gray", alpha=0.2, label=f"±{error:.0%}")  # fmt: skip
        axis.scatter([measured for _, measured in pairs], [predicted for predicted, _ in pairs], s=18)
        axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axis.set(title=quantity, xlabel="measured", ylabel="predicted")
        axis.legend(loc="upper left")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=120)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is missing; pip install 'dzero[bench]'")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _commit() -> str:
    """The tree's commit, marked when it has changes."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        dirty = subprocess.run([*git, "status", "--porcelain", ":/dzero"], capture_output=True, text=True).stdout
    except OSError:
        return COMMIT
    return COMMIT or head + ("+changes" if dirty and head else "")


def _gpu() -> dict[str, Any]:
    """What this process computes on beside the CPU: the GPU, where it has used one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    memory = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return {"gpu": {"name": torch.cuda.get_device_name(0), "memory_gib": memory, "cuda": torch.version.cuda}}


def _cpu_name() -> str:
    fields = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    return next((value.strip() for key, value in fields.items() if key.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""The steps of gpu_session.py, those that decide most first, and the process that runs one of them.

    python benchmarks/gpu_steps.py STEP --device cuda --out FOLDER

Figures go to FOLDER/findings.json, tables, rows and pictures to FOLDER/results. Each step imports what it needs itself,
so that one that cannot be imported fails alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devices import Device
    from gpu_findings import Findings

FINDINGS, RESULTS = "findings.json", "results"


@dataclass(frozen=True)
class Step:
    """A step. question: what it answers. limit_s: its own limit. run: what its process does."""

    question: str
    limit_s: float
    run: Callable[[Device, Findings, Path], None]


def benchmark(module: str, on_gpu: str, on_cpu: str) -> Callable[[Device, Findings, Path], None]:
    """Return a step that runs one of the benchmarks with these words, and tells what its row found."""

    def run(device: Device, found: Findings, out: Path) -> None:
        if not device.on_gpu:
            found.stand_in(f"{module}.py measures something tiny on the CPU")
        words = (on_gpu if device.on_gpu else on_cpu).split()
        sys.argv = [f"{module}.py", "--device", device.torch.type, *words]
        importlib.import_module(module).main()
        rows = [json.loads(line) for line in (out / RESULTS / f"{module}.jsonl").read_text().splitlines()]
        found.note(rows=len(rows))
        found.find("; ".join(row["finding"] for row in rows))

    return run


def _facts(device: Device, found: Findings, out: Path) -> None:
    from gpu_facts import facts

    facts(device, found)


def _tests(device: Device, found: Findings, out: Path) -> None:
    from gpu_tests import tests

    tests(device, found)


def _ranks(device: Device, found: Findings, out: Path) -> None:
    from gpu_tests import ranks

    ranks(device, found)


def _syncs(device: Device, found: Findings, out: Path) -> None:
    from gpu_syncs import syncs

    syncs(device, found)


def _profile(device: Device, found: Findings, out: Path) -> None:
    from gpu_trace import trace

    trace(device, found, out / RESULTS)


def _recompiles(device: Device, found: Findings, out: Path) -> None:
    from gpu_trace import recompiles

    recompiles(device, found)


def _whole(device: Device, found: Findings, out: Path) -> None:
    from gpu_whole import whole

    whole(device, found, out)


def _fail(device: Device, found: Findings, out: Path) -> None:
    raise RuntimeError("this step fails, as it was asked to")


def _hang(device: Device, found: Findings, out: Path) -> None:
    """Hang, with a child that would outlive a parent that is killed alone."""
    found.note(child=subprocess.Popen(["sleep", "600"]).pid)
    time.sleep(600)


LOSS = "how fast train.py's own loss lets {} sequences of a 1 B model train, by how it is computed"
OFFLOAD = "--samples 8 --rounds 5 --seconds 70 --compile --max-norm 1e9 --sides dzero_resident "
"""A norm that no step reaches: where every step is clipped, early updates are undone and measure nothing."""
TRIED = "--sides dzero_resident dzero_half"
STEPS = {
    **{
        f"loss_{samples}": Step(LOSS.format(samples), 120, benchmark("gpu_loss", f"--samples {samples}", tried))
        for samples, tried in ((8, ""), (4, "--sides 4"), (16, "--sides 4"))
    },
    "profile": Step("how busy the GPU is in such steps", 120, _profile),
    "host_adam": Step(
        "how near to its memory's roof the host updates, by threads, alone and beside copies",
        120,
        benchmark(
            "host_adam",
            "--rounds 7 --threads 1 4 8 16 --sides dzero dzero_small --beside nothing copies",
            "--rounds 1 --threads 1 --elems 65536 --sides dzero dzero_small --beside nothing copies",
        ),
    ),
    "gpu_offload": Step(
        "offloaded over resident speed, where no step is clipped",
        120,
        benchmark("gpu_offload", f"{OFFLOAD} dzero_forward dzero_backward", TRIED),
    ),
    "fractions": Step(
        "the same with part of the states on the host",
        120,
        benchmark("gpu_offload", f"{OFFLOAD} dzero_half dzero_third", TRIED),
    ),
    "tests": Step("which tests that need a GPU pass", 240, _tests),
    "fetch": Step(
        "what 8-bit copies of parameters on the host bring",
        120,
        benchmark("gpu_offload", f"{OFFLOAD} dzero_host_all dzero_fetch_fp8", "--sides dzero_resident dzero_fetch_fp8"),
    ),
    "gpu_plan": Step(
        "predicted over measured peaks", 120, benchmark("gpu_plan", "--models 1b --seconds 80", "--tokens 32")
    ),
    "largest": Step(
        "whether GPU and host together train a model of 0.85 of their memory",
        120,
        benchmark(
            "gpu_offload", "--largest --tries 1 --timeout-s 90", "--largest --tries 1 --layers-max 3 --cap-mib 512"
        ),
    ),
    "facts": Step("what the machine can do", 90, _facts),
    "ranks": Step("whether four ranks on one card train as they should", 120, _ranks),
    "syncs": Step("where a step waits for the GPU", 90, _syncs),
    "recompiles": Step("what is compiled again after the first step", 120, _recompiles),
    "train": Step("whether the whole program trains, saves and goes on", 120, _whole),
    "gpu_1b": Step("what stages cost a 1 B model", 120, benchmark("gpu_1b", "--steps 10 --compile on", "--stages 0 3")),
    "gpu_sums": Step("what sums of squares cost", 90, benchmark("gpu_sums", "--rounds 7", "--rounds 1")),
}
INJECTED = {"fail": Step("a failure", 60, _fail), "hang": Step("a hang", 4, _hang)}


def main() -> None:
    """Run one step in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=[*STEPS, *INJECTED])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="a folder of this step's own")
    parser.add_argument("--commit", default="", help="of the tree, where git cannot tell it")
    options = parser.parse_args()
    (options.out / RESULTS).mkdir(parents=True)

    import report
    from devices import Device
    from gpu_findings import Findings

    report.RESULTS, report.COMMIT = options.out / RESULTS, options.commit
    found, device = Findings(options.out / FINDINGS), Device(options.device)
    found.note(circumstances=report.circumstances())
    {**STEPS, **INJECTED}[options.step].run(device, found, options.out)


if __name__ == "__main__":
    main()

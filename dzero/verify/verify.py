"""Command `python -m dzero verify`: compare the first steps of a configuration with those of stage 0 on the device.

    baseline    runs twice; if it differs from itself, that spread is the tolerance of all later comparisons
    ladder      every rung (`verify/ladder.py`) is compared with the one before it
    search      if two runs should have the same bits but differ, both run again up to the first mark that differs, and
                the tensors behind that mark are compared

Only one run is in memory at a time. Of each run, the marks and the masters of this rank's rows remain, in host memory
(4 bytes per parameter). Nothing is saved, profiled or written for TensorBoard.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from dzero.comm.watchdog import Watchdog
from dzero.config import CONF
from dzero.errors import RunError, user_errors
from dzero.launch.launcher import start
from dzero.overrides import composed, spelt_out, tell, typed_keys
from dzero.plan.auto import resolve_auto
from dzero.plan.run_layout import check_all_here, layout_of, settled, workers_of
from dzero.utils.terminal import show
from dzero.verify.compare import by_how_much, first_difference, gap
from dzero.verify.config import VerifyRun
from dzero.verify.ladder import Rung, ladder
from dzero.verify.report import EXACTLY, SPREAD, Finding, VerifyReport, table, verdict
from dzero.verify.trace import Followed, Mark, Trace

AGREES, DIFFERS, NOT_COMPARED = 0, 1, 2


def verify(settings: Sequence[str]) -> int:
    """Verify these Hydra overrides; return 0 if the runs agree, 1 if they differ, 2 if they could not be compared."""
    try:
        asked = composed(settings, CONF, VerifyRun)
        typed = typed_keys(spelt_out(settings))
        check_all_here([asked], typed)
        with user_errors():
            asked, gave_way = settled(asked, typed)
        tell(gave_way)
        run = resolve_auto(asked, settings)
        assert isinstance(run, VerifyRun)
        with tempfile.TemporaryDirectory(prefix="dzero-verify-") as folder:
            start(work, run, Path(folder), workers=workers_of(run))
            left, *_ = Path(folder).glob("agrees-*")
            return AGREES if left.read_text() == str(True) else DIFFERS
    except RunError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # under torchrun, every rank finds the same error
            print(f"error: {error}", file=sys.stderr)
        return NOT_COMPARED


def work(run: VerifyRun, folder: Path, device: torch.device) -> None:
    """Run the comparisons of one worker; rank 0 prints them, and a file in `folder` stores whether the runs agree."""
    with Watchdog(run.launch.timeout) as watch:
        report = Verifier(run, folder, device, watch).report()
    rank = dist.get_rank()
    if rank == 0:
        show([table(report)])
        print(f"\n{verdict(report)}", flush=True)
    (folder / f"agrees-{rank}").write_text(str(report.agrees))


class Verifier:
    """Comparisons of one worker. Every method is collective.

    `folder` is the output folder of the runs, which write nothing to it. `watch` follows their collectives.
    """

    def __init__(self, run: VerifyRun, folder: Path, device: torch.device, watch: Watchdog | None = None) -> None:
        self._steps, self._folder, self._device, self._watch = run.verify.steps, folder, device, watch
        self._ranks = dist.get_world_size()
        with user_errors():
            self._rungs = ladder(run, self._ranks)
            self._layout = layout_of(run, device.type, run.mesh.data_ranks(self._ranks))

    def report(self) -> VerifyReport:
        """Run the baseline twice, then every other rung; return the comparisons."""
        lower, *others = self._rungs
        before = self._trace(lower)
        itself = self._met(lower, before, lower)[0]
        findings = [itself]
        for rung in others:
            finding, trace = self._met(lower, before, rung, itself)
            findings.append(finding)
            lower, before = rung, trace
        return VerifyReport(self._steps, self._ranks, tuple(findings))

    def _met(self, lower: Rung, before: Trace, rung: Rung, itself: Finding | None = None) -> tuple[Finding, Trace]:
        """Run `rung` and compare it with `before`, the trace of `lower`; `itself` compares the baseline with itself."""
        trace = self._trace(rung)
        allowed, apart = rung.allowed, None
        if itself is not None and not itself.agrees:
            allowed = (allowed or EXACTLY).widened(itself.gap, SPREAD)
        elif allowed is None and (mark := first_difference(before, trace, self._device)) is not None:
            # Both run again, up to the first mark in which they differ, and keep the tensors behind it.
            apart = by_how_much(mark, self._trace(lower, mark), self._trace(rung, mark), self._device)
        return Finding(rung, allowed, gap(before, trace, self._device, allowed), apart), trace

    def _trace(self, rung: Rung, keep: Mark | None = None) -> Trace:
        with user_errors():
            trainer = Followed(rung.config, self._folder, self._device, self._layout, keep)
        if self._watch is not None:
            self._watch.started()
        trace = trainer.follow(self._steps if keep is None else keep.step)
        del trainer
        gc.collect()  # the trainer is in reference cycles, and the next run needs its memory
        return trace

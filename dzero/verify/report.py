"""Report of a verification: a table of all comparisons, and a line with the verdict."""

from __future__ import annotations

from dataclasses import dataclass

from dzero.utils.terminal import DIFFERS, OK, Table
from dzero.verify.compare import Difference, Gap
from dzero.verify.ladder import BASELINE, Rung
from dzero.verify.trace import GRAD, LOSS, MASTER, MEAN, NORM, PARAM, READ, SCALE

EXACTLY = Gap(0.0, 0.0, 0.0, 0.0)
SPREAD = 10.0
"""Tolerance of later pairs of runs, in multiples of the first pair's spread, which may be small by chance."""
SAID = {
    READ: "the parameters that forward reads",
    LOSS: "a rank's loss",
    MEAN: "the mean loss",
    GRAD: "the reduced gradients",
    NORM: "the gradient norm",
    SCALE: "the loss scale or the skipped steps",
    MASTER: "the masters",
    PARAM: "the parameters",
}


@dataclass(frozen=True)
class Finding:
    """Comparison of `rung` with the one before it.

    Attributes:
        allowed: Tolerance; None if the same bits are expected.
        gap: Measured differences.
        apart: First difference in bits. None if there is none, or none was looked for.
    """

    rung: Rung
    allowed: Gap | None
    gap: Gap
    apart: Difference | None

    @property
    def agrees(self) -> bool:
        """Whether the runs are as close as expected."""
        return self.apart is None if self.allowed is None else self.gap.within(self.allowed)


@dataclass(frozen=True)
class VerifyReport:
    """All comparisons, starting with the baseline and itself; the same on every rank."""

    steps: int
    ranks: int
    findings: tuple[Finding, ...]

    @property
    def agrees(self) -> bool:
        """Whether all runs agree; the baseline with itself, which only sets the tolerance, does not count."""
        return all(finding.agrees for finding in self.findings[1:])


def table(report: VerifyReport) -> Table:
    """Return a table with a row for each comparison."""
    rows = []
    for index, finding in enumerate(report.findings):
        name = finding.rung.name if index else f"{BASELINE}, again"
        expected = "same bits" if finding.allowed is None else "tolerance"
        cells = [_cell(*pair) for pair in zip(finding.gap.sizes, (finding.allowed or EXACTLY).sizes, strict=True)]
        rows.append((name, expected, OK if finding.agrees else DIFFERS, *cells))
    title = f"{report.steps} steps on {report.ranks} ranks, each run compared with the one above, the first with itself"
    return Table(title, ("run", "expected", "", "loss", "gradient norm", "a unit's", "masters"), tuple(rows), left=3)


def verdict(report: VerifyReport) -> str:
    """Return a line with the verdict, after a line about the baseline if it differs from itself."""
    itself, *others = report.findings
    names = [BASELINE, *(finding.rung.name for finding in others)]
    lines = []
    if itself.apart is not None:
        lines.append(f"the baseline differs from itself: {_where(itself.apart)}; its spread is the measure")
    for before, finding in zip(names, others, strict=False):
        if not finding.agrees:
            found = _beyond(finding.gap, finding.allowed or EXACTLY) if finding.apart is None else _where(finding.apart)
            lines.append(f"DIFFERS: {finding.rung.name} from {before}: {found}. Expected: {_expected(finding)}")
            return "\n".join(lines)
    met = [
        f"{finding.rung.name} and {before}: {_expected(finding)}"
        for before, finding in zip(names, others, strict=False)
    ]
    lines.append("AGREES: " + ("; ".join(met) or f"the configuration is {BASELINE}, which was compared with itself"))
    return "\n".join(lines)


def _expected(finding: Finding) -> str:
    if finding.allowed is None:
        return "the same bits"
    if finding.rung.allowed is None:
        return f"no more than {SPREAD:g} times the baseline's own spread"
    return f"a tolerance, since {finding.rung.why}"


def _where(apart: Difference) -> str:
    """Format as `step 2, unit layers.1: the masters; first layers.1.ffn.up.weight, by up to 1e-3, 12 units ...`."""
    mark = apart.mark
    place = f"step {mark.step}" + (f", unit {mark.unit}" if mark.unit else "") + f": {SAID[mark.what]}"
    if mark.unit and not apart.param:
        return f"{place}; not when both ran again, so it comes and goes"
    by = f", by up to {apart.largest:.2g}" if apart.largest else ""
    if not apart.param:
        return place + by
    return f"{place}; first {apart.param}{by}, {apart.ulps} units in the last place"


def _beyond(gap: Gap, allowed: Gap) -> str:
    """Format as `gradient norm of unit layers.1 in step 2 6.2e-02 where 2.0e-02 is allowed, masters ...`."""
    names = ("loss", "gradient norm", f"gradient norm of unit {gap.unit} in step {gap.step}", "masters")
    beyond = [
        f"{name} {measured:.1e} where {most:.1e} is allowed"
        for name, measured, most in zip(names, gap.sizes, allowed.sizes, strict=True)
        if measured > most
    ]
    return ", ".join(beyond) + (f", most in {gap.param}" if gap.masters > allowed.masters else "")


def _cell(measured: float, allowed: float) -> str:
    return f"{measured:.1e} of {allowed:.1e}" if allowed else f"{measured:.1e}" if measured else "0"

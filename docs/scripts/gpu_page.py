"""Write docs/reference/gpu.md: what has run on which GPU, from the rows in benchmarks/results.

    python docs/scripts/gpu_page.py

A row is of a GPU where its `hardware` names one, as benchmarks/report.py writes it. tests/test_docs.py fails where
the page is not what this makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parents[1]
PAGE, RESULTS = DOCS / "reference" / "gpu.md", DOCS.parent / "benchmarks" / "results"
SESSION = "gpu_session"
Row = dict[str, Any]


class Question(NamedTuple):
    """What is to be measured on a GPU. row: the file of its rows. step: within a session's row. part: of its rows."""

    asked: str
    command: str
    row: str
    step: str = ""
    part: str = ""


QUESTIONS = (
    Question(
        "speed of `train.py` with a 1 B model, by how its loss is computed", "python benchmarks/gpu_loss.py", "gpu_loss"
    ),
    Question("links, page-locking, memory and matrix products of the machine", "--only facts", SESSION, "facts"),
    Question("the tests that need a GPU", "--only tests", SESSION, "tests"),
    Question("the tests of four ranks on one GPU", "--only ranks", SESSION, "ranks"),
    Question("where a step waits for the GPU, by line", "--only syncs", SESSION, "syncs"),
    Question("how busy the GPU is, and what an update launches", "--only profile", SESSION, "profile"),
    Question("the host's update beside its memory's roof, by threads, beside copies", "--only host_adam", "host_adam"),
    Question("what is compiled again after the first step", "--only recompiles", SESSION, "recompiles"),
    Question("whether `train.py` trains, saves and goes on", "--only train", SESSION, "train"),
    Question("tokens/s, MFU and memory of a 1 B model", "python benchmarks/gpu_1b.py", "gpu_1b"),
    Question("offloaded over resident speed", "python benchmarks/gpu_offload.py", "gpu_offload", part="speed"),
    Question(
        "how large a model GPU and host train",
        "python benchmarks/gpu_offload.py --largest",
        "gpu_offload",
        part="largest",
    ),
    Question("predicted over measured memory", "python benchmarks/gpu_plan.py", "gpu_plan"),
    Question("what sums of squares cost", "python benchmarks/gpu_sums.py", "gpu_sums"),
)


class Answer(NamedTuple):
    """What a row says to a question."""

    row: Row
    outcome: str
    finding: str


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(RESULTS))
    print(PAGE)


def page(results: Path) -> str:
    """Return the page's text for the rows in a folder."""
    answered = {question: [*_answers(question, results)] for question in QUESTIONS}
    ran = [f"{question.asked} | {_cells(answer)}" for question in QUESTIONS for answer in answered[question]]
    waiting = [question for question in QUESTIONS if not any(each.outcome == "ok" for each in answered[question])]
    return "\n".join(
        [
            "# What has run on a GPU",
            "",
            "<!-- python docs/scripts/gpu_page.py writes this from the rows in benchmarks/results; do not edit it -->",
            "",
            *(_table("what | GPU | date | torch | commit | found", ran) if ran else ["Nothing has run on a GPU yet."]),
            "",
            *_waiting(waiting),
        ]
    )


def status(results: Path) -> str:
    """Return the README's line."""
    answers = [each for question in QUESTIONS for each in _answers(question, results) if each.outcome == "ok"]
    if not answers:
        return "**GPU status: [nothing has run on a GPU yet](docs/reference/gpu.md)**; all below was measured on CPUs."
    names = ", ".join(sorted({answer.row["hardware"]["gpu"]["name"] for answer in answers}))
    return f"**GPU status: [{len(answers)} measurements on {names}](docs/reference/gpu.md)**."


def _waiting(questions: list[Question]) -> list[str]:
    if not questions:
        return []
    commands = [q.command if q.command.startswith("python") else f"python benchmarks/gpu_session.py {q.command}"
                for q in questions]  # fmt: skip
    rows = [f"{question.asked} | `{command}`" for question, command in zip(questions, commands, strict=True)]
    told = "`python benchmarks/gpu_session.py` asks all of it, what decides most within ten minutes; "
    return [
        "## What is waiting for one",
        "",
        *_table("question | command", rows),
        "",
        f"{told}[benchmarks/README.md](../../benchmarks/README.md#the-first-ten-minutes-on-a-gpu) says how.",
        "",
    ]


def _table(header: str, rows: list[str]) -> list[str]:
    rule = " | ".join("---" for _ in header.split("|"))
    return [f"| {line} |" for line in (header, rule, *rows)]


def _answers(question: Question, results: Path) -> Iterator[Answer]:
    path = results / f"{question.row}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:
        if "gpu" not in row["hardware"] or row.get("part", "") != question.part:
            continue
        if not question.step:
            yield Answer(row, "ok", row.get("finding", ""))
        for step in row.get("steps", []):
            if step["name"] == question.step and step["outcome"] != "not reached":
                yield Answer(row, step["outcome"], step["finding"])


def _cells(answer: Answer) -> str:
    row, found = answer.row, answer.finding.replace("|", "/").replace("\n", " ")
    found = found if answer.outcome == "ok" else f"{answer.outcome}: {found}"
    commit = row["commit"][:9] or "unknown"
    return " | ".join([row["hardware"]["gpu"]["name"], row["date"][:10], row["versions"]["torch"], commit, found])


if __name__ == "__main__":
    main()

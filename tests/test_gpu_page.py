"""docs/reference/gpu.md says what has run on a GPU, and the README says it on its first screen."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FIRST_SCREEN = 30


@pytest.fixture(scope="module")
def gpu_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_page", ROOT / "docs" / "scripts" / "gpu_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(**more: Any) -> dict[str, Any]:
    return {
        "date": "2027-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "hardware": {"cpu": "some", "gpu": {"name": "NVIDIA H100 80GB HBM3"}},
        "versions": {"torch": "2.11.0+cu130"},
        **more,
    }


def write(folder: Path, question: str, *rows: dict[str, Any]) -> None:
    (folder / f"{question}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


def test_the_committed_page_is_what_the_rows_say(gpu_page: ModuleType) -> None:
    """`python docs/scripts/gpu_page.py` writes it anew."""
    assert gpu_page.PAGE.read_text() == gpu_page.page(gpu_page.RESULTS)


def test_the_readme_says_it_on_its_first_screen(gpu_page: ModuleType) -> None:
    first = (ROOT / "README.md").read_text().splitlines()[:FIRST_SCREEN]
    assert gpu_page.status(gpu_page.RESULTS) in " ".join(first)


def test_without_rows_everything_waits(gpu_page: ModuleType, tmp_path: Path) -> None:
    page = gpu_page.page(tmp_path)
    assert "Nothing has run on a GPU yet." in page
    assert all(question.asked in page for question in gpu_page.QUESTIONS)


def test_rows_of_a_cpu_count_for_nothing(gpu_page: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "gpu_plan", row(hardware={"cpu": "some"}, finding="far off"))
    assert gpu_page.page(tmp_path) == gpu_page.page(tmp_path / "none")


def test_what_ran_is_told_and_waits_no_more(gpu_page: ModuleType, tmp_path: Path) -> None:
    steps = [
        {"name": "facts", "outcome": "ok", "finding": "25 | 50 GB/s"},
        {"name": "tests", "outcome": "timed out", "finding": "3 passed"},
        {"name": "syncs", "outcome": "not reached", "finding": ""},
    ]
    write(tmp_path, "gpu_session", row(steps=steps, finding="1 of 3"))
    write(tmp_path, "gpu_offload", row(part="largest", finding="30 B parameters"))
    ran, waiting = gpu_page.page(tmp_path).split("## What is waiting for one")
    where = "NVIDIA H100 80GB HBM3 | 2027-01-02 | 2.11.0+cu130 | 012345678"
    assert f"{where} | 25 / 50 GB/s |" in ran
    assert f"{where} | timed out: 3 passed |" in ran
    assert f"| how large a model GPU and host train | {where} | 30 B parameters |" in ran
    assert "waits for the GPU" not in ran
    asked = {question.step or question.part or question.row: question.asked for question in gpu_page.QUESTIONS}
    assert asked["facts"] not in waiting
    assert asked["largest"] not in waiting
    assert all(asked[name] in waiting for name in ("tests", "syncs", "speed", "gpu_1b"))
    assert "2 measurements on NVIDIA H100 80GB HBM3" in gpu_page.status(tmp_path)

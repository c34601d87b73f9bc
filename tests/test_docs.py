"""README.md and docs/, as they are read in the repository.

Every block of Python runs on two ranks, commands have settings that exist, links lead to what is there, and pages that
are made from the code are current.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from from_words import model_of, run_of, settings_of, to_verify
from pool import Pool
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SMALL = (('"cuda"', '"cpu"'), ("tp=8", "tp=2"), ("pp=4", "pp=2"), ("ep=8", "ep=2"), ("4096", "16"))
"""What a block says, and what it says on two ranks without GPUs."""
SIZES = [f"model.{size}=2" for size in ("layers", "heads", "kv_heads")]
SIZES += ["model.hidden_size=16", "model.ffn_size=16", "model.tied=false"]
MIXTURE = ["model=tiny_moe", *SIZES, "model.experts=2", "model.top_k=1"]
BATCH, TIME = 2, 8
COMMAND = re.compile(r"\s*(python train\.py|python -m dzero|dzero)\s")


def blocks(language: str) -> list[tuple[str, int, str]]:
    """Return (page, line, block) of every block in a language; "" for commands and what they print."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            if block[1] == language:
                where = page.relative_to(ROOT).as_posix()
                found.append((where, text[: block.start()].count("\n") + 1, block[2]))
    return found


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def run(rank: int, ranks: int, page: str, code: str) -> None:
    """Run a block with the names that its page supposes."""
    for said, here in SMALL:
        code = code.replace(said, here)
    torch.manual_seed(0)
    batches = torch.randint(32, (4, BATCH, TIME + 1))
    tokens, targets = batches[0, :, :-1], batches[0, :, 1:]
    model = model_of(32, *(MIXTURE if "experts" in page else SIZES))
    known = {
        "model": model,
        "steps": [(batches[..., :-1], batches[..., 1:])] if "pipeline" in page else [batches],
        "loss_of": loss_of,
        "cross_entropy": F.cross_entropy,
        "MyExperts": next((type(each) for each in model.modules() if type(each).__name__ == "Experts"), None),
        "tokens": tokens,
        "targets": targets,
        "batch": BATCH,
        "time": TIME,
        "device": torch.device("cpu"),
    }
    code = code.replace("microbatches=8", "microbatches=4").replace("loss / 8", "loss / 4")
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        exec("import torch, dzero\n" + code, known)  # noqa: S102 (our own pages)


@pytest.mark.product(keep=4)
@pytest.mark.parametrize(("page", "line", "code"), blocks("python"), ids=lambda each: str(each)[:40].split("\n")[0])
def test_a_block_of_python_runs(pool: Pool, page: str, line: int, code: str) -> None:
    pool.run(run, 2, page, code)


def commands() -> list[tuple[str, str]]:
    """Return (page, command) of all commands that start dzero; `&&` begins another, \\ goes on with a line."""
    found = []
    for page, _, block in blocks(""):
        for line in block.replace("\\\n", " ").splitlines():
            parts = line.partition("  #")[0].split("&&")
            found += [(page, part.strip()) for part in parts if COMMAND.match(part)]
    return found


@pytest.mark.product(keep=4)
@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_has_settings_that_exist(page: str, command: str) -> None:
    words = shlex.split(command.replace("...", ""))
    words = words[1:] if words[0] == "dzero" else words[2:] if words[1] == "train.py" else words[3:]
    if "train.py" not in command and not command.startswith("dzero train"):
        words = settings_of(*words)
    else:
        named = ("-cn", "config-name")
        words = [w for w in words if w != "train" and (not w.startswith("-") or any(name in w for name in named))]
    verified = any(word.startswith("verify.") for word in words)
    (to_verify if verified else run_of)(*words)


def test_the_pages_have_blocks_and_commands() -> None:
    assert len(blocks("python")) > 10
    assert len(commands()) > 20


LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").rglob("*.md"))]
LINK = re.compile(r"```.*?```|`[^`\n]*`|\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", re.DOTALL)
"""A link to a file or to a heading; or code, in which there are none."""


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in found}


def test_links_lead_to_files_and_headings_that_exist() -> None:
    dead, links = [], 0
    for page in LINKED:
        for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            path = page.parent / target if target else page
            links += bool(target or anchor)
            if not path.exists() or (anchor and anchor not in headings(path)):
                dead.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert dead == []
    assert links > 200


SEARCHED = {
    "guides/troubleshooting.md": "CUDA out of memory, OOM killer, Pinned memory, memlock, Training hangs, deadlock, "
    "Connection closed by peer, NCCL timeout, Loss is NaN, Loss differs from one process, Wrong loss after resume, "
    "got mixed torch.Tensor and DTensor, torch.save(model.state_dict()), Notebook, unit test, single process, pdb, "
    "breakpoint, First step is slow, steps are slow, low tokens per second",
    "guides/nodes.md": "multi-node, Slurm, Kubernetes, Ray, mpirun, Docker",
    "guides/training.md": "Activation checkpointing, gradient checkpointing, Gradient clipping",
    "guides/from_deepspeed.md": "ds_config.json, zero_to_fp32.py",
    "guides/checkpoints.md": "convert a checkpoint to Hugging Face",
}
"""What people type into the search: it ranks pages by their headings, far above what their text says."""


@pytest.mark.parametrize("page", SEARCHED)
def test_headings_have_the_words_that_people_search_for(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = [line.lower() for line in text.splitlines() if line.startswith("#")]
    assert [words for words in SEARCHED[page].split(", ") if not any(words.lower() in line for line in lines)] == []


def test_tests_that_pages_name_exist() -> None:
    gone, named = [], 0
    for page in LINKED:
        for path, function in re.findall(r"\b(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text(encoding="utf-8")):
            there, named = ROOT / path, named + 1
            if not there.exists() or f"def {function}" not in there.read_text(encoding="utf-8") + "def ":
                gone.append(f"{page.relative_to(ROOT)}: {path}::{function}")
    assert gone == []
    assert named > 40


def test_pages_that_are_made_from_the_code_are_current() -> None:
    code = "import reference; print(*(reference.text(page) for page in reference.PAGES), sep='', end='')"
    made = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT / "docs" / "scripts", text=True)
    pages = ("settings.md", "support.md", "deepspeed_keys.md", "modules.md")
    there = "".join((ROOT / "docs" / "reference" / page).read_text(encoding="utf-8") for page in pages)
    assert made == there, "write them anew: python docs/scripts/reference.py"


# What has run on a GPU

FIRST_SCREEN = 30


@pytest.fixture(scope="module")
def gpu_page() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "scripts" / "gpu_page.py")))


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


def test_the_page_and_the_first_screen_of_the_readme_are_what_the_rows_say(
    gpu_page: SimpleNamespace,
) -> None:
    """`python docs/scripts/gpu_page.py` writes it anew."""
    assert gpu_page.PAGE.read_text() == gpu_page.page(gpu_page.RESULTS)
    first = (ROOT / "README.md").read_text().splitlines()[:FIRST_SCREEN]
    assert gpu_page.status(gpu_page.RESULTS) in " ".join(first)


def test_without_rows_of_a_gpu_everything_waits(gpu_page: SimpleNamespace, tmp_path: Path) -> None:
    write(tmp_path, "gpu_plan", row(hardware={"cpu": "some"}, finding="far off"))
    page = gpu_page.page(tmp_path)
    assert page == gpu_page.page(tmp_path / "none")
    assert "Nothing has run on a GPU yet." in page
    assert all(question.asked in page for question in gpu_page.QUESTIONS)


def test_what_ran_is_told_and_waits_no_more(gpu_page: SimpleNamespace, tmp_path: Path) -> None:
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

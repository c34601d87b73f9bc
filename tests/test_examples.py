"""Every script of examples/ runs on two ranks, and its loss falls."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from pool import Pool

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAINERS = ("hf_trainer.py", "trl_sft.py", "from_deepspeed/train.py")
"""Scripts of transformers' Trainer, which keeps state in singletons: they run in processes of their own."""
RAY = "ray_train.py"
"""Its test, tests/launch/test_ray.py, starts Ray."""
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in (*TRAINERS, RAY))
MOST_LINES = 80


def main_of(rank: int, ranks: int, script: str, words: list[str]) -> str:
    """Run a script's `main` in the group that is there; return what it prints."""
    told = io.StringIO()
    with redirect_stdout(told):
        runpy.run_path(str(EXAMPLES / script))["main"](*words)
    return told.getvalue()


def losses_in(told: str) -> list[float]:
    return [float(line.split("loss ")[1].split(",")[0]) for line in told.splitlines() if "loss " in line]


@pytest.mark.product(keep=4)
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_runs_and_learns(pool: Pool, script: str, tmp_path: Path) -> None:
    assert (EXAMPLES / script).read_text().count("\n") <= MOST_LINES
    words = [str(tmp_path / "checkpoints")] if script == "save_and_resume.py" else []
    losses = losses_in(pool.run(main_of, 2, script, words)[0])
    assert len(losses) >= 3
    assert losses[-1] < losses[0]
    if words:
        again = pool.run(main_of, 2, script, words)[0]
        assert again.splitlines()[0].startswith(f"step {len(losses) + 1}: ")


def run_by_torchrun(script: str, folder: Path) -> str:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", EXAMPLES / script]
    ended = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.full("tests/test_examples.py::test_an_example_runs_and_learns")
@pytest.mark.parametrize("script", TRAINERS)
def test_a_script_of_trainer_runs_and_learns(script: str, tmp_path: Path) -> None:
    assert (EXAMPLES / script).read_text().count("\n") <= MOST_LINES
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", run_by_torchrun(script, tmp_path))]
    assert len(losses) >= 8
    assert losses[-1] < losses[0] - 1
    assert [*tmp_path.iterdir()] == []


def test_the_manifest_for_kubernetes_has_the_published_schema() -> None:
    """The models leave out what they do not know, so what comes back is all there is."""
    manifest = yaml.safe_load((EXAMPLES / "kubernetes" / "trainjob.yaml").read_text())
    job = TrainerV1alpha1TrainJob.from_dict(manifest)
    assert job is not None
    assert job.to_dict() == manifest

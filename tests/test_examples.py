"""Every script of examples/ runs on two ranks, and its loss falls; an installed wheel has the command."""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import zipfile
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from pool import Pool
from small_runs import ROOT, write_text

import dzero

EXAMPLES = ROOT / "examples"
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


@pytest.mark.product(keep=2)
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


def ran(folder: Path, *words: str | Path, env: dict[str, str] | None = None) -> str:
    """What a command prints; it must succeed."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    line = [*map(str, words)]
    ended = subprocess.run(line, cwd=folder, env=kept | (env or {}), capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, f"{words}: {ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.mark.full("tests/test_examples.py::test_an_example_runs_and_learns")
@pytest.mark.parametrize("script", TRAINERS)
def test_a_script_of_trainer_runs_and_learns(script: str, tmp_path: Path) -> None:
    assert (EXAMPLES / script).read_text().count("\n") <= MOST_LINES
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    told = ran(tmp_path, *torchrun, EXAMPLES / script, env={"PYTHONPATH": str(ROOT)})
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", told)]
    assert len(losses) >= 8
    assert losses[-1] < losses[0] - 1
    assert [*tmp_path.iterdir()] == []


def test_the_manifest_for_kubernetes_has_the_published_schema() -> None:
    """The models leave out what they do not know, so what comes back is all there is."""
    manifest = yaml.safe_load((EXAMPLES / "kubernetes" / "trainjob.yaml").read_text())
    job = TrainerV1alpha1TrainJob.from_dict(manifest)
    assert job is not None
    assert job.to_dict() == manifest


# An installed wheel trains, plans and explains: it has the configuration, and the command


@pytest.mark.full("tests/plan/test_plan.py::test_a_run_that_fits_says_so_and_one_that_does_not_says_by_how_much")
def test_a_wheel_in_a_fresh_environment_trains_plans_and_explains(tmp_path: Path) -> None:
    (wheel,) = built(tmp_path / "wheels")
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
    conf = {f"dzero/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert conf | {"dzero/py.typed"} <= names
    assert not {name for name in names if name.split("/")[0] not in ("dzero", f"dzero-{dzero.__version__}.dist-info")}

    bin_folder, work = fresh(tmp_path / "venv", wheel), tmp_path / "work"
    work.mkdir()
    data = write_text(work / "words.txt", 4000)
    small = ["model.hidden_size=32", "model.layers=2", "model.heads=2", "model.ffn_size=48", "train.sequence_tokens=32"]
    small += ["train.microbatch_sequences=2", f"data.path={data}", "data.held_out=0.1"]

    told = ran(work, bin_folder / "dzero", "train", *small, "train.steps=3", "launch.workers=1", "zero.stage=3")
    assert "\nstep=3 loss=" in told
    assert "stage 3 on 1 cpu ranks" in told
    told = ran(work, bin_folder / "dzero", "plan", *small, "mesh.dp=8", "hardware=h100_80g")
    assert "fits" in told.splitlines()[-1]
    told = ran(work, bin_folder / "python", "-m", "dzero", "explain", *small, "mesh.dp=2", "experiment=none")
    assert "mesh.dp" in told
    assert ran(work, bin_folder / "dzero", "--version") == f"dzero {dzero.__version__}\n"


def built(folder: Path) -> list[Path]:
    """The wheel, made from a copy of what the build needs, so that the checkout stays as it is."""
    line = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(line, check=True, capture_output=True, text=True, timeout=600)
    return [*folder.glob("dzero-*.whl")]


def fresh(folder: Path, wheel: Path) -> Path:
    """A new environment with the wheel alone, which sees this one's other packages; its folder of commands."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=600)
    python = folder / "bin/python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True, timeout=600)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # whose .pth files are not followed
    told = ran(folder, python, "-c", "import dzero; print(dzero.__file__)")
    assert Path(told.strip()).is_relative_to(own), told
    return folder / "bin"

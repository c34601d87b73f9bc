"""`DzeroTrainer`: what plain `Trainer` logs, keeps and writes, to 1e-6, at every stage and with offload."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_runs
from typed_commands import typed

transformers = pytest.importorskip("transformers")

SETTINGS = {
    "stage 3": {"stage": 3},
    "stage 2": {"stage": 2},
    "stage 1": {"stage": 1},
    "stage 0": {"stage": 0},
    "host": {"stage": 3, "offload": "host"},
    "recomputed": {"stage": 3, "args": {"gradient_checkpointing": True}},
}
ONE = {"gradient_accumulation_steps": 1}
WITHOUT = [{"stage": stage, "args": ONE} for stage in (0, 1, 2, 3)]
ALIKE = "tests/integrations/test_hf_trainer.py::test_a_script_of_trainer_gives_the_same_numbers"
ROUNDED = [{"stage": 3, "args": {"bf16": True}}, {"stage": 3, "args": {"fp16": True}}]


def run(folder: Path, *words: str, ranks: int = 2) -> list[dict[str, Any]]:
    folder.mkdir()
    plain = words in ((), ("adapters",))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launch = [] if plain else [*torchrun, "--no-python", sys.executable]  # by `python -u` they start cold
    done = typed(*launch, trainer_runs.__file__, folder, *words, cwd=folder, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return found


def check_alike(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Logs to 1e-6, and parameters to 1e-6 after 6 steps of 1e-2: sums of ranks are in another order."""
    assert [*map(sorted, found["logs"])] == [*map(sorted, plain["logs"])]
    for row, want in zip(found["logs"], plain["logs"], strict=True):
        assert row == pytest.approx(want, rel=1e-6, abs=1e-12)
    for name, want in plain["params"].items():
        torch.testing.assert_close(torch.tensor(found["params"][name]), torch.tensor(want), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Trainer alone logs, keeps and writes, in one process."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    (found,) = run(folder)
    norms = [row["grad_norm"] for row in found["logs"] if "grad_norm" in row]
    assert len(norms) == trainer_runs.STEPS
    assert min(norms) > 0.5, "clipping bites"
    return found | {"folder": folder / "0"}


def test_a_script_of_trainer_gives_the_same_numbers(tmp_path: Path, plain: dict[str, Any]) -> None:
    found, resumed = run(tmp_path / "dzero", json.dumps([SETTINGS["stage 3"]]))
    check_alike(found, plain)
    assert Path(found["best"]).name == Path(plain["best"]).name
    assert (resumed["logs"], resumed["params"]) == (found["logs"], found["params"]), "the same bits"
    folder = tmp_path / "dzero" / "0"
    assert {each.name for each in folder.iterdir()} == {each.name for each in plain["folder"].iterdir()}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, param in loaded.named_parameters():
        assert torch.equal(param, torch.tensor(found["params"][name]))


@pytest.mark.full(ALIKE)
def test_every_stage_gives_the_same_numbers(tmp_path: Path, plain: dict[str, Any]) -> None:
    *runs, _ = run(tmp_path / "dzero", json.dumps([*SETTINGS.values(), *WITHOUT]))
    runs, without = runs[: len(SETTINGS)], runs[len(SETTINGS) :]
    for found in runs:
        check_alike(found, plain)
    # Stages 2 and 3 sum each microbatch over the ranks, stages 0 and 1 the microbatches on each rank first.
    for alike in (("stage 3", "stage 2", "host", "recomputed"), ("stage 1", "stage 0")):
        first, *others = [found for name, found in zip(SETTINGS, runs, strict=True) if name in alike]
        for other in others:
            assert (other["logs"], other["params"]) == (first["logs"], first["params"]), "the same bits"
    assert all((other["logs"], other["params"]) == (without[0]["logs"], without[0]["params"]) for other in without)


@pytest.mark.full(ALIKE)
def test_a_run_goes_on_over_other_ranks_and_stages(tmp_path: Path, plain: dict[str, Any]) -> None:
    run(tmp_path / "two", json.dumps([{"stage": 3}]))
    resume = str(tmp_path / "two" / "0" / f"checkpoint-{trainer_runs.MIDDLE}")
    for ranks, settings in ((1, {"stage": 0}), (4, {"stage": 2, "replicate": 2, "offload": "host"})):
        check_alike(run(tmp_path / f"{ranks}", json.dumps([{**settings, "resume": resume}]), ranks=ranks)[0], plain)


@pytest.mark.full(ALIKE)
def test_16_bits_are_those_of_the_layout(tmp_path: Path, plain: dict[str, Any]) -> None:
    for found in run(tmp_path / "dzero", json.dumps(ROUNDED)):
        for row, want in zip(found["logs"], plain["logs"], strict=True):
            assert row == pytest.approx(want, rel=2e-2, abs=1e-12)
        assert found["params"] != plain["params"]


REFUSED = {
    "auto_find_batch_size": "ValueError: DzeroTrainer with auto_find_batch_size: ",
    "bf16_full_eval": "ValueError: DzeroTrainer with full_eval: ",
    "fp16_full_eval": "ValueError: DzeroTrainer with full_eval: ",
    "save_on_each_node": "ValueError: DzeroTrainer with save_on_each_node: ",
    "adafactor": "ValueError: Adafactor may update an element from others",
    "adamw_torch_8bit": "ValueError: AdamW8bit may update an element from others",
    "dzero": "TypeError: dzero=3: pass a dict, such as {'stage': 3}",
    "stages": "TypeError: dzero={'stages': ...}: it takes ['stage', 'precision', 'offload', 'replicate']",
    "replicate": "ValueError: replicate=3 * shard=0 is not the world size 1",
    "both": "TypeError: dzero= and deepspeed=: both say how to shard; give one",
    "best": "ValueError: DzeroTrainer with save_only_model and load_best_model_at_end: ",
    "several ranks": "ValueError: DzeroTrainer with enable_jit_checkpoint: ",
    "several GPUs": "ValueError: DzeroTrainer with several GPUs in one process: ",
    "device map": "ValueError: DzeroTrainer with a model that is on several devices: ",
    "amsgrad": "ValueError: AdamW with amsgrad=True: ",
    "other model": "ValueError: AdamW holds a parameter that is not the model's: ",
    "taken steps": "ValueError: AdamW has taken steps, ",
    "other schedule": "ValueError: optimizers=: the schedule is of another optimizer",
    "plain checkpoint": "checkpoint-1: no states of dzero (dzero/) are there",
    "older transformers": "does not have: install transformers>=5.3",
}


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    refused = Path(__file__).with_name("refused_runs.py")
    done = typed(refused, tmp_path, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert told.keys() == REFUSED.keys()
    for name, part in REFUSED.items():
        assert part in told[name], name


@pytest.mark.full(ALIKE)
def test_adapters_of_peft_are_trained_and_written_as_by_trainer(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    (plain,) = run(tmp_path / "plain", "adapters")
    found, resumed = run(tmp_path / "dzero", json.dumps([{"stage": 3}]), "adapters")
    check_alike(found, plain)
    assert resumed["params"] == found["params"]
    folder = tmp_path / "dzero" / "0"
    assert not (folder / "generation_config.json").exists()
    loaded = peft.PeftModel.from_pretrained(trainer_runs.model(), folder)
    for name, param in loaded.named_parameters():
        if ".lora_" in name:
            assert torch.equal(param, torch.tensor(found["params"][name]))

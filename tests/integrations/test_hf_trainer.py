"""`DzeroTrainer`: what plain `Trainer` logs, keeps and writes, to 1e-6, at every stage and with offload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from launched import launched, torchrun
from trainer_runs import STEPS

BATCH = 4
MIDDLE = 2
"""A step in the middle of an epoch of three steps, after which a checkpoint is resumed from."""
ARGS: dict[str, Any] = {
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "eval_strategy": "steps",
    "eval_steps": MIDDLE,
    "save_steps": MIDDLE,
    "load_best_model_at_end": True,
    "data_seed": 3,
}
"""Clipping bites, the schedule warms up, and the best model is loaded at the end."""
ALIKE = "tests/integrations/test_hf_trainer.py::test_a_script_of_trainer_gives_the_same_numbers"


def run(folder: Path, *runs: dict[str, Any], ranks: int = 2) -> list[dict[str, Any]]:
    sizes = {f"per_device_{of}_batch_size": BATCH // ranks for of in ("train", "eval")}
    whole = [{**each, "args": {**ARGS, **sizes, **each.get("args", {})}} for each in runs]
    by = torchrun(ranks) if any("dzero" in each for each in runs) else ()
    found: list[dict[str, Any]] = launched("trainer_runs.py", folder, json.dumps(whole), by=by)
    return found


def of_stage(stage: int, **more: Any) -> dict[str, Any]:
    args = {"args": more.pop("args")} if "args" in more else {}
    return {"dzero": {"stage": stage, **more}, **args}


def checkpoint(folder: Path) -> str:
    """That of the first run."""
    return str(folder / "0" / f"checkpoint-{MIDDLE}")


def check_alike(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Logs to 1e-6, and parameters to 1e-6 after 6 steps of 1e-2: sums of ranks are in another order."""
    assert [*map(sorted, found["logs"])] == [*map(sorted, plain["logs"])]
    for row, want in zip(found["logs"], plain["logs"], strict=True):
        assert row == pytest.approx(want, rel=1e-6, abs=1e-12)
    for name, want in plain["params"].items():
        torch.testing.assert_close(torch.tensor(found["params"][name]), torch.tensor(want), rtol=0, atol=1e-6)


def check_same_bits(*found: dict[str, Any]) -> None:
    for other in found[1:]:
        assert (other["logs"], other["params"]) == (found[0]["logs"], found[0]["params"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Trainer alone logs, keeps and writes, in one process."""
    folder = tmp_path_factory.mktemp("plain")
    (found,) = run(folder, {}, ranks=1)
    norms = [row["grad_norm"] for row in found["logs"] if "grad_norm" in row]
    assert len(norms) == STEPS
    assert min(norms) > 0.5, "clipping bites"
    return found | {"folder": folder / "0"}


def test_a_script_of_trainer_gives_the_same_numbers(tmp_path: Path, plain: dict[str, Any]) -> None:
    found, resumed = run(tmp_path, of_stage(3), {**of_stage(3), "resume": checkpoint(tmp_path)})
    check_alike(found, plain)
    check_same_bits(found, resumed)
    assert Path(found["best"]).name == Path(plain["best"]).name
    folder = tmp_path / "0"
    assert {each.name for each in folder.iterdir()} == {each.name for each in plain["folder"].iterdir()}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, param in loaded.named_parameters():
        assert torch.equal(param, torch.tensor(found["params"][name]))


@pytest.mark.full(ALIKE)
def test_every_stage_gives_the_same_numbers(tmp_path: Path, plain: dict[str, Any]) -> None:
    """Stages 2 and 3 sum each microbatch over the ranks, stages 0 and 1 the microbatches on each rank first."""
    early = [of_stage(3), of_stage(2), of_stage(3, offload="host"), of_stage(3, args={"gradient_checkpointing": True})]
    late = [of_stage(1), of_stage(0)]
    single = [of_stage(stage, args={"gradient_accumulation_steps": 1}) for stage in range(4)]
    found = run(tmp_path, *early, *late, *single)
    for each in found[: len(early) + len(late)]:
        check_alike(each, plain)
    check_same_bits(*found[: len(early)])
    check_same_bits(*found[len(early) : -len(single)])
    check_same_bits(*found[-len(single) :])


@pytest.mark.full(ALIKE)
def test_a_run_goes_on_over_other_ranks_and_stages(tmp_path: Path, plain: dict[str, Any]) -> None:
    run(tmp_path / "2", of_stage(3))
    for ranks, other in ((1, of_stage(0)), (4, of_stage(2, replicate=2, offload="host"))):
        resumed = run(tmp_path / f"on {ranks}", {**other, "resume": checkpoint(tmp_path / "2")}, ranks=ranks)
        check_alike(resumed[0], plain)


@pytest.mark.full(ALIKE)
def test_16_bits_are_those_of_the_layout(tmp_path: Path, plain: dict[str, Any]) -> None:
    for found in run(tmp_path, of_stage(3, args={"bf16": True}), of_stage(3, args={"fp16": True})):
        for row, want in zip(found["logs"], plain["logs"], strict=True):
            assert row == pytest.approx(want, rel=2e-2, abs=1e-12)
        assert found["params"] != plain["params"]


ZERO = {"dzero": {"stage": 3}}
BEST = {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**ZERO, "args": {"auto_find_batch_size": True}}, "ValueError: DzeroTrainer with auto_find_batch_size: "),
    ({**ZERO, "args": {"bf16_full_eval": True}}, "ValueError: DzeroTrainer with full_eval: "),
    ({**ZERO, "args": {"fp16_full_eval": True}}, "ValueError: DzeroTrainer with full_eval: "),
    ({**ZERO, "args": {"save_on_each_node": True}}, "ValueError: DzeroTrainer with save_on_each_node: "),
    ({**ZERO, "args": {"optim": "adafactor"}}, "ValueError: Adafactor may update an element from others"),
    ({**ZERO, "args": {"optim": "adamw_torch_8bit"}}, "ValueError: AdamW8bit may update an element from others"),
    ({**ZERO, "args": BEST}, "ValueError: DzeroTrainer with save_only_model and load_best_model_at_end: "),
    ({"dzero": 3}, "TypeError: dzero=3: pass a dict, such as {'stage': 3}"),
    (
        {"dzero": {"stages": 3}},
        "TypeError: dzero={'stages': ...}: it takes ['stage', 'precision', 'offload', 'replicate']",
    ),
    ({"dzero": {"replicate": 3}}, "ValueError: replicate=3 * shard=0 is not the world size 1"),
    ({**ZERO, "deepspeed": {}}, "TypeError: dzero= and deepspeed=: both say how to shard; give one"),
]
CASES = {
    "several_ranks": "ValueError: DzeroTrainer with enable_jit_checkpoint: ",
    "several_gpus": "ValueError: DzeroTrainer with several GPUs in one process: ",
    "device_map": "ValueError: DzeroTrainer with a model that is on several devices: ",
    "amsgrad": "ValueError: AdamW with amsgrad=True: ",
    "other_model": "ValueError: AdamW holds a parameter that is not the model's: ",
    "taken_steps": "ValueError: AdamW has taken steps, ",
    "other_schedule": "ValueError: optimizers=: the schedule is of another optimizer",
    "older_transformers": "does not have: install transformers>=5.3",
}


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    plain = {"args": {"max_steps": 1, "save_steps": 1}}
    resumed = {**ZERO, "resume": str(tmp_path / "0" / "checkpoint-1")}
    runs = [plain, resumed, *(each for each, _ in REFUSED)]
    found = launched("refused_runs.py", tmp_path, json.dumps(runs))
    _, of_resumed, *of_others = found["runs"]
    assert "checkpoint-1: no states of dzero (dzero/) are there" in of_resumed
    for (_, says), told in zip(REFUSED, of_others, strict=True):
        assert says in told
    assert found["cases"].keys() == CASES.keys()
    for name, says in CASES.items():
        assert says in found["cases"][name], name

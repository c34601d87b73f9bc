"""Adapters over ranks that cut the model itself: the numbers of one process, and the same folders at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cells import whole
from pool import Pool
from safetensors.torch import load_file
from small_runs import CONF, agrees
from test_finetune import model as model
from test_finetune import words
from test_lora import LORA, RULES, STEPS, oracle
from test_token_loss import Silent

from dzero import make_mesh, parallelize
from dzero.estimate.fake_group import fake_group
from dzero.models.adapter_config import AdapterConfig
from dzero.models.adapters import add_adapters
from dzero.models.hf import HFDecoder
from dzero.models.published import published_name
from dzero.overrides import composed
from dzero.trainer.trainer import Trainer

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZES = "hidden_size=128 ffn_size=256 layers=4 heads=4 kv_heads=2 norm_eps=1e-6 vocab_size=512 max_tokens=2048"
HF, LLAMA = "hf", "llama"


def line(kind: str, model: Path, folder: Path, *settings: str) -> list[str]:
    """Settings of a run with adapters, by the class of transformers or by the project's llama."""
    if kind == HF:
        return words(model, folder, *LORA, *settings)
    shape = [f"model.{each}" for each in SIZES.split()]
    found = words(model, folder, *shape, f"model.weights={model}", f"data.tokenizer={model}", *LORA, *settings)
    return [found[0], "model=tiny", "model.tied=false", *(word for word in found[1:] if "name_or_path" not in word)]


def adapters(kind: str, trainer: Trainer) -> dict[str, torch.Tensor]:
    """The whole adapters on this rank, by the names of peft's own model."""
    state = {name: whole(value) for name, value in trainer.sharded.model.state_dict().items() if ".lora_" in name}
    return {f"base_model.model.{published_name(kind, name)}": value for name, value in state.items()}


def trained(rank: int, ranks: int, kind: str, settings: list[str], folder: Path) -> dict[str, Any]:
    """What a few steps do, each over all conversations."""
    trainer = Trainer(composed(settings, CONF), folder, torch.device("cpu"))
    assert trainer.config.train.steps == STEPS
    first = adapters(kind, trainer)
    losses = [trainer.step(step, Silent()).loss for step in range(1, STEPS + 1)]
    trainer.optim.synchronize()
    return {"first": first, "losses": losses, "last": adapters(kind, trainer)}


AXES = {
    "tp": (2, "mesh.tp=2 train.microbatch_sequences=32 zero.stage=2"),
    "tp, recomputed, 4 ranks": (
        4,
        "mesh.tp=2 train.microbatch_sequences=16 zero.stage=3 block.activation_checkpoint=full",
    ),
    "pp": (2, "mesh.pp=2 train.microbatch_sequences=8 train.accumulate=4 zero.stage=1"),
    "pp, 4 ranks": (4, "mesh.pp=2 train.microbatch_sequences=8 train.accumulate=2 zero.stage=1 offload=host"),
}
OF_LLAMA = {
    "1 rank": (1, "train.microbatch_sequences=32 zero.stage=0"),
    "tp and pp": (4, "mesh.tp=2 mesh.pp=2 train.microbatch_sequences=8 train.accumulate=4 zero.stage=1"),
    "cp": (2, "mesh.cp=2 train.microbatch_sequences=32 zero.stage=3"),
    "cp, ulysses": (2, "mesh.cp=2 mesh.cp_attention=ulysses train.microbatch_sequences=32 zero.stage=1"),
    "pp, zero bubble": (
        2,
        "mesh.pp=2 mesh.pp_schedule=zero_bubble mesh.pp_stages_per_rank=2 train.microbatch_sequences=8 "
        "train.accumulate=4 zero.stage=1",
    ),
}
CASES = [*((HF, way) for way in AXES), *((LLAMA, way) for way in {**AXES, **OF_LLAMA})]


@pytest.mark.product(keep=4)
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_steps_are_those_of_plain_peft(pool: Pool, model: Path, tmp_path: Path, kind: str, way: str) -> None:
    ranks, settings = {**AXES, **OF_LLAMA}[way]
    settings_of_run = line(kind, model, tmp_path, *RULES["SGD"], "adapter.target_modules=[q_proj,o_proj,down_proj]")
    if kind == HF and "mesh.pp" in settings:
        settings += " data.pack=false train.microbatch_sequences=16"
    found = pool.run(trained, ranks, kind, [*settings_of_run, *settings.split()], tmp_path, timeout_s=300)
    first = {name: value for of_rank in found for name, value in of_rank["first"].items()}
    want = oracle(model, first, "SGD", target_modules=["q_proj", "o_proj", "down_proj"])
    assert len(want["last"]) == 2 * 3 * 4
    for of_rank in found:
        assert of_rank["losses"] == pytest.approx(want["losses"], rel=1e-6)
        for name, value in of_rank["last"].items():
            torch.testing.assert_close(value, want["last"][name], rtol=0, atol=1e-6)


def exported(rank: int, ranks: int, kind: str, settings: list[str], folder: Path) -> bool:
    """Train to the end, where the run leaves a folder; return whether all traffic was the theory's."""
    return agrees(Trainer(composed(settings, CONF), folder, torch.device("cpu")).run())


EXPORTS = {
    "tp": "mesh.tp=2 train.microbatch_sequences=32 zero.stage=2",
    "pp": "mesh.pp=2 train.microbatch_sequences=8 train.accumulate=4 zero.stage=1 data.pack=false",
}
RECOMPUTED = "block.activation_checkpoint=full adapter.target_modules=[q_proj,o_proj,up_proj,down_proj,lm_head]"


def test_adapters_move_what_the_formula_says(pool: Pool, model: Path, tmp_path: Path) -> None:
    settings = [*line(LLAMA, model, tmp_path, *RULES["SGD"], "train.steps=2", "train.epochs=null", "mesh.tp=2")]
    for more in ("train.microbatch_sequences=32", f"train.microbatch_sequences=8 train.accumulate=4 {RECOMPUTED}"):
        assert all(pool.run(exported, 2, LLAMA, [*settings, *more.split()], tmp_path))


FOLDERS = ("adapters", "merged", "trained whole", "all parameters")


@pytest.mark.product(keep=4)
@pytest.mark.parametrize(("kind", "way"), [(HF, "tp"), (LLAMA, "pp"), (LLAMA, "tp"), (HF, "pp")])
@pytest.mark.parametrize("what", FOLDERS)
def test_a_run_leaves_the_folder_that_one_process_leaves(
    pool: Pool, model: Path, tmp_path: Path, kind: str, way: str, what: str
) -> None:
    # A small step: at 0.5 the path itself multiplies differences of rounding.
    settings = line(kind, model, tmp_path, "optim.rule=SGD", "optim.lr=0.05")
    kept = [each for each in settings if not each.startswith("export.")]
    if what == "all parameters":
        kept = [each for each in kept if not each.startswith("adapter")]
    kept += ["export.merge=true"] if what == "merged" else []
    kept += ["adapter.modules_to_save=[embed_tokens,lm_head]"] if what == "trained whole" else []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    same = [each for each in EXPORTS[way].split() if not each.startswith("mesh")]
    pool.run(exported, 1, kind, [*kept, *same], tmp_path / "one")
    assert all(pool.run(exported, 2, kind, [*kept, *EXPORTS[way].split()], tmp_path / "two"))
    one, two = (tmp_path / name / "model" for name in ("one", "two"))
    assert {each.name for each in one.iterdir()} == {each.name for each in two.iterdir()}
    alone = what in ("adapters", "trained whole")
    file = "adapter_model.safetensors" if alone else "model.safetensors"
    want, found = load_file(one / file), load_file(two / file)
    assert want.keys() == found.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    base = transformers.AutoModelForCausalLM.from_pretrained(model if alone else two)
    if alone:
        state = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, two))
        assert state.keys() == found.keys()
        assert all(torch.equal(state[name], value) for name, value in found.items())


def test_an_adapter_that_is_not_cut_along_with_its_matrix_is_refused() -> None:
    with torch.device("meta"):
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
        model = HFDecoder(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    add_adapters(model, AdapterConfig(kind="lora", target_modules=["c_attn"]))
    told = r"tp=2: model.transformer.h.0.attn.c_attn is a Conv1D, whose adapter is not cut along with it; name other"
    with fake_group(2), pytest.raises(ValueError, match=told):
        parallelize(model, make_mesh("cpu", tp=2))


def ran(rank: int, ranks: int, kind: str, settings: list[str], folder: Path) -> dict[str, torch.Tensor]:
    """Run to the last step, and return the adapters of this rank."""
    trainer = Trainer(composed(settings, CONF), folder, torch.device("cpu"))
    trainer.run()
    return adapters(kind, trainer)


RESUMED = {
    (HF, 2, "zero.stage=3 train.microbatch_sequences=16"): (
        (1, "zero.stage=0 train.microbatch_sequences=32"),
        (4, "zero.stage=2 mesh.tp=2 train.microbatch_sequences=16"),
        (2, "zero.stage=1 mesh.pp=2 train.microbatch_sequences=16 train.accumulate=2"),
    ),
    (LLAMA, 4, "zero.stage=1 mesh.tp=2 mesh.pp=2 train.microbatch_sequences=8 train.accumulate=4"): (
        (2, "zero.stage=3 mesh.cp=2 train.microbatch_sequences=32"),
        (2, "zero.stage=3 train.microbatch_sequences=16 offload=infinity"),
        (1, "zero.stage=0 train.microbatch_sequences=32 offload=host"),
    ),
}
AFTER = [(source, target) for source, targets in RESUMED.items() for target in targets]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(("source", "target"), AFTER)
def test_a_run_goes_on_over_other_ranks_stages_tiers_and_meshes(
    pool: Pool, model: Path, tmp_path: Path, source: tuple[str, int, str], target: tuple[int, str]
) -> None:
    kind, ranks, settings = source

    def run(steps: int, name: str, ranks: int, *more: str) -> list[dict[str, torch.Tensor]]:
        kept = [each for each in line(kind, model, tmp_path, *RULES["adamw"]) if not each.startswith("train.epochs")]
        kept += ["optim.eps=1e-4", "data.pack=false", "train.epochs=null", f"train.steps={steps}", "checkpoint.every=2"]
        every = [*kept, f"checkpoint.folder={tmp_path / name}", *more]
        found: list[dict[str, torch.Tensor]] = pool.run(ran, ranks, kind, every, tmp_path / f"run {name}")
        return found

    (want,) = run(4, "whole", 1, "zero.stage=0", "train.microbatch_sequences=32")
    run(2, "halves", ranks, *settings.split())
    for of_rank in run(4, "halves", target[0], *target[1].split(), "resume=auto"):
        for name, value in of_rank.items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-6)

"""Fine-tuning on conversations: the numbers of transformers' Trainer, however a step is split, and from the command."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, WorkerError
from published import FIXED, chats_of, encoded, padded, words, words_of_llama
from safetensors.torch import load_file
from small_runs import ran, resolved
from torch import nn
from typed_commands import typed

from dzero import RunError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS = 2
RULES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "sgd": (["optim.rule=SGD", "optim.lr=0.1"], {"optim": "sgd", "learning_rate": 0.1}),
    "adamw": (
        ["optim.lr=1e-2", "optim.betas=[0.9,0.99]", "optim.eps=1e-3", "optim.weight_decay=0.3"],
        {"optim": "adamw_torch", "learning_rate": 1e-2, "adam_beta2": 0.99, "adam_epsilon": 1e-3, "weight_decay": 0.3},
    ),
}
"""Rules that pass a difference in a gradient on at most tenfold: by lr, and by lr / eps. Vectors do not decay."""


@cache
def oracle(model: Path, rule: str) -> dict[str, Any]:
    """Trainer over all conversations at once, which divides their loss by the number of tokens that count."""
    losses, norms = list[float](), list[float]()

    class Watched(transformers.Trainer):
        def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*given, **named)
            losses.append(float(loss))
            return loss

    class Norms(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
            norms.append(float(torch.cat([param.grad.double().flatten() for param in model.parameters()]).norm()))

    rows = encoded(model)
    own = {"max_steps": STEPS, "per_device_train_batch_size": len(rows), "lr_scheduler_type": "constant"}
    own |= {"max_grad_norm": 0.0, "weight_decay": 0.0} | RULES[rule][1]
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(output_dir=str(model.parent / "trainer"), **own, **quiet)
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    Watched(whole, arguments, train_dataset=rows, data_collator=padded, callbacks=[Norms()]).train()
    return {"losses": losses, "norms": norms, "params": {n: p.detach().clone() for n, p in whole.named_parameters()}}


WAYS = {
    "packed, 2 ranks, accumulated": (2, "adamw", "train.microbatch_sequences=2 train.accumulate=4 zero.stage=3"),
    "4 ranks on the host": (4, "adamw", "train.microbatch_sequences=2 train.accumulate=2 zero.stage=3 offload=host"),
    "replicas": (4, "sgd", "train.microbatch_sequences=4 mesh.replicate=2 zero.stage=1"),
    "llama, pipeline": (2, "sgd", "train.microbatch_sequences=4 train.accumulate=4 mesh.pp=2"),
    "llama, tensor": (2, "adamw", "train.microbatch_sequences=16 mesh.tp=2 zero.stage=2"),
    "llama, ulysses": (2, "sgd", "train.microbatch_sequences=16 mesh.cp=2 mesh.cp_attention=ulysses"),
    "tiles of the loss": (2, "sgd", "data.pack=false train.microbatch_sequences=8 zero.stage=3 block.loss_tiles=3"),
    "1 rank, padded": (1, "adamw", "data.pack=false train.microbatch_sequences=16"),
    "llama, padded context": (2, "sgd", "data.pack=false mesh.cp=2 train.microbatch_sequences=16"),
}
"""Ranks, a rule, and settings."""


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_transformers_however_split(pool: Pool, model: Path, tmp_path: Path, way: str) -> None:
    """A split adds the same fp32 numbers in another order: a relative error of some 2^-23 in sums of 600 losses."""
    ranks, rule, split = WAYS[way]
    of = words_of_llama if way.startswith("llama") else words
    found = pool.run(
        ran, ranks, of(model, tmp_path, *FIXED, f"train.steps={STEPS}", *RULES[rule][0], *split.split()), tmp_path
    )
    want, params = oracle(model, rule), load_file(tmp_path / "model" / "model.safetensors")
    for of_rank in found:
        assert of_rank.losses == pytest.approx(want["losses"], rel=1e-6)
        assert of_rank.norms == pytest.approx(want["norms"], rel=1e-5)
        assert of_rank.agrees is (way != "llama, padded context")  # theory of cp is of whole windows
    assert params.keys() == want["params"].keys()
    for name, param in want["params"].items():
        torch.testing.assert_close(params[name], param, rtol=1e-5, atol=1e-6)


def test_a_tokenizer_larger_than_the_model_is_refused_before_anything_is_tokenized(model: Path, tmp_path: Path) -> None:
    changed, ids = shutil.copytree(model.parent, tmp_path / "changed") / "model", len(encoder_of(model))
    sizes = json.loads((changed / "config.json").read_text())
    given = words(changed, tmp_path, "launch.workers=1", "launch.check_memory=false")
    for fits in (ids, ids + 5):
        (changed / "config.json").write_text(json.dumps(sizes | {"vocab_size": fits}))
        resolved(given)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    (changed / "config.json").write_text(json.dumps(sizes | {"vocab_size": ids - 1}))
    with pytest.raises(RunError) as told:
        resolved(given)
    assert f"its vocab_size={ids - 1}: the tokenizer or the data has ids up to {ids - 1}" in str(told.value)
    assert f"or give the model more: resize_token_embeddings({ids})" in str(told.value)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "cache").exists()


def encoder_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_the_command_trains_and_leaves_a_model_that_transformers_loads_with_its_tokenizer(
    model: Path, tmp_path: Path
) -> None:
    """One conversation, taken again and again, is learnt by heart."""
    (one := tmp_path / "one.jsonl").write_text(chats_of(model).read_text().splitlines()[0])
    settings = ["train.epochs=60", "optim.lr=1e-2", "data.held_out=0", "launch.workers=1", f"data.path={one}"]
    ended = typed("train.py", *words(model, tmp_path, *settings), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"^step=\d+ loss=(\S+)", ended.stdout, re.MULTILINE)]
    assert losses[-1] < losses[0] / 3
    assert re.search(r"steps +[0-9]+, .* tokens \(.* of them counted\) in", ended.stdout)
    (folder,) = tmp_path.glob("outputs/*/*/model")
    trained = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = encoder_of(folder)
    assert tokenizer.chat_template == encoder_of(model).chat_template
    question, answer = json.loads(one.read_text())["messages"]
    asked = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = trained.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(said).startswith(answer["content"])


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def published_experts(vocab_size: int) -> Any:
    sizes = {**SIZES, "vocab_size": vocab_size, "num_key_value_heads": 1}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))


def published_with_pictures(vocab_size: int) -> Any:
    text = {**SIZES, "vocab_size": vocab_size, "num_key_value_heads": 1, "head_dim": 16}
    seen = {"text_config": text, "vision_config": {**SIZES, "image_size": 8, "patch_size": 4}, "mm_tokens_per_image": 4}
    return transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**seen))


@pytest.mark.full(
    "tests/trainer/test_finetune.py::test_the_command_trains_and_leaves_a_model_that_transformers_loads_with_its_tokenizer"
)
@pytest.mark.parametrize("make", [published_experts, published_with_pictures])
def test_other_kinds_of_causal_models_are_fine_tuned_by_the_same_command(
    model: Path, tmp_path: Path, make: Callable[[int], Any]
) -> None:
    """The folder is whole: transformers loads it as it loads what was published, and what no token reaches stays."""
    folder, before = tmp_path / "published" / "model", make(len(encoder_of(model)))
    before.save_pretrained(folder)
    encoder_of(model).save_pretrained(folder)
    shutil.copy(chats_of(model), folder.parent)
    (folder / "preprocessor_config.json").write_text("{}")
    settings = ["train.epochs=1", "zero.stage=3", "precision=fp32", "optim.lr=1e-2"]
    ended = typed("train.py", *words(folder, tmp_path, *settings), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (left,) = tmp_path.glob("outputs/*/*/model")
    assert (left / "preprocessor_config.json").exists()
    after = type(before).from_pretrained(left)
    still = {name for name, param in after.named_parameters() if torch.equal(param, before.get_parameter(name))}
    assert all(("vision" in name or "multi_modal" in name) == (name in still) for name, _ in after.named_parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("data.loss_on=user", r"data.loss_on='user': choose one of"),
        ("data.field=text", "data.field=text has no effect on chat"),
        ("export.which=first", "export.which='first': choose last or best"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(model: Path, tmp_path: Path, settings: str, message: str) -> None:
    with pytest.raises(RunError, match=message) as told:
        resolved([*words(model, tmp_path), *settings.split()])
    assert "\n" not in str(told.value)


# Packed conversations stay apart

KINDS: dict[str, dict[str, int]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "mamba": {"num_hidden_layers": 2, "state_size": 8},
    "gpt2": {"n_layer": 2, "n_head": 4},
    "mixtral": {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4},
}


def of_kind(kind: str, model: Path, folder: Path) -> list[str]:
    """One step of a small model of another kind with random weights."""
    config = transformers.AutoConfig.for_model(kind, **{"vocab_size": 512, "hidden_size": 64} | KINDS[kind])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
    own = [f"data.tokenizer={model}", f"data.path={model.parent / 'chats.jsonl'}", "train.epochs=null", "train.steps=1"]
    own += ["data.held_out=0", "export.at_end=false", "train.microbatch_sequences=2"]
    return words(folder / kind, folder, *own)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("kind", ["bloom", "opt", "mamba"])
def test_a_model_that_mixes_packed_conversations_is_refused(pool: Pool, model: Path, tmp_path: Path, kind: str) -> None:
    given = [*of_kind(kind, model, tmp_path), "zero.stage=3"]
    with pytest.raises(WorkerError, match=r"ValueError: data\.pack=true: .*; set data\.pack=false\n"):
        pool.run(ran, 2, given, tmp_path)
    assert pool.run(ran, 2, [*given, "data.pack=false"], tmp_path)[0].steps == 1


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mixtral", "mesh.cp=2"),
        ("gpt2", "zero.stage=0"),
        ("mixtral", "zero.stage=3 offload=host block.loss_tiles=3"),
    ],
)
def test_one_that_keeps_them_apart_is_taken(pool: Pool, model: Path, tmp_path: Path, kind: str, settings: str) -> None:
    assert all(each.agrees for each in pool.run(ran, 2, [*of_kind(kind, model, tmp_path), *settings.split()], tmp_path))


def test_a_pipeline_evaluates_packed_conversations_apart(pool: Pool, model: Path, tmp_path: Path) -> None:
    settings = [*FIXED, "optim.rule=SGD", "train.steps=1", "train.microbatch_sequences=2", "export.at_end=false"]
    given = [*words_of_llama(model, tmp_path, *settings), "data.held_out=0.5"]
    (alone,) = pool.run(ran, 1, given, tmp_path)
    (found, _) = pool.run(ran, 2, [*given, "mesh.pp=2", "train.accumulate=2", "train.microbatch_sequences=1"], tmp_path)
    assert len(alone.held_out) == 1
    assert found.held_out == pytest.approx(alone.held_out, rel=1e-6)
    still = [*given, "optim.lr=0", "train.microbatch_sequences=1", "train.evaluate_batches=99"]
    packed, padded = (pool.run(ran, 1, [*still, f"data.pack={pack}"], tmp_path)[0] for pack in ("true", "false"))
    assert packed.held_out == pytest.approx(padded.held_out, rel=1e-6)  # the rest of a sequence does not count

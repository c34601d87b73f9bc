"""Fine-tuning on conversations: the numbers of plain torch, packed or padded, at every stage, from the command."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cells import whole
from pool import Pool
from small_runs import CONF, ROOT
from test_token_loss import Silent

from dzero import RunError
from dzero.overrides import composed
from dzero.plan.preflight import resolve_run
from dzero.trainer.trainer import Trainer

transformers = pytest.importorskip("transformers")

EXAMPLE = ROOT / "examples" / "finetune"
CHATS = EXAMPLE / "chats.jsonl"
TOKENS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny published model of the example."""
    spec = importlib.util.spec_from_file_location("make_model", EXAMPLE / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("published") / "model"
    module.make(folder)
    return folder


def words(model: Path, folder: Path, *settings: str) -> list[str]:
    return [
        "--config-name=finetune",
        f"model.name_or_path={model}",
        f"data.path={CHATS}",
        f"data.cache={folder / 'cache'}",
        f"train.sequence_tokens={TOKENS}",
        "monitor.tensorboard=false",
        *settings,
    ]


ONE_STEP = [
    "precision=fp32",
    "optim.rule=SGD",
    "optim.lr=0.1",
    "optim.max_norm=null",
    "schedule.kind=constant",
    "schedule.warmup_fraction=0",
    "data.held_out=0",
    "data.shuffle=false",
    "train.epochs=1",
    "export.at_end=false",
]


@pytest.mark.parametrize(("less", "refused"), [(0, False), (1, True), (-5, False)])
def test_a_tokenizer_larger_than_the_model_is_refused_before_anything_is_tokenized(
    model: Path, tmp_path: Path, less: int, refused: bool
) -> None:
    changed, ids = tmp_path / "model", len(transformers.AutoTokenizer.from_pretrained(model))
    shutil.copytree(model, changed)
    sizes = json.loads((changed / "config.json").read_text()) | {"vocab_size": ids - less}
    (changed / "config.json").write_text(json.dumps(sizes))
    given = words(changed, tmp_path, "launch.workers=1", "launch.check_memory=false")
    if not refused:
        resolve_run(composed(given, CONF), given)
        return
    with pytest.raises(RunError) as told:
        resolve_run(composed(given, CONF), given)
    assert f"its vocab_size={ids - 1}: the tokenizer or the data has ids up to {ids - 1}" in str(told.value)
    assert f"or give the model more: resize_token_embeddings({ids})" in str(told.value)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "cache").exists()


def test_a_model_of_sizes_has_an_embedding_for_each_id_of_the_tokenizer() -> None:
    given = ["model.vocab_size=255", "launch.workers=1", "launch.check_memory=false"]
    with pytest.raises(RunError, match=r"model\.vocab_size=255: .* ids up to 255, .* or a model\.vocab_size ≥ 256"):
        resolve_run(composed(given, CONF), given)
    given[0] = "model.vocab_size=256"
    assert resolve_run(composed(given, CONF), given).model.vocab_size == 256


def stepped(rank: int, ranks: int, settings: list[str], folder: Path) -> dict[str, Any]:
    """What one step over all conversations does."""
    trainer = Trainer(composed(settings, CONF), folder, torch.device("cpu"))
    assert trainer.config.train.steps == 1
    shared = trainer.step(1, Silent())
    trainer.optim.synchronize()
    assert trainer.optim.last_decision is not None
    params = {name: whole(param) for name, param in trainer.sharded.named_params().items()}
    return {"loss": shared.loss, "norm": trainer.optim.last_decision.norm, "params": params}


def oracle(folder: Path) -> dict[str, Any]:
    """Plain transformers: every conversation by itself, its mask from `apply_chat_template`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    total, count = torch.zeros(()), 0
    for line in CHATS.read_text().splitlines():
        encoded = tokenizer.apply_chat_template(
            json.loads(line)["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = torch.tensor([encoded["input_ids"]]), torch.tensor(encoded["assistant_masks"]).bool()
        losses = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        total, count = total + losses[mask[1:]].sum(), count + int(mask[1:].sum())
    grads = torch.autograd.grad(total / count, [*model.parameters()])
    norm = float(torch.cat([grad.double().flatten() for grad in grads]).norm())
    with torch.no_grad():
        for param, grad in zip(model.parameters(), grads, strict=True):
            param -= 0.1 * grad
    params = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    return {"loss": float(total / count), "norm": norm, "params": params}


WAYS = {
    "packed": (1, "train.microbatch_sequences=32 zero.stage=0"),
    "packed, 2 ranks": (2, "train.microbatch_sequences=8 train.accumulate=2 zero.stage=3"),
    "padded": (1, "data.pack=false train.microbatch_sequences=64"),
    "padded, 2 ranks, ragged": (2, "data.pack=false train.microbatch_sequences=4 train.accumulate=8 zero.stage=3"),
    "tiles of the loss": (2, "data.pack=false train.microbatch_sequences=32 zero.stage=3 block.loss_tiles=3"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_plain_torch_over_the_same_conversations(
    pool: Pool, model: Path, tmp_path: Path, way: str
) -> None:
    ranks, settings = WAYS[way]
    (found, *_) = pool.run(stepped, ranks, words(model, tmp_path, *ONE_STEP, *settings.split()), tmp_path)
    want = oracle(model)
    assert found["loss"] == pytest.approx(want["loss"], rel=1e-6)
    assert found["norm"] == pytest.approx(want["norm"], rel=1e-5)
    same = [name for name in found["params"] if ".tiles." not in name]
    assert len(same) >= len(want["params"]) - 1
    for name in same:
        torch.testing.assert_close(found["params"][name], want["params"][name], rtol=1e-5, atol=1e-6)


SIZES = "model.hidden_size=64 model.heads=4 model.kv_heads=2 model.layers=2 model.ffn_size=96"
LLAMA = f"model=tiny model.weights=false {SIZES}"


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(
    "axis",
    [
        "mesh.cp=2 zero.stage=1",
        "mesh.cp=2 mesh.cp_attention=ulysses block.activation_checkpoint=full",
        "mesh.pp=2 train.microbatch_sequences=8 train.accumulate=4",
        "mesh.tp=2 zero.stage=2",
        "data.pack=false mesh.cp=2 train.microbatch_sequences=64",
    ],
)
def test_packed_sequences_that_ranks_share_have_the_numbers_of_one_process(
    pool: Pool, model: Path, tmp_path: Path, axis: str
) -> None:
    settings = [*LLAMA.split(), f"data.tokenizer={model}", *ONE_STEP, "train.microbatch_sequences=32"]
    settings = [word for word in words(model, tmp_path, *settings) if not word.startswith("model.name")]
    one = pool.run(stepped, 1, settings, tmp_path)[0]
    ranks = pool.run(stepped, 2, [*settings, *axis.split()], tmp_path)
    for found in ranks:
        assert found["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert found["norm"] == pytest.approx(one["norm"], rel=1e-5)
        for name, param in found["params"].items():
            torch.testing.assert_close(param, one["params"][name], rtol=1e-5, atol=1e-6)


def test_stages_have_the_same_bits(pool: Pool, model: Path, tmp_path: Path) -> None:
    made = [
        pool.run(stepped, 2, words(model, tmp_path, *ONE_STEP, "train.microbatch_sequences=16", stage), tmp_path)[0]
        for stage in ("zero.stage=0", "zero.stage=1", "zero.stage=2", "zero.stage=3")
    ]
    for other in made[1:]:
        assert other["loss"] == made[0]["loss"]
        assert all(torch.equal(param, made[0]["params"][name]) for name, param in other["params"].items())


def test_the_command_trains_and_leaves_a_model_that_transformers_loads_with_its_tokenizer(
    model: Path, tmp_path: Path
) -> None:
    line = [sys.executable, str(ROOT / "train.py"), *words(model, tmp_path, "optim.lr=2e-3", "train.epochs=20")]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"^step=\d+ loss=(\S+)", ended.stdout, re.MULTILINE)]
    assert losses[-1] < losses[0] / 3
    assert re.search(r"answers '<\|im_start\|>user.*' with '", ended.stdout)
    assert re.search(r"steps +[0-9]+, .* tokens \(.* of them counted\) in", ended.stdout)
    (folder,) = tmp_path.glob("outputs/*/*/model")
    trained = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == transformers.AutoTokenizer.from_pretrained(model).chat_template
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = trained.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer).startswith("The capital of")


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def published_experts(vocab_size: int) -> Any:
    sizes = {**SIZES, "vocab_size": vocab_size, "num_key_value_heads": 1}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))


def published_with_pictures(vocab_size: int) -> Any:
    text = {**SIZES, "vocab_size": vocab_size, "num_key_value_heads": 1, "head_dim": 16}
    seen = {"text_config": text, "vision_config": {**SIZES, "image_size": 8, "patch_size": 4}, "mm_tokens_per_image": 4}
    return transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**seen))


@pytest.mark.full
@pytest.mark.parametrize("make", [published_experts, published_with_pictures])
def test_other_kinds_of_causal_models_are_fine_tuned_by_the_same_command(
    model: Path, tmp_path: Path, make: Callable[[int], Any]
) -> None:
    """The folder is whole: transformers loads it as it loads what was published, and what no token reaches stays."""
    published = tmp_path / "published"
    before = make(len(transformers.AutoTokenizer.from_pretrained(model)))
    before.save_pretrained(published)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(published)
    (published / "preprocessor_config.json").write_text("{}")
    line = [sys.executable, str(ROOT / "train.py"), *words(published, tmp_path, "train.epochs=1", "zero.stage=3")]
    ended = subprocess.run(
        [*line, "precision=fp32", "optim.lr=1e-2"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    (folder,) = tmp_path.glob("outputs/*/*/model")
    assert (folder / "preprocessor_config.json").exists()
    after = type(before).from_pretrained(folder)
    still = {name for name, param in after.named_parameters() if torch.equal(param, before.get_parameter(name))}
    assert all(("vision" in name or "multi_modal" in name) == (name in still) for name, _ in after.named_parameters())


def losses_until_the_end(rank: int, ranks: int, settings: list[str], folder: Path) -> tuple[int, list[float]]:
    trainer = Trainer(composed(settings, CONF), folder, torch.device("cpu"))
    return trainer.run().steps, trainer.held_out.losses


def test_a_run_whose_held_out_loss_falls_no_more_ends_and_is_saved_and_exported(
    pool: Pool, model: Path, tmp_path: Path
) -> None:
    settings = words(model, tmp_path, "optim.lr=0.5", "train.epochs=20", "train.patience=2")
    settings += ["train.evaluate_every_steps=3", f"checkpoint.folder={tmp_path / 'saved'}", "checkpoint.every=100"]
    steps, losses = pool.run(losses_until_the_end, 2, settings, tmp_path)[0]
    assert steps == 3 * len(losses) < 60
    assert min(losses[-2:]) >= min(losses[:-2])
    assert all(min(losses[at - 2 : at]) < min(losses[: at - 2]) for at in range(3, len(losses)))
    assert (tmp_path / "model" / "config.json").is_file()
    assert [path.name for path in (tmp_path / "saved").glob("step*")] == [f"step_{steps:08d}"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.loss_on=user"], r"data.loss_on='user': choose one of"),
        (["--config-name=finetun"], r"--config-name finetun: choose one of .*did you mean finetune\?"),
        (["mesh.pp=2", "data.pack=null"], "mesh.pp=2 with data.pack=null and data.kind=chat and model.kind=hf"),
        (["train.steps=3", "train.epochs=3"], "train.steps=3 has no effect with train.epochs=3"),
        (["data.field=text"], "data.field=text has no effect on chat"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(model: Path, tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(RunError, match=message):
        composed([*words(model, tmp_path), *settings], CONF)

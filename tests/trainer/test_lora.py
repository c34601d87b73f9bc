"""LoRA: the numbers of plain peft, at every stage and tier; only adapters have states, are saved, and are exported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import dzero as command
from parity_cells import whole
from pool import Pool, WorkerError
from safetensors.torch import load_file, save_file
from small_runs import CONF, ROOT, agrees
from test_finetune import CHATS, words
from test_finetune import model as model
from test_token_loss import Silent

from dzero import RunError, save_pretrained
from dzero.checkpoint.reader import Checkpoint
from dzero.errors import user_errors
from dzero.models.adapter_config import AdapterConfig
from dzero.models.adapters import add_adapters
from dzero.models.build import build
from dzero.models.config import ModelConfig
from dzero.overrides import composed
from dzero.plan.meta_model import model_of, units_of
from dzero.trainer.export import export
from dzero.trainer.trainer import Trainer
from dzero.zero.cost_model import resting_bytes
from dzero.zero.rounding import to_working

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

STEPS = 3
COPY = ".modules_to_save."
LORA = [
    "adapter=lora",
    "adapter.r=4",
    "adapter.target_modules=[q_proj,v_proj,down_proj]",
    "adapter.rank_pattern={down_proj:2}",
    "precision=fp32",
    "optim.max_norm=null",
    "schedule.kind=constant",
    "schedule.warmup_fraction=0",
    "data.held_out=0",
    "data.shuffle=false",
    f"train.epochs={STEPS}",
    "export.at_end=false",
]
RULES = {
    "SGD": ["optim.rule=SGD", "optim.lr=0.5"],
    "adamw": ["optim.lr=1e-3", "optim.eps=1e-3"],
}
"""Rules that pass a difference in a gradient on at most once: by lr = 0.5, and by lr / eps = 1. With a small eps, a
gradient near zero would be divided by itself, so that rounding alone moves its parameter by up to lr."""


def adapters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The whole adapters, by the names of peft's own model."""
    state = {
        name: whole(value)
        for name, value in trainer.sharded.model.state_dict().items()
        if ".lora_" in name or COPY in name
    }
    return {f"base_model.model.{name.removeprefix('model.')}": value for name, value in state.items()}


def trained(rank: int, ranks: int, settings: list[str], folder: Path) -> dict[str, Any]:
    """What a few steps do, each over all conversations."""
    trainer = Trainer(composed(settings, CONF), folder, torch.device("cpu"))
    assert trainer.config.train.steps == STEPS
    first = adapters(trainer)
    losses = [trainer.step(step, Silent()).loss for step in range(1, STEPS + 1)]
    trainer.optim.synchronize()
    return {"first": first, "losses": losses, "last": adapters(trainer)}


def oracle(folder: Path, first: dict[str, torch.Tensor], rule: str, **more: Any) -> dict[str, Any]:
    """Plain peft in one process, every conversation by itself, from the same adapters."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = {"target_modules": ["q_proj", "v_proj", "down_proj"], **more}
    settings = peft.LoraConfig(r=4, rank_pattern={"down_proj": 2}, task_type="CAUSAL_LM", **given)
    model = peft.get_peft_model(base, settings)
    named = dict(model.named_parameters())
    assert {name for name, param in named.items() if param.requires_grad} == first.keys()
    with torch.no_grad():
        for name, value in first.items():
            if ".lora_magnitude_" in name or COPY in name:
                torch.testing.assert_close(value, named[name], rtol=1e-6, atol=0)
            named[name].copy_(value)
    params = [named[name] for name in first]
    optim: torch.optim.Optimizer = torch.optim.SGD(params, 0.5)
    if rule == "adamw":
        optim = torch.optim.AdamW(params, 1e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)
    tokenizer, losses = transformers.AutoTokenizer.from_pretrained(folder), []
    for _ in range(STEPS):
        total, count = torch.zeros(()), 0
        for line in CHATS.read_text().splitlines():
            encoded = tokenizer.apply_chat_template(
                json.loads(line)["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, mask = torch.tensor([encoded["input_ids"]]), torch.tensor(encoded["assistant_masks"]).bool()
            each = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
            total, count = total + each[mask[1:]].sum(), count + int(mask[1:].sum())
        optim.zero_grad()
        (total / count).backward()
        optim.step()
        losses.append(float(total / count))
    return {"losses": losses, "last": {name: named[name].detach() for name in first}}


WAYS = {
    "1 rank": (1, "zero.stage=0 train.microbatch_sequences=32"),
    "2 ranks": (2, "zero.stage=3 train.microbatch_sequences=16"),
    "2 ranks, accumulated, recomputed": (
        2,
        "zero.stage=2 train.microbatch_sequences=8 train.accumulate=2 block.activation_checkpoint=full",
    ),
    "2 ranks, host": (2, "zero.stage=2 train.microbatch_sequences=16 offload=host"),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_plain_peft(pool: Pool, model: Path, tmp_path: Path, way: str, rule: str) -> None:
    ranks, settings = WAYS[way]
    line = words(model, tmp_path, *LORA, *RULES[rule], *settings.split())
    found = pool.run(trained, ranks, line, tmp_path)[0]
    assert all((value == 0).all() == (".lora_B." in name) for name, value in found["first"].items())
    want = oracle(model, found["first"], rule)
    assert found["losses"] == pytest.approx(want["losses"], rel=1e-6)
    for name, value in want["last"].items():
        torch.testing.assert_close(found["last"][name], value, rtol=0, atol=1e-6)


def test_dora_trains_the_norms_of_rows_as_peft_does(pool: Pool, model: Path, tmp_path: Path) -> None:
    settings = [*RULES["SGD"], "adapter.use_dora=true", "train.microbatch_sequences=16", "zero.stage=3", "offload=host"]
    found = pool.run(trained, 2, words(model, tmp_path, *LORA, *settings), tmp_path)[0]
    want = oracle(model, found["first"], "SGD", use_dora=True)
    assert found["losses"] == pytest.approx(want["losses"], rel=1e-6)
    for name, value in want["last"].items():
        torch.testing.assert_close(found["last"][name], value, rtol=1e-6, atol=1e-6)
    assert sum(".lora_magnitude_" in name for name in want["last"]) == 4 * 3


STAGES = [f"zero.stage={stage}" for stage in range(4)]


def test_stages_and_tiers_have_the_same_bits(pool: Pool, model: Path, tmp_path: Path) -> None:
    def run(*settings: str) -> dict[str, Any]:
        line = words(model, tmp_path, *LORA, *RULES["adamw"], "train.microbatch_sequences=16", *settings)
        return pool.run(trained, 2, line, tmp_path)[0]

    first, *others = [
        *(run(stage) for stage in STAGES),
        *(run("zero.stage=3", f"offload={tier}") for tier in ("host", "host_all", "disk", "infinity")),
    ]
    for other in others:
        assert other["losses"] == first["losses"]
        assert all(torch.equal(value, first["last"][name]) for name, value in other["last"].items())


def test_modules_are_trained_whole_beside_adapters_as_peft_does(pool: Pool, model: Path, tmp_path: Path) -> None:
    settings = [*RULES["SGD"], "adapter.modules_to_save=[embed_tokens,lm_head]", "zero.stage=3", "precision=fp32"]
    settings += ["train.microbatch_sequences=16", "export.at_end=true"]
    for name in ("adapters", "merged"):
        (tmp_path / name).mkdir()
        line = words(model, tmp_path, *LORA, *settings, f"export.merge={str(name == 'merged').lower()}")
        found = pool.run(trained_and_exported, 2, line, tmp_path / name)[0]
    want = oracle(model, found["first"], "SGD", modules_to_save=["embed_tokens", "lm_head"])
    assert sum(COPY in name for name in want["last"]) == 2
    assert found["losses"] == pytest.approx(want["losses"], rel=1e-6)
    for name, value in want["last"].items():
        torch.testing.assert_close(found["last"][name], value, rtol=0, atol=1e-6)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "adapters" / "model")
    state = tuned.state_dict()
    assert all(torch.equal(state[name], value) for name, value in found["last"].items())
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "model", dtype="auto").state_dict()
    whole_model = tuned.merge_and_unload().state_dict()
    assert merged.keys() == whole_model.keys()
    assert all(torch.equal(value, whole_model[name]) for name, value in merged.items())


def trained_and_exported(rank: int, ranks: int, settings: list[str], folder: Path) -> dict[str, Any]:
    """What a few steps do, which leave a folder."""
    trainer = Trainer(composed(settings, CONF), folder, torch.device("cpu"))
    first = adapters(trainer)
    losses = [trainer.step(step, Silent()).loss for step in range(1, STEPS + 1)]
    trainer.optim.synchronize()
    export(trainer.config, trainer.sharded, folder)
    return {"first": first, "losses": losses, "last": adapters(trainer)}


def exported(rank: int, ranks: int, settings: list[str], folder: Path) -> dict[str, torch.Tensor]:
    """Train, export the adapters and the merged model, and return the adapters."""
    trainer = Trainer(composed(settings, CONF), folder, torch.device("cpu"))
    trainer.run()
    save_pretrained(trainer.sharded, folder / "merged", merge=True)
    return adapters(trainer)


EXPORTS = {
    "fp32": ["precision=fp32", "zero.stage=3"],
    "bf16": ["precision=bf16", "zero.stage=2"],
    "norms of rows": ["precision=fp32", "zero.stage=3", "adapter.use_dora=true"],
    "parameters on the host": ["precision=fp32", "zero.stage=3", "offload=host_all"],
}


@pytest.mark.parametrize("way", EXPORTS)
def test_a_run_leaves_a_folder_that_peft_loads_and_the_merged_model_is_that_of_peft(
    pool: Pool, model: Path, tmp_path: Path, way: str
) -> None:
    settings = [each for each in LORA if not each.startswith(("export.", "precision="))]
    line = words(model, tmp_path, *settings, *EXPORTS[way], "adapter.use_rslora=true", "optim.lr=1e-2")
    trained = pool.run(exported, 2, line, tmp_path)[0]
    dtype = torch.bfloat16 if way == "bf16" else torch.float32
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for param in base.parameters():  # ties are rounded away from zero in training
        param.data = to_working(param.data, dtype)
    frozen = [param.clone() for param in base.parameters()]
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "model")
    state = {name: value for name, value in tuned.named_parameters() if ".lora_" in name}
    assert state.keys() == trained.keys()
    assert all(torch.equal(value, trained[name].to(value.dtype)) for name, value in state.items())
    assert tuned.peft_config["default"].base_model_name_or_path == str(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == transformers.AutoTokenizer.from_pretrained(model).chat_template

    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    want = tuned.merge_and_unload().state_dict()
    assert found.state_dict().keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in found.state_dict().items())
    changed = sum(not torch.equal(p, q) for p, q in zip(found.parameters(), frozen, strict=True))
    assert changed == 4 * 3, "three matrices in each block"


def ran(rank: int, ranks: int, settings: list[str], folder: Path) -> dict[str, torch.Tensor]:
    """Run to the last step, and return the adapters."""
    trainer = Trainer(composed(settings, CONF), folder, torch.device("cpu"))
    trainer.run()
    return adapters(trainer)


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(pool: Pool, model: Path, tmp_path: Path) -> None:
    def run(steps: int, name: str, *settings: str, ranks: int = 2) -> dict[str, torch.Tensor]:
        kept = [each for each in LORA if not each.startswith(("precision=", "train.epochs", "schedule.warmup"))]
        line = words(model, tmp_path, *kept, "adapter.lora_dropout=0.2", "optim.lr=1e-2", *settings)
        line += [
            "train.epochs=null",
            f"train.steps={steps}",
            "checkpoint.every=2",
            f"checkpoint.folder={tmp_path / name}",
        ]
        return pool.run(ran, ranks, line, tmp_path / f"run {name}")[0]

    whole_run = run(4, "whole", "zero.stage=3")
    run(2, "halves", "zero.stage=3")
    resumed = run(4, "halves", "zero.stage=1", "resume=auto")
    assert all(torch.equal(value, resumed[name]) for name, value in whole_run.items())

    (latest,) = (tmp_path / "halves").glob("*4")
    stored = Checkpoint(latest)
    rows = {name.partition(".")[0] for name in stored.names}
    assert rows == {"master", "exp_avg", "exp_avg_sq"}
    assert {name.partition(".")[2] for name in stored.names} == {
        name.replace("base_model.model.", "model.") for name in whole_run
    }


def test_a_run_resumes_with_the_same_model_alone(pool: Pool, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(model, folder)
    every = ["train.epochs=null", "checkpoint.every=1", f"checkpoint.folder={tmp_path / 'saved'}"]
    line = [
        *LORA[:3],
        "optim.lr=1e-2",
        "train.microbatch_sequences=4",
        "data.held_out=0",
        "export.at_end=false",
        *every,
    ]
    pool.run(ran, 1, words(model, tmp_path, *line, "train.steps=1"), tmp_path)
    pool.run(ran, 1, words(folder, tmp_path, *line, "train.steps=2", "resume=auto"), tmp_path)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**stored, name: stored[name] + 1}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WorkerError, match=r"belong to another model than .*: its weights have other values; take"):
        pool.run(ran, 1, words(folder, tmp_path, *line, "train.steps=3", "resume=auto"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(WorkerError, match="its rms_norm_eps was"):
        pool.run(ran, 1, words(folder, tmp_path, *line, "train.steps=3", "resume=auto"), tmp_path)


def rested(rank: int, ranks: int, settings: list[str], folder: Path) -> dict[str, Any]:
    """What a rank holds between steps, what its layout foresees, and whether its traffic was the theory's."""
    config = composed(settings, CONF)
    trainer = Trainer(config, folder, torch.device("cpu"))
    summary = trainer.run()
    reduced = {entry: each for entry, each in summary.traffic.items() if entry.phase == "reduce"}
    return {
        "held": trainer.optim.state_bytes(),
        "foreseen": resting_bytes(trainer.sharded.layout, units_of(config, model_of(config))),
        "agrees": agrees(summary),
        "reduced": sum(each.sent_bytes for each in reduced.values()) // summary.steps,
    }


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_weights_take_two_bytes_and_no_traffic(pool: Pool, model: Path, tmp_path: Path, stage: int) -> None:
    settings = [each for each in LORA if not each.startswith("precision=")]
    line = words(model, tmp_path, *settings, "precision=bf16", f"zero.stage={stage}", "train.microbatch_sequences=16")
    frozen = sum(param.numel() for param in transformers.AutoModelForCausalLM.from_pretrained(model).parameters())
    width, ffn, kv, layers = 128, 256, 64, 4
    added = layers * (4 * (width + width) + 4 * (width + kv) + 2 * (ffn + width))  # query, value, down
    shards = 1 if stage == 0 else 2
    for found in pool.run(rested, 2, line, tmp_path):
        held, foreseen = found["held"], found["foreseen"]
        assert held["param"] == foreseen.param == 2 * added // shards
        assert held["frozen"] == foreseen.frozen == 2 * frozen // shards
        assert held["master"] == foreseen.master == 4 * added // shards
        assert held["moments"] == foreseen.moments == 8 * added // shards
        assert found["agrees"]
        # Half of each gradient goes to the other rank; at stage 0 sums come back too.
        assert found["reduced"] == 2 * added // 2 * (2 if stage == 0 else 1)


REFUSED = [
    ("adapter=lora adapter.target_modules=[q_prj]", "adapter.target_modules=\\['q_prj'\\]: peft finds no such modules"),
    ("adapter=lora adapter.target_modules=[norm]", "norm"),
    ("adapter=lora adapter.target_modules=[]", "must be null, all-linear or a list of names"),
    ("adapter=lora adapter.modules_to_save=[head]", "peft takes lm_head too, whose name has the same end"),
    ("adapter=lora adapter.modules_to_save=[no]", r"modules_to_save=\[no\]: no module has a name with this end"),
    ("adapter=lora adapter.r=0", "adapter.r=0: must be a whole number"),
    ("adapter=lora adapter.lora_dropout=1", "adapter.lora_dropout=1.*: must be a number in"),
    ("adapter=lora adapter.rank_pattern={q_proj:0}", "adapter.rank_pattern="),
    ("adapter=lora adapter.layers_to_transform=[-1]", "must be indices of blocks"),
    ("adapter=lor", "adapter=lor: choose one of"),
    ("adapter.r=4", "adapter.r=4 has no effect with adapter.kind=none"),
    ("adapter=lora adapter.use_dora=true mesh.tp=2", "adapter.use_dora=true with mesh.tp=2"),
    ("adapter=lora block.tiles=2", "adapter.kind=lora with block.tiles=2"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(model: Path, tmp_path: Path, settings: str, message: str) -> None:
    with pytest.raises(RunError, match=message) as told, user_errors():
        model_of(composed([*words(model, tmp_path), "data.pack=false", *settings.split()], CONF))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (
            None,
            r"target_modules=null: peft chooses no modules of this type.*this model has \['k_proj', 'lm_head', 'o_p",
        ),
        (
            "all-linear",
            r"=all-linear: .*mlp\.\w+ is a Qwen3Moe\w+; .* such as \['k_proj', 'o_proj', 'q_proj', 'v_proj'\]",
        ),
    ],
)
def test_fused_experts_get_no_adapters(tmp_path: Path, targets: str | None, told: str) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_experts": 4, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.Qwen3MoeConfig(**sizes, **heads, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=told):
        add_adapters(
            build(ModelConfig(kind="hf", name_or_path=str(tmp_path))),
            AdapterConfig(kind="lora", target_modules=targets),
        )


def test_an_adapter_on_tied_weights_is_refused() -> None:
    config = ModelConfig(kind="hf", name_or_path="gpt2")
    with pytest.raises(ValueError, match=r"weight of model\.transformer\.wte is that of model\.lm_head\.weight too"):
        add_adapters(build(config), AdapterConfig(kind="lora", target_modules=["wte"]))


def test_a_module_of_tied_weights_is_not_trained_whole() -> None:
    config = AdapterConfig(kind="lora", target_modules=["c_attn"], modules_to_save=["wte"])
    with pytest.raises(ValueError, match=r"weight of transformer\.wte is that of another module too"):
        add_adapters(build(ModelConfig(kind="hf", name_or_path="gpt2")), config)


def test_adapters_have_their_own_learning_rate_unless_one_is_given(model: Path, tmp_path: Path) -> None:
    found = [
        composed([*words(model, tmp_path), *more], CONF).optim.lr
        for more in ([], ["adapter=lora"], ["adapter=lora", "optim.lr=3e-3"])
    ]
    assert found == [1e-5, 2e-4, 3e-3]


def test_the_command_trains_adapters_that_a_checkpoint_exports_alone_or_merged(model: Path, tmp_path: Path) -> None:
    settings = ["adapter=lora", "train.epochs=4", "optim.lr=1e-2", "checkpoint.every=1000", "export.merge=true"]
    line = [sys.executable, str(ROOT / "train.py"), *words(model, tmp_path, *settings)]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "736 k parameters, 14.3 k of them trained, in 5 units" in ended.stdout
    (folder,) = tmp_path.glob("outputs/*/*/model")
    want = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()

    def exported(name: str, *options: str) -> Any:
        made = command("export", tmp_path / "checkpoints", tmp_path / name, *options)
        assert made.returncode == 0, made.stderr
        return tmp_path / name

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for param in base.parameters():  # ties are rounded away from zero in training
        param.data = to_working(param.data, torch.bfloat16)
    tuned = peft.PeftModel.from_pretrained(base, exported("adapter")).merge_and_unload().state_dict()
    moved = tmp_path / "moved"
    shutil.copytree(model, moved)
    for found in (
        tuned,
        *(
            transformers.AutoModelForCausalLM.from_pretrained(exported(name, "--merge", *options)).state_dict()
            for name, options in {"merged": [], "merged elsewhere": ["--base", str(moved)]}.items()
        ),
    ):
        assert found.keys() == want.keys()
        assert all(torch.equal(value, want[name]) for name, value in found.items())


def test_adapters_are_merged_into_the_model_alone_that_they_belong_to(pool: Pool, model: Path, tmp_path: Path) -> None:
    every = ["train.epochs=null", "train.steps=1", "checkpoint.every=1", f"checkpoint.folder={tmp_path / 'saved'}"]
    line = [*LORA[:3], "train.microbatch_sequences=4", "data.held_out=0", "export.at_end=false", *every]
    pool.run(ran, 1, words(model, tmp_path, *line), tmp_path)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    stored = load_file(other / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**stored, name: stored[name] + 1}, other / "model.safetensors", metadata={"format": "pt"})

    def refused(*options: str) -> str:
        made = command("export", tmp_path / "saved", tmp_path / "out", *options)
        assert made.returncode != 0
        return made.stderr

    told = refused("--merge", "--base", str(other))
    assert "the adapters belong to another model: its weights have other values; give the folder" in told
    assert "the model that the adapters belong to is not there" in refused("--merge", "--base", str(tmp_path / "none"))
    assert "is only read to merge adapters into it; add --merge" in refused("--base", str(other))
    assert not (tmp_path / "out").exists()

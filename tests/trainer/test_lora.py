"""LoRA and QLoRA: the numbers and folders of plain peft, however ranks share the work; only adapters have states."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from in_process import dzero as command
from pool import Pool, WorkerError
from published import FIXED, KV_HEADS, LAYERS, WIDTH, encoded, padded, words, words_of_llama
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_runs import ran, resolved
from typed_commands import typed

from dzero import RunError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

STEPS = 3
ALONE, WHOLE = "adapter_model.safetensors", "model.safetensors"
LORA = ["adapter=lora", "adapter.r=4", "adapter.rank_pattern={down_proj:2}"]
TARGETS = "adapter.target_modules=[q_proj,v_proj,down_proj]"
RULES = {"sgd": ["optim.rule=SGD", "optim.lr=0.5"], "adamw": ["optim.lr=1e-3", "optim.eps=1e-3"]}
"""Rules that pass a difference in a gradient on at most once: by lr = 0.5, and by lr / eps = 1. With a small eps, a
gradient near zero would be divided by itself, so that rounding alone moves its parameter by up to lr."""
MATRICES = ["q_proj", "v_proj", "down_proj"]


class Trained(NamedTuple):
    """Losses of each step, adapters at the end, and the largest element of any gradient."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    largest: float


def oracle(model: Path, base: Path, before: Path, rule: str, **options: Any) -> Trained:
    """Plain peft in one process from the adapters in `before`, over the conversations of `model`."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    given = {"target_modules": MATRICES, **options}
    settings = peft.LoraConfig(r=4, lora_alpha=8, rank_pattern={"down_proj": 2}, task_type="CAUSAL_LM", **given)
    tuned = peft.get_peft_model(whole, settings)
    first = load_file(before / ALONE)
    assert first.keys() == peft.get_peft_model_state_dict(tuned).keys()
    assert all((value == 0).all() == (".lora_B." in name) for name, value in first.items())
    peft.set_peft_model_state_dict(tuned, first)
    params = [param for param in tuned.parameters() if param.requires_grad]
    optim: torch.optim.Optimizer = torch.optim.SGD(params, 0.5)
    if rule == "adamw":
        optim = torch.optim.AdamW(params, 1e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)
    losses, largest, batch = [], 0.0, padded(encoded(model))
    for _ in range(STEPS):
        optim.zero_grad()
        loss = tuned(**batch).loss
        loss.backward()
        optim.step()
        losses.append(loss.item())
        largest = max(largest, *(float(param.grad.abs().max()) for param in params))
    return Trained(losses, peft.get_peft_model_state_dict(tuned), largest)


def check_against_peft(model: Path, folder: Path, rule: str, found: Any, base: Path | None = None, **more: Any) -> None:
    """Compare losses and the folders of a run, of the adapters and of the merged model, with those of peft.

    Gradients are sums over 145 tokens of products in fp32, which a split adds in another order: each element may be off
    by 2^-18 of the largest, and each of three steps passes that on at most once.
    """
    base = base or model
    want, got = oracle(model, base, folder / "before", rule, **more), load_file(folder / "model" / ALONE)
    for of_rank in found:
        assert of_rank.losses == pytest.approx(want.losses, rel=1e-6)
        assert of_rank.agrees
    assert got.keys() == want.state.keys()
    for name, value in want.state.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=STEPS * 2**-18 * want.largest)
    check_merged(peft.PeftModel.from_pretrained(of_fp32(base), folder / "model"), folder / "merged")


def of_fp32(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def check_merged(tuned: Any, folder: Path) -> None:
    """A merged folder has the bits that peft merges."""
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    want = tuned.merge_and_unload().state_dict()
    assert found.keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in found.items())


def line(kind: str, model: Path, folder: Path, *settings: str) -> list[str]:
    """The words of a run with adapters, of transformers' class or of dzero's own llama."""
    of = words_of_llama if kind == "llama" else words
    own = [*LORA, TARGETS, *FIXED, f"train.steps={STEPS}", "train.microbatch_sequences=8"]
    return of(model, folder, *own, *settings)


PARTS = "train.microbatch_sequences=4 train.accumulate=4 zero.stage=1"
WAYS = {
    "2 ranks": "hf 2 sgd zero.stage=3",
    "tensor": "hf 2 sgd mesh.tp=2 train.accumulate=2 zero.stage=2 block.activation_checkpoint=full "
    "adapter.target_modules=[q_proj,o_proj,up_proj,down_proj]",
    "norms of rows, on the host": "hf 2 adamw adapter.use_dora=true zero.stage=3 offload=host_all",
    "modules trained whole": "hf 2 sgd adapter.modules_to_save=[embed_tokens,lm_head] zero.stage=3",
    "llama, pipeline": f"llama 2 sgd mesh.pp=2 {PARTS} adapter.use_rslora=true",
    "1 rank": "hf 1 adamw zero.stage=0 train.microbatch_sequences=16",
    "pipeline, 4 ranks": f"hf 4 sgd mesh.pp=2 data.pack=false {PARTS} train.accumulate=2 offload=host",
    "tensor, modules trained whole": "hf 2 sgd mesh.tp=2 train.microbatch_sequences=16 zero.stage=2 "
    "adapter.modules_to_save=[embed_tokens,lm_head]",
    "patterns": "hf 2 sgd zero.stage=3 adapter.alpha_pattern={down_proj:5} adapter.layers_to_transform=[1] "
    "adapter.exclude_modules=[v_proj]",
    "llama, tensor and pipeline": f"llama 4 sgd mesh.tp=2 mesh.pp=2 {PARTS}",
    "llama, ulysses": "llama 2 sgd mesh.cp=2 mesh.cp_attention=ulysses train.microbatch_sequences=16 zero.stage=1",
    "llama, zero bubble": f"llama 2 sgd mesh.pp=2 mesh.pp_schedule=zero_bubble {PARTS}",
}
"""The kind of model, ranks, the rule, and settings."""
DEFAULT = ("tensor", "norms of rows, on the host")
STEP_TEST = "tests/trainer/test_lora.py::test_steps_and_folders_are_those_of_plain_peft"


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in DEFAULT else pytest.mark.full(STEP_TEST)) for way in WAYS]
)
def test_steps_and_folders_are_those_of_plain_peft(pool: Pool, model: Path, tmp_path: Path, way: str) -> None:
    kind, ranks, rule, *settings = WAYS[way].split()
    given = line(kind, model, tmp_path, *RULES[rule], *settings)
    found = pool.run(ran, int(ranks), given, tmp_path, "before", "merged")
    own = [word.removeprefix("adapter.").split("=") for word in settings if word.startswith("adapter.")]
    options = {key: yaml.safe_load(value.replace(":", ": ")) for key, value in own}
    check_against_peft(model, tmp_path, rule, found, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == transformers.AutoTokenizer.from_pretrained(model).chat_template
    named = json.loads((tmp_path / "model" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(model)


# Weights of 8 and 4 bits

GAP = {"nf4": 1.0 - 0.6961928009986877, "int8": 2 / 128}
"""The widest distance between neighbouring levels of [-1, 1]: the last of NF4, and that beside 127/128 of int8."""


def check_decoded(published: Path, decoded: Path, kind: str) -> None:
    """A matrix of a block has the values of few levels per 64 elements, at most half a gap of their scale away."""
    theirs, ours = load_file(published / WHOLE), load_file(decoded / WHOLE)
    for name, value in theirs.items():
        if "layers" in name and value.ndim == 2:
            before, after = value.view(-1, 64), ours[name].view(-1, 64)
            scale = before.abs().amax(1, keepdim=True)
            assert ((before - after).abs() <= (GAP[kind] / 2 + 2**-8) * scale).all()  # a scale is rounded to bf16
            shown = torch.where(after.abs() < 1e-20, 0.0, after)  # a step of 1e-30 was merged into it
            assert max(len(block.unique()) for block in shown) <= {"nf4": 16, "int8": 64}[kind]
            assert not torch.equal(before, after)
        else:
            assert torch.equal(value, ours[name])


ALIKE = ("zero.stage=0", "offload.frozen=host block.activation_checkpoint=full", "offload=host_all")


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("kind", "others"), [("nf4", ALIKE[:1]), ("int8", ALIKE)])
def test_quantized_weights_train_as_peft_on_their_values_and_alike_everywhere(
    pool: Pool, model: Path, tmp_path: Path, kind: str, others: tuple[str, ...]
) -> None:
    given = ["adapter=qlora", *LORA[1:], TARGETS, *FIXED[1:], f"train.steps={STEPS}", *RULES["sgd"], "zero.stage=3"]
    given += [f"precision.frozen={kind}", "precision.param=fp32", "train.microbatch_sequences=8"]
    saved = ["checkpoint.every=3", f"checkpoint.folder={tmp_path / 'saved'}"]
    blank = ["train.steps=1", "optim.lr=1e-30", "export.merge=true", "export.folder=decoded"]
    pool.run(ran, 1, [*words(model, tmp_path, *given), *blank], tmp_path)
    check_decoded(model, tmp_path / "decoded", kind)
    found = pool.run(ran, 2, [*words(model, tmp_path, *given), *saved], tmp_path, "before", "merged")
    check_against_peft(model, tmp_path, "sgd", found, base=tmp_path / "decoded")
    done = command("export", tmp_path / "saved", tmp_path / "of the checkpoint", "--merge", "--dtype=fp32")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "of the checkpoint" / WHOLE).read_bytes() == (tmp_path / "merged" / WHOLE).read_bytes()
    for more in others:
        other = tmp_path / more
        pool.run(ran, 2, [*words(model, tmp_path, *given), *more.split()], other)
        assert (other / "model" / ALONE).read_bytes() == (tmp_path / "model" / ALONE).read_bytes()


@pytest.fixture(scope="module")
def of_stage_3(pool: Pool, model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The adapters that two ranks of stage 3 leave."""
    folder = tmp_path_factory.mktemp("stage 3")
    pool.run(ran, 2, line("hf", model, folder, *RULES["adamw"], "zero.stage=3"), folder)
    return (folder / "model" / ALONE).read_bytes()


@pytest.mark.full(STEP_TEST)
@pytest.mark.parametrize(
    "tier",
    [
        "zero.stage=3 offload=infinity",
        "zero.stage=0",
        "zero.stage=1",
        "zero.stage=2",
        "zero.stage=3 offload=host",
        "zero.stage=3 offload=host_all",
        "zero.stage=3 offload=disk",
    ],
)
def test_stages_and_tiers_have_the_same_bits(
    pool: Pool, model: Path, tmp_path: Path, of_stage_3: bytes, tier: str
) -> None:
    pool.run(ran, 2, line("hf", model, tmp_path, *RULES["adamw"], *tier.split()), tmp_path)
    assert (tmp_path / "model" / ALONE).read_bytes() == of_stage_3


# Going on

OTHER = "model.layers.1.mlp.up_proj.weight"


def changed(model: Path, folder: Path, **config: Any) -> Path:
    """A copy of a model with a matrix of other values, or another configuration."""
    shutil.copytree(model.parent, folder)
    if config:
        known = json.loads((folder / "model" / "config.json").read_text())
        (folder / "model" / "config.json").write_text(json.dumps({**known, **config}))
    else:
        stored = load_file(folder / "model" / WHOLE)
        save_file({**stored, OTHER: stored[OTHER] + 1}, folder / "model" / WHOLE, metadata={"format": "pt"})
    return folder / "model"


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_a_run_resumes_to_the_bit_with_its_own_model(pool: Pool, model: Path, tmp_path: Path, kind: str) -> None:
    def run(of: Path, name: str, *settings: str) -> bytes:
        own = [f"adapter={kind}", TARGETS, "adapter.lora_dropout=0.2", *FIXED[1:], "optim.lr=1e-2", "zero.stage=3"]
        own += ["train.steps=4", "checkpoint.every=2", f"checkpoint.folder={tmp_path / name}"]
        pool.run(ran, 2, words(of, tmp_path, *own, *settings), tmp_path / f"run {name}")
        return (tmp_path / f"run {name}" / "model" / ALONE).read_bytes()

    never_stopped = run(model, "whole")
    half = f"resume.source={tmp_path / 'whole' / 'step_00000002'}"
    moved = shutil.copytree(model.parent, tmp_path / "moved") / "model"
    assert run(moved, "halves", half, "zero.stage=1" if kind == "lora" else "offload.frozen=host") == never_stopped
    with pytest.raises(WorkerError, match=r"belong to another model than .*: its weights have other values; take"):
        run(changed(model, tmp_path / "values"), "refused", half)
    if kind == "qlora":
        with pytest.raises(WorkerError, match=r"another model .*: precision.frozen was nf4, is int8; take"):
            run(model, "refused", half, "precision.frozen=int8")
        return
    with pytest.raises(WorkerError, match="its rms_norm_eps was"):
        run(changed(model, tmp_path / "config", rms_norm_eps=1e-3), "refused", half)

    saved = [safe_open(file, "pt").keys() for file in (tmp_path / "halves" / "step_00000004").glob("*.safetensors")]
    names = {name for of_file in saved for name in of_file}
    assert {name.partition(".")[0] for name in names} == {"master", "exp_avg", "exp_avg_sq", "local"}
    assert all(".lora_" in name for name in names if not name.startswith("local."))  # of random generators

    def refused(*options: str) -> str:
        made = command("export", tmp_path / "halves", tmp_path / "out", *options)
        assert made.returncode != 0
        assert not (tmp_path / "out").exists()
        return made.stderr

    other = str(tmp_path / "values" / "model")
    assert "the adapters belong to another model: its weights have other values; give" in refused(
        "--merge", "--base", other
    )
    assert "the model that the adapters belong to is not there" in refused("--merge", "--base", str(tmp_path / "none"))
    assert "is only read to merge adapters into it; add --merge" in refused("--base", other)


GOES_ON = [
    ("hf 2 zero.stage=3", "4 zero.stage=2 mesh.tp=2"),
    ("hf 2 zero.stage=3", "2 mesh.pp=2 train.accumulate=2"),
    (f"llama 4 mesh.tp=2 mesh.pp=2 {PARTS}", "2 zero.stage=3 offload=infinity"),
]


@pytest.mark.full("tests/trainer/test_lora.py::test_a_run_resumes_to_the_bit_with_its_own_model")
@pytest.mark.parametrize(("source", "target"), GOES_ON)
def test_a_run_goes_on_over_other_ranks_and_meshes(
    pool: Pool, model: Path, tmp_path: Path, source: str, target: str
) -> None:
    kind, ranks, *first = source.split()
    others, *then = target.split()

    def run(name: str, ranks: str, *more: str) -> dict[str, torch.Tensor]:
        own = [*RULES["adamw"], "data.pack=false", "train.steps=4", "checkpoint.every=2"]
        given = line(kind, model, tmp_path, *own, f"checkpoint.folder={tmp_path / name}", *more)
        pool.run(ran, int(ranks), given, tmp_path / f"run {name}")
        return load_file(tmp_path / f"run {name}" / "model" / ALONE)

    want = run("whole", ranks, *first)
    half = f"resume.source={tmp_path / 'whole' / 'step_00000002'}"
    for name, value in run("parts", others, *then, half).items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=2e-6)  # as in check_against_peft: gradients < 0.1


# The command, and what is refused


def test_the_command_trains_adapters_that_a_checkpoint_exports_alone_or_merged(model: Path, tmp_path: Path) -> None:
    settings = ["adapter=lora", "train.epochs=2", "optim.lr=1e-2", "checkpoint.every=1000", "export.merge=true"]
    ended = typed("train.py", *words(model, tmp_path, *settings, "launch.workers=1"), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    added = LAYERS * 8 * (2 * WIDTH + WIDTH + WIDTH // 4 * KV_HEADS)  # query and value, which peft chooses for llama
    assert f", {added / 1000:.2f} k of them trained, in {LAYERS + 1} units" in ended.stdout
    (folder,) = tmp_path.glob("outputs/*/*/model")
    want = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()

    def exported(name: str, *options: str) -> Any:
        made = command("export", tmp_path / "checkpoints", tmp_path / name, *options)
        assert made.returncode == 0, made.stderr
        return tmp_path / name

    base = of_fp32(model)
    for param in base.parameters():
        param.data = nearest_bf16(param.data)
    check_merged(peft.PeftModel.from_pretrained(base, exported("adapter")), folder)
    moved = shutil.copytree(model, tmp_path / "moved")
    for name, options in {"merged": [], "merged elsewhere": ["--base", str(moved)]}.items():
        found = transformers.AutoModelForCausalLM.from_pretrained(exported(name, "--merge", *options)).state_dict()
        assert all(torch.equal(value, want[key]) for key, value in found.items())


def nearest_bf16(value: torch.Tensor) -> torch.Tensor:
    """Round as dzero does where it trains in bf16: ties go away from zero."""
    return ((value.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32).to(torch.bfloat16)


REFUSED = [
    ("adapter=lora adapter.target_modules=[q_prj]", "adapter.target_modules=\\['q_prj'\\]: peft finds no such modules"),
    ("adapter=lora adapter.target_modules=[norm]", "norm"),
    ("adapter=lora adapter.target_modules=[]", "must be null, all-linear or a list of names"),
    ("adapter=lora adapter.modules_to_save=[head]", "peft takes lm_head too, whose name has the same end"),
    ("adapter=lora adapter.modules_to_save=[no]", r"modules_to_save=\[no\]: no module has a name with this end"),
    ("adapter=lora adapter.r=0", "adapter.r=0: must be a whole number"),
    ("adapter=lora adapter.rank_pattern={q_proj:0}", "adapter.rank_pattern="),
    ("adapter=lora adapter.layers_to_transform=[-1]", "must be indices of blocks"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(model: Path, tmp_path: Path, settings: str, message: str) -> None:
    with pytest.raises(RunError, match=message) as told:
        resolved([*words(model, tmp_path), "data.pack=false", "launch.workers=2", *settings.split()])
    assert "\n" not in str(told.value)


GPT2 = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 32, "n_layer": 1, "n_head": 4}
QWEN = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}
QWEN |= {"num_experts": 4, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
QKV, EVERY = "adapter.target_modules=[c_attn]", "adapter.target_modules=all-linear"
OTHERS = [
    (QWEN, "", r"=null: peft chooses no modules of this type.*this model has \['k_proj', 'lm_head', 'o_proj"),
    (QWEN, EVERY, r"mlp\.\w+ is a Qwen3Moe\w+; .* such as \['k_proj', 'o_proj', 'q_proj', 'v_proj'\]"),
    (GPT2, "adapter.target_modules=[wte]", r"weight of model\.transformer\.wte is that of model\.lm_head\.weight too"),
    (GPT2, f"{QKV} adapter.modules_to_save=[wte]", r"weight of transformer\.wte is that of another module too"),
    (GPT2, f"{QKV} mesh.tp=2", r"tp=2: model.transformer.h.0.attn.c_attn is a Conv1D, whose adapter is not cut along"),
]


@pytest.mark.parametrize(("config", "settings", "message"), OTHERS)
def test_what_a_model_cannot_have_is_refused(
    model: Path, tmp_path: Path, config: dict[str, Any], settings: str, message: str
) -> None:
    architecture = {"gpt2": "GPT2LMHeadModel", "qwen3_moe": "Qwen3MoeForCausalLM"}[config["model_type"]]
    (other := tmp_path / "model").mkdir()
    (other / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    shutil.copy(model.parent / "chats.jsonl", tmp_path)
    own = [f"data.tokenizer={model}", "data.pack=false", "launch.workers=2", "adapter=lora"]
    with pytest.raises(RunError, match=message):
        resolved(words(other, tmp_path, *own, *settings.split()))

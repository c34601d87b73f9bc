"""`python -m dzero export` and `dzero.save_pretrained`: what transformers loads is the model that was trained."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import own_models
import pytest
import torch
import written_checkpoints as by_hand
from in_process import dzero as command
from parity_cells import whole
from pool import Pool
from torch import Tensor, nn
from training_loops import unequal

import dzero
from dzero import CheckpointConfig, Checkpointer

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors_torch = pytest.importorskip("safetensors.torch")
VOCAB = 61
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},  # tied
}


def model_of(kind: str, **changes: int) -> nn.Module:
    """A model of transformers, or dzero's own llama."""
    if kind == "own":
        return own_models.llama(VOCAB, rope_theta=5e5, norm_eps=1e-6)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCAB, **KINDS[kind] | changes)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(3))


def logits_of(model: nn.Module) -> Tensor:
    found = model(tokens())
    return getattr(found, "logits", found)


def trained(rank: int, ranks: int, kind: str, precision: str, offload: str, folder: Path) -> dict[str, Tensor]:
    """Two steps, saved as a checkpoint and by `save_pretrained`; whole parameters, and the logits that they make."""
    sharded = dzero.shard(model_of(kind), stage=3, precision=precision, offload=offload)
    optim = dzero.AdamW(sharded, lr=1e-2)
    for _ in range(2):
        logits_of(sharded.model).float().logsumexp(-1).square().mean().backward()
        optim.step()
    sharded.model.eval()
    logits = logits_of(sharded.model).detach()
    sharded.reshard()
    dzero.save_pretrained(sharded, folder / "saved", shard_bytes=20_000)
    with Checkpointer(CheckpointConfig(folder=str(folder / "ck")), sharded, optim) as checkpoints:
        checkpoints.save(2, {"model": dzero.describe(sharded.model)})
    return {name: whole(value).clone() for name, value in sharded.model.state_dict().items()} | {"logits": logits}


def exported(checkpoints: Path, out: Path, dtype: str, *words: str) -> dict[str, Tensor]:
    """All tensors that the command writes."""
    ended = command("export", checkpoints, out, "--dtype", dtype, *words)
    assert ended.returncode == 0, ended.stderr
    return tensors(out)


def tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors_torch.load_file(file)
    return found


@pytest.mark.parametrize("kind", ["own", "gpt2"])
def test_transformers_makes_the_logits_of_the_model_that_was_trained(pool: Pool, tmp_path: Path, kind: str) -> None:
    """By transformers, which finds a place for every tensor and a tensor for every place."""
    want = pool.run(trained, 2, kind, "fp32", "none", tmp_path)[0]
    exported(tmp_path / "ck", tmp_path / "out", "fp32")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert not any(report.values()), report
    # The same fp32 values; sums of products and rotary tables in another order.
    torch.testing.assert_close(model.eval()(tokens()).logits, want["logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "offload"), [("llama", "none"), ("gpt2", "host_all")])
def test_transformers_loads_the_working_copies_to_the_bit(pool: Pool, kind: str, offload: str, tmp_path: Path) -> None:
    """From the files of `save_pretrained`, which an export in bf16 has too."""
    want, other = pool.run(trained, 2, kind, "bf16", offload, tmp_path)
    assert unequal(want, other) == []
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert all(torch.equal(value, want[name]) for name, value in loaded.state_dict().items())
    assert len([*(tmp_path / "saved").glob("*.safetensors")]) > 1
    assert unequal(exported(tmp_path / "ck", tmp_path / "out", "bf16"), tensors(tmp_path / "saved")) == []


PUBLISHED = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight"}
FILES: dict[int, list[list[str]]] = {
    99: [["embedding"], ["head"], ["norm"]],
    120: [["embedding"], ["head", "norm"]],
    219: [["embedding", "head"], ["norm"]],
    220: [["embedding", "head", "norm"]],
}
"""What each file holds of 100, 100 and 20 bytes, in the order of a checkpoint, by the most bytes of a file."""


@pytest.mark.parametrize("most", FILES)
def test_files_are_filled_to_the_size_that_was_asked_for(tmp_path: Path, most: int) -> None:
    drawn = {"embedding": torch.randn(5, 10), "head": torch.randn(5, 10), "norm": torch.randn(10)}
    stored = {f"master.{name}.weight": value for name, value in drawn.items()}
    out, groups = tmp_path / "out", FILES[most]
    found = exported(by_hand.write_llama(tmp_path / "ck", stored, ranks=2), out, "fp16", "--shard-bytes", str(most))
    assert all(torch.equal(found[PUBLISHED[name]], value.half()) for name, value in drawn.items())
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    there = {path.name for path in out.iterdir()} - {"config.json"}
    if len(groups) == 1:
        assert there == {"model.safetensors"}
        return
    files = {f"model-{n + 1:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups)}
    places = {PUBLISHED[name]: file for file, group in files.items() for name in group}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 220}, "weight_map": places}
    assert there == {"model.safetensors.index.json", *files}
    assert all({*safetensors_torch.load_file(out / file)} == {PUBLISHED[n] for n in files[file]} for file in files)


def test_frozen_parameters_and_buffers_are_what_they_were(tmp_path: Path) -> None:
    frozen, counts = torch.randn(5, 10).bfloat16(), torch.arange(5)
    stored = {
        "master.norm.weight": torch.randn(10),
        "param.norm.weight": torch.randn(10).bfloat16(),  # what forward used with overlap=delayed: the master is newer
        "param.head.weight": frozen,
        "buffer.layers.0.counts": counts,
        "exp_avg.norm.weight": torch.randn(10),
    }
    path = by_hand.write_llama(tmp_path / "ck", stored)
    with pytest.warns(UserWarning, match=r"no place for \('model.layers.0.counts',\), which are written too"):
        found = exported(path, tmp_path / "out", "fp32")
    assert found.keys() == {*PUBLISHED.values(), "model.layers.0.counts"}
    assert torch.equal(found["model.norm.weight"], stored["master.norm.weight"])
    assert torch.equal(found["lm_head.weight"], frozen.float())
    assert torch.equal(found["model.layers.0.counts"], counts)


REFUSED: dict[str, tuple[str, ...]] = {
    "master.norm.weight holds 7e+04, more than torch.float16 can": ("out", "--dtype", "fp16"),
    "invalid choice: 'int8'": ("out", "--dtype", "int8"),
    "argument --shard-bytes: '0' is no whole number of at least 1": ("out", "--shard-bytes", "0"),
    "nowhere: No such file or directory": ("nowhere/out",),
    "taken: it is there already: remove it, or choose another folder": ("taken",),
    "left.partial: it is there already, left by an export that was stopped or is under way": ("left",),
    "full: it is there already": ("full",),
}


def test_what_cannot_be_exported_leaves_nothing_behind(tmp_path: Path) -> None:
    path = by_hand.write_llama(tmp_path / "ck", {"master.norm.weight": torch.tensor([1.0, 7e4] * 5)})
    (tmp_path / "taken").mkdir()
    (tmp_path / "left.partial").mkdir()
    (tmp_path / "full").symlink_to(tmp_path / "absent")
    for says, (out, *words) in REFUSED.items():
        ended = command("export", path, tmp_path / out, *words)
        assert ended.returncode != 0
        assert says in ended.stderr
    by_hand.flip(path / by_hand.data_name(0), -1)
    assert "is not what was written" in command("export", path, tmp_path / "out").stderr
    assert {entry.name for entry in tmp_path.iterdir()} == {"ck", "taken", "left.partial", "full"}


def limited(on_limit: str, path: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """An export by a process whose files may not grow beyond 64 KiB: it gets an error, or is killed in mid-write."""
    program = f"import resource, runpy, signal; signal.signal(signal.SIGXFSZ, signal.{on_limit}); "
    program += "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
    program += "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); "
    program += "runpy.run_module('dzero', run_name='__main__')"
    line = [sys.executable, "-c", program, "export", str(path), str(out)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_a_write_that_fails_or_is_killed_leaves_no_folder_of_the_name_of_a_whole_one(tmp_path: Path) -> None:
    path = by_hand.write_llama(tmp_path / "ck", {}, vocab=10_000)
    ended = limited("SIG_IGN", path, tmp_path / "out")
    assert ended.returncode == 1
    assert os.strerror(errno.EFBIG) in ended.stderr
    assert "nothing was exported" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert {entry.name for entry in tmp_path.iterdir()} == {"ck"}
    assert limited("SIG_DFL", path, tmp_path / "out").returncode == -signal.SIGXFSZ
    assert {entry.name for entry in tmp_path.iterdir()} == {"ck", "out.partial"}
    assert "out.partial: it is there already, left by an export" in command("export", path, tmp_path / "out").stderr


def layout(source: str, target: str, *operations: Any) -> dict[str, Any]:
    """A description of a bare model that publishes one tensor in another layout, with one step or none."""
    steps = [{"operation": operations[0], "dim": (*operations, 0)[1]}] if operations else []
    conversion = {"sources": [source], "targets": [target], "steps": steps}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 0}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes}
    return {"model": {"kind": "bare", "config": json.dumps(config), "layout": [conversion]}}


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({}, "does not say which model it is of"),
    ({"model": None}, "save extra={'model': dzero.describe(model)}"),
    ({"model": {"kind": "evil", "config": "{}"}}, "no kind of"),
    ({"model": {"kind": "llama", "config": "[" * 100_000}}, "no kind of"),
    ({"model": {"kind": "hf", "config": "{}"}}, "weight is no parameter of a model of transformers"),
    ({"model": {"kind": "llama", "config": "{}"}}, "weight is no parameter of a llama"),
    (layout("weight", "a", "Interleave"), "'Interleave' is no step of a conversion; known are merge, split"),
    (layout("weight", "a", "chunk", 1), "master.weight: chunk along dim 1 of a tensor with 1 dims"),
    (layout("weight", "a.#"), "a.#: a name with 1 numbers from one with 0"),
    (layout("weight", "a", "split"), "3 tensors all named a"),
    ({"model": {"kind": "bare", "config": "{}", "layout": [{"sources": 3}]}}, "no kind of"),
]


def test_a_checkpoint_that_tells_no_model_or_another_is_refused(tmp_path: Path) -> None:
    tensor = by_hand.in_rows({"master.weight": torch.ones(3)}, 1)
    for number, (extra, what) in enumerate(UNKNOWN):
        path = by_hand.write(tmp_path / str(number), tensor, extra=extra)
        assert what in command("export", path, tmp_path / "out").stderr


def test_the_command_takes_the_latest_and_tells_what_it_wrote_also_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = by_hand.write_llama(tmp_path / "shelf" / "step_00000007", {}, vocab=100).parent
    by_hand.point(shelf, "step_00000007")
    monkeypatch.setitem(sys.modules, "transformers", None)  # type: ignore[arg-type]  # as where it is not installed
    ended = command("export", shelf, tmp_path / "out", "--dtype", "fp16")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"{tmp_path / 'out'}: 3 tensors, 3.93 KiB of fp16 in 1 files\n"
    assert tensors(tmp_path / "out").keys() == {*PUBLISHED.values()}


# By save_pretrained


def temperature(rank: int, ranks: int, folder: Path) -> None:
    """Save a model of transformers that has a parameter without dimensions."""
    part = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**part, "vocab_size": 8, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.CLIPConfig(text_config=text, vision_config={**part, "image_size": 8, "patch_size": 4})
    sharded = dzero.shard(transformers.CLIPModel(config), stage=3, precision="fp32")
    assert dict(dzero.weights(sharded))["logit_scale"].shape == ()
    dzero.save_pretrained(sharded, folder / "out")
    with pytest.raises(RuntimeError, match=r"has only this rank's shards: call dzero.save_pretrained"):
        sharded.model.save_pretrained(folder / "own")


def test_a_parameter_without_dimensions_is_written_without(pool: Pool, tmp_path: Path) -> None:
    pool.run(temperature, 2, tmp_path)
    assert transformers.CLIPModel.from_pretrained(tmp_path / "out").logit_scale.item() == pytest.approx(2.6592)


def given_whole(rank: int, ranks: int, folder: Path) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Save whole values by the models' own save_pretrained, as scripts for FSDP do; return logits and values."""
    found = {}
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    models = {"model": model_of("gpt2"), "adapter": peft.get_peft_model(model_of("llama"), settings)}
    for name, model in models.items():
        sharded = dzero.shard(model.eval(), stage=3, precision="fp32")
        shards = sharded.model.state_dict()
        values = {key: whole(value).clone() for key, value in shards.items()}
        sharded.model.save_pretrained(folder / name, is_main_process=rank == 0, state_dict={**values})
        with pytest.raises(ValueError, match=r"is a shard; give value.full_tensor\(\) in its place"):
            sharded.model.save_pretrained(folder / "other", state_dict=shards)
        key = max(values, key=lambda each: values[each].dim())
        with pytest.raises(ValueError, match=f"{key} has shape .* give whole values"):
            sharded.model.save_pretrained(folder / "other", state_dict=values | {key: values[key][:1]})
        with torch.no_grad():
            found[name] = sharded.model(tokens()).logits, values
    return found


def test_whole_values_are_saved_by_the_models_own_method(pool: Pool, tmp_path: Path) -> None:
    want = pool.run(given_whole, 2, tmp_path)[0]
    assert {each.name for each in tmp_path.iterdir()} == {"model", "adapter"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tuned = peft.PeftModel.from_pretrained(model_of("llama"), tmp_path / "adapter")
    for loaded, (logits, values) in zip((model, tuned), want.values(), strict=True):
        assert unequal(loaded.state_dict(), values) == []
        torch.testing.assert_close(loaded(tokens()).logits, logits)


def generating(rank: int, ranks: int, folder: Path) -> None:
    """Save a model with settings of generation, and resize its embedding."""
    model: Any = model_of("llama")
    model.generation_config.update(max_new_tokens=7, do_sample=True, temperature=0.5)
    sharded = dzero.shard(model, stage=3)
    dzero.save_pretrained(sharded, folder / "out")
    resized: Any = sharded.model
    assert resized.resize_token_embeddings(VOCAB) is resized.get_input_embeddings()
    with pytest.raises(RuntimeError, match=rf"^resize_token_embeddings\(64\) of a sharded model with {VOCAB} rows"):
        resized.resize_token_embeddings(VOCAB, pad_to_multiple_of=32)
    extra = {"model": dzero.describe(sharded.model)}
    checkpoints = CheckpointConfig(folder=str(folder / "checkpoints"))
    with Checkpointer(checkpoints, sharded, dzero.AdamW(sharded)) as saving:
        saving.save(1, extra)
        saving.finish()


def test_settings_of_generation_are_exported_and_no_embedding_is_resized(pool: Pool, tmp_path: Path) -> None:
    pool.run(generating, 2, tmp_path)
    command("export", tmp_path / "checkpoints", tmp_path / "exported")
    for name in ("out", "exported"):
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).generation_config
        assert (found.max_new_tokens, found.do_sample, found.temperature) == (7, True, 0.5)


def refused(rank: int, ranks: int, folder: Path) -> list[str]:
    """Return what each rank is told: of a folder that is there, and of a model without a published layout."""
    sharded = dzero.shard(model_of("llama"), stage=3)
    with pytest.raises(dzero.CheckpointError) as there:
        dzero.save_pretrained(sharded, folder)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no adapters of peft"):
        dzero.save_pretrained(sharded, folder / "new", merge=True)
    with pytest.raises(ValueError, match="only models of transformers") as unknown:
        dzero.save_pretrained(dzero.shard(nn.Linear(4, 4)), folder / "new")
    return [str(there.value), str(unknown.value)]


def test_what_cannot_be_saved_is_refused_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    for there, unknown in pool.run(refused, 2, tmp_path):
        assert "it is there already: remove it, or choose another folder" in there
        assert "Linear" in unknown
    assert list(tmp_path.iterdir()) == []

"""`dzero.save_pretrained`: transformers loads what was trained, to the bit; and a loop's own checkpoint is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import dzero as command
from parity_cells import whole
from pool import Pool
from torch import Tensor, nn

import dzero

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
VOCAB = 61
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},  # tied
}


def model_of(kind: str, **changes: int) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCAB, **KINDS[kind] | changes)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))


def saved(rank: int, ranks: int, kind: str, offload: str, folder: Path) -> dict[str, Tensor]:
    """Train, and return the whole parameters that are saved, in files of few bytes."""
    sharded = dzero.shard(model_of(kind), stage=3, offload=offload, precision="bf16")
    optim = dzero.AdamW(sharded, lr=1e-2)
    for _ in range(2):
        sharded.model(tokens(), labels=tokens()).loss.backward()
        optim.step()
    dzero.save_pretrained(sharded, folder, shard_bytes=20_000)
    return {name: whole(value).clone() for name, value in sharded.model.state_dict().items()}


@pytest.mark.parametrize(("kind", "offload"), [("llama", "none"), ("gpt2", "host_all")])
def test_transformers_loads_what_was_trained(pool: Pool, kind: str, offload: str, tmp_path: Path) -> None:
    want, other = pool.run(saved, 2, kind, offload, tmp_path / "out")
    assert all(torch.equal(want[name], other[name]) for name in want)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, want[name]), name


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


def given_whole(rank: int, ranks: int, folder: Path) -> dict[str, Tensor]:
    """Save whole values by the models' own save_pretrained, as scripts for FSDP do; return the logits."""
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
            found[name] = sharded.model(tokens()).logits
    return found


def test_whole_values_are_saved_by_the_models_own_method(pool: Pool, tmp_path: Path) -> None:
    want = pool.run(given_whole, 2, tmp_path)[0]
    assert {each.name for each in tmp_path.iterdir()} == {"model", "adapter"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(model(tokens()).logits, want["model"])
    tuned = peft.PeftModel.from_pretrained(model_of("llama"), tmp_path / "adapter")
    assert torch.equal(tuned(tokens()).logits, want["adapter"])


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
    checkpoints = dzero.CheckpointConfig(folder=str(folder / "checkpoints"))
    with dzero.Checkpointer(checkpoints, sharded, dzero.AdamW(sharded)) as saving:
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

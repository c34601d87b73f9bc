"""Weights as Hugging Face publishes them become masters and parameters; each rank reads its own bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cells import whole
from pool import Pool, WorkerError
from small_runs import settled, train, write_text
from torch import Tensor
from training_loops import masters_of

from dzero import AdamW, DiskConfig, OffloadConfig, PrecisionConfig, ZeroConfig, describe, make_mesh, shard
from dzero.checkpoint.import_hf import blank, fill
from dzero.models.build import build, count, materialiser, weights_of
from dzero.models.config import ModelConfig
from dzero.models.meta_init import MetaInitializer
from dzero.models.published import published_name
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig
from dzero.zero.dtensors import local_of
from dzero.zero.rounding import to_working

safetensors_torch = pytest.importorskip("safetensors.torch")

LLAMA = ModelConfig(hidden_size=36, layers=3, heads=6, kv_heads=3, ffn_size=50)
VOCAB = 61
KINDS: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "stage 1, fp32": {"stage": 1, "param": "fp32"},
    "stage 0": {"stage": 0},
    "remainder, hybrid": {"stage": 3, "master": "remainder", "replicate": 2},
    "states over all ranks": {"stage": 2, "replicate": 2, "optimizer_shard_axes": ("replicate", "shard")},
    "tiles": {"stage": 3, "tiles": 3},
    "host": {"stage": 3, "offload": {"param": "host", "grad": "host", "master": "host", "moments": "host"}},
    "disk": {"stage": 3, "offload": {"param": "disk", "grad": "disk", "master": "disk", "moments": "disk"}},
}


def published(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """A model with random values in `folder`, written by safetensors' own library; the values by its own names."""
    model = build(config, VOCAB)
    materialiser(config, model, seed=7, device="cpu")(model)
    described = describe(model)
    assert described is not None
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(described["config"])
    params = dict(model.named_parameters())
    state = {published_name(config.kind, name): value for name, value in params.items()}
    safetensors_torch.save_file(state, folder / "model.safetensors")
    return {name: value.detach() for name, value in params.items()}


def started(rank: int, ranks: int, config: ModelConfig, kind: dict[str, Any], scratch: Path) -> tuple[Any, ...]:
    """Bytes that were read, bytes that this rank keeps; masters, parameters, moments, and how many were trained."""
    model = build(config, VOCAB)
    weights = weights_of(config, model)
    materialise = MetaInitializer(model, seed=0, device="cpu", weights=blank(model, weights))
    apply_blocks(model, BlockConfig(tiles=kind.get("tiles", 1)), "cpu")
    tiers = dict(kind.get("offload", {}))
    if "disk" in tiers.values():
        tiers["disk"] = DiskConfig(paths=[str(scratch)], block_bytes=8192)
    sharded = shard(
        model,
        ZeroConfig(stage=kind["stage"], optimizer_shard_axes=[*kind.get("optimizer_shard_axes", ("shard",))]),
        precision=PrecisionConfig(param=kind.get("param", "bf16"), master=kind.get("master", "fp32")),
        offload=OffloadConfig(**tiers),
        mesh=make_mesh("cpu", replicate=ranks if kind["stage"] == 0 else kind.get("replicate", 1)),
        init=materialise,
    )
    before = read_bytes()
    fill(sharded, weights)
    read = read_bytes() - before
    kept = sum(local_of(param).numel() for param in sharded.named_params().values())
    optim = AdamW(sharded, lr=1e-3)
    masters = masters_of(sharded, optim)
    moments = [whole(optim.state[p][key]) for p in optim.state for key in ("exp_avg", "exp_avg_sq")]
    params = {name: whole(param).clone() for name, param in sharded.named_params().items()}
    tokens = torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(rank))
    model(tokens).float().logsumexp(-1).mean().backward()
    optim.step()
    optim.synchronize()
    return read, 4 * kept, masters, params, all(not moment.any() for moment in moments)


def read_bytes() -> int:
    """By this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.product(keep=3)
@pytest.mark.parametrize("kind", KINDS)
def test_masters_are_the_values_and_a_rank_reads_what_it_keeps(pool: Pool, tmp_path: Path, kind: str) -> None:
    want = published(tmp_path / "model", LLAMA)
    config, ranks = replace(LLAMA, weights=str(tmp_path / "model")), 4 if "replicate" in KINDS[kind] else 3
    for read, kept, masters, params, fresh in pool.run(started, ranks, config, KINDS[kind], tmp_path):
        scratch = kept // 2 if kind == "disk" else 0  # bf16 parameters on disk are read before they are written
        assert 0 <= read - kept - scratch < 2048  # the reading of the counter itself, wake-ups of threads
        assert fresh
        if "tiles" in KINDS[kind]:
            masters, params = joined(masters), joined(params)
        assert masters.keys() == params.keys() == want.keys()
        for name, value in want.items():
            assert torch.equal(masters[name], value), name
            assert torch.equal(params[name], to_working(value, params[name].dtype)), name


def joined(tiled: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tiles beside each other along the hidden features: rows of gate and up, columns of down."""
    found: dict[str, Any] = {}
    for name, value in tiled.items():
        module, _, rest = name.partition(".tiles.")
        found.setdefault(f"{module}.{rest.partition('.')[2]}" if rest else name, []).append(value)
    return {name: torch.cat(parts, 1 if "down" in name else 0) for name, parts in found.items()}


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_models_of_transformers_start_the_same_way(pool: Pool, tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCAB, num_key_value_heads=2, **sizes)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    ours = ModelConfig(kind="hf", name_or_path=str(tmp_path / "model"), weights=True)
    for read, kept, masters, _, _ in pool.run(started, 2, ours, KINDS["stage 3"], tmp_path):
        assert 0 <= read - kept < 2048
        for name, value in theirs.named_parameters():
            assert torch.equal(masters[f"model.{name}"], value), name


def filled_late(rank: int, ranks: int, config: ModelConfig) -> None:
    model = build(config, VOCAB)
    weights = weights_of(config, model)
    fill_all = MetaInitializer(model, seed=0, device="cpu", weights=blank(model, weights))
    sharded = shard(model, ZeroConfig(stage=3), init=fill_all)
    optim = AdamW(sharded)
    fill(sharded, weights)
    optim.synchronize()


def test_a_model_with_an_optimizer_is_not_filled(pool: Pool, tmp_path: Path) -> None:
    published(tmp_path / "model", LLAMA)
    with pytest.raises(WorkerError, match="fill it before making one"):
        pool.run(filled_late, 2, replace(LLAMA, weights=str(tmp_path / "model")))


def test_a_run_starts_from_a_folder_with_the_same_losses_at_every_stage(pool: Pool, tmp_path: Path) -> None:
    text = write_text(tmp_path / "words.txt")
    sizes = ModelConfig(
        hidden_size=32, layers=2, heads=2, kv_heads=1, ffn_size=48, vocab_size=256, norm_eps=1e-6, tied=True
    )
    values = published(tmp_path / "model", sizes)
    assert count(build(sizes)) == sum(value.numel() for value in values.values())
    settings = [f"model.weights={tmp_path / 'model'}", "model.norm_eps=1e-6", "launch.workers=2"]

    def losses(*more: str) -> list[float]:
        told = pool.run(train, 2, settled(text, *more, "train.steps=2"), tmp_path, timeout_s=300.0)
        return told[0].losses  # type: ignore[no-any-return]

    first = losses(*settings, "zero.stage=3")
    assert losses(*settings, "zero.stage=0") == first
    assert losses(*settings, "zero.stage=2", "train.seed=0", "offload=host") == first
    assert losses("model.norm_eps=1e-6", "launch.workers=2", "zero.stage=3") != first
    hf = ["model=hf", f"model.name_or_path={tmp_path / 'model'}", "model.weights=true", "launch.workers=2"]
    sizeless = [f"model.{key}=null" for key in ("hidden_size", "layers", "heads", "kv_heads", "ffn_size")]
    theirs = losses(*hf, *sizeless, "zero.stage=3", "precision=fp32")
    ours = losses(*settings, "zero.stage=3", "precision=fp32")
    assert theirs == pytest.approx(ours, rel=1e-5)  # the same model in fp32, sums in another order
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(WorkerError, match=r"of another model than this; set model.vocab_size=None"):
        pool.run(train, 2, settled(text, *settings), tmp_path, timeout_s=300.0)

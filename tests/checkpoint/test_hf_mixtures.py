"""Published mixtures of experts are read by each rank as it needs, and written as transformers writes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import dzero as command
from pool import Pool
from small_mixtures import MIXTURES, VOCAB, mixture, tokens
from torch import Tensor

import dzero
from dzero.checkpoint.import_hf import blank, fill
from dzero.models.build import build, weights_of
from dzero.models.config import ModelConfig
from dzero.models.meta_init import MetaInitializer
from dzero.zero.dtensors import local_of

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the pool's workers have, since sums of several threads have other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def read_bytes() -> int:
    """By this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def through(rank: int, ranks: int, stage: int, source: Path, out: Path) -> tuple[int, int, Tensor]:
    """Read a folder, write it by `save_pretrained` and as a checkpoint; return bytes read and kept, and logits."""
    config = ModelConfig(kind="hf", name_or_path=str(source), weights=True)
    model = build(config, VOCAB)
    weights = weights_of(config, model)
    zeros = MetaInitializer(model, seed=0, device="cpu", weights=blank(model, weights))
    sharded = dzero.shard(model, stage=stage, init=zeros, precision="fp32")
    before = read_bytes()
    fill(sharded, weights)
    read = read_bytes() - before
    kept = sum(4 * local_of(param).numel() for param in sharded.named_params().values())
    optim = dzero.AdamW(sharded)
    with torch.no_grad():
        logits = sharded.model.eval()(tokens())
    sharded.reshard()
    dzero.save_pretrained(sharded, out / "saved", shard_bytes=20_000)
    with dzero.Checkpointer(dzero.CheckpointConfig(folder=str(out / "checkpoints")), sharded, optim) as checkpoints:
        checkpoints.save(1, {"model": dzero.describe(sharded.model)})
        checkpoints.finish()
    return read, kept, logits


MIXTRAL = ModelConfig(
    kind="moe",
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    ffn_size=48,
    experts=4,
    top_k=2,
    balance="none",
    rope_theta=1e6,
)


def through_own(rank: int, ranks: int, ep: int, stage: int, source: Path, out: Path) -> tuple[int, int, Tensor]:
    """The same as `through`, with the mixture of this project, and experts that `ep` ranks share."""
    config = replace(MIXTRAL, weights=str(source))
    model = build(config, VOCAB)
    weights = weights_of(config, model)
    zeros = MetaInitializer(model, seed=0, device="cpu", weights=blank(model, weights))
    mesh = dzero.make_mesh("cpu", replicate=ranks if stage == 0 else 1)
    cut = dzero.parallelize(model, mesh, dzero.ParallelConfig(ep=ep))
    sharded = dzero.shard(cut, stage=stage, init=zeros, precision="fp32")
    before = read_bytes()
    fill(sharded, weights)
    read = read_bytes() - before
    kept = sum(4 * local_of(param).numel() for param in sharded.named_params().values())
    optim = dzero.AdamW(sharded)
    with torch.no_grad():
        logits = sharded.model.eval()(tokens())
    sharded.reshard()
    dzero.save_pretrained(sharded, out / "saved", shard_bytes=20_000)
    with dzero.Checkpointer(dzero.CheckpointConfig(folder=str(out / "checkpoints")), sharded, optim) as checkpoints:
        checkpoints.save(1, {"model": dzero.describe(sharded.model)})
        checkpoints.finish()
    return read, kept, logits


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors in a folder, read by safetensors' own library."""
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors_torch.load_file(file)
    return found


def same(found: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return found.keys() == want.keys() and all(
        found[name].dtype == want[name].dtype and torch.equal(found[name], want[name]) for name in want
    )


@pytest.mark.product(keep=5)
@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (1, 2), (3, 1), (3, 2)])
def test_a_mixture_goes_through_training_unchanged(
    pool: Pool, tmp_path: Path, kind: str, stage: int, ranks: int
) -> None:
    theirs = mixture(kind)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    want = theirs(tokens()).logits
    for read, kept, logits in pool.run(through, ranks, stage, tmp_path / "theirs", tmp_path):
        assert 0 <= read - kept < 2048  # a rank reads what it keeps; the reading of the counter itself
        assert torch.equal(logits, want)
    ran = command(
        "export", tmp_path / "checkpoints", tmp_path / "exported", "--dtype", "fp32", "--shard-bytes", "20000"
    )
    assert ran.returncode == 0, ran.stderr
    for name in ("saved", "exported"):
        assert same(tensors(tmp_path / name), tensors(tmp_path / "theirs"))
        again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(report.values()), report
        assert torch.equal(again.eval()(tokens()).logits, want)


@pytest.mark.product(keep=3)
@pytest.mark.parametrize(("ep", "stage", "ranks"), [(1, 1, 1), (1, 3, 2), (2, 3, 2), (2, 1, 4), (2, 3, 4), (2, 0, 2)])
def test_mixtral_goes_through_the_mixture_of_this_project(
    pool: Pool, tmp_path: Path, ep: int, stage: int, ranks: int
) -> None:
    theirs = mixture("mixtral", num_local_experts=4)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    want = theirs(tokens()).logits
    for read, kept, logits in pool.run(through_own, ranks, ep, stage, tmp_path / "theirs", tmp_path):
        assert 0 <= read - kept < 2048
        # The same fp32 values; the outputs of the chosen experts are summed in another order.
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-6)
    ran = command("export", tmp_path / "checkpoints", tmp_path / "exported", "--dtype", "fp32")
    assert ran.returncode == 0, ran.stderr
    for name in ("saved", "exported"):
        assert same(tensors(tmp_path / name), tensors(tmp_path / "theirs"))
        again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(report.values()), report
        assert torch.equal(again.eval()(tokens()).logits, want)


def described(model: Any) -> Any:
    found = dzero.describe(model)
    assert found is not None
    return found


def test_a_model_tells_how_it_is_published_by_layer() -> None:
    layers = "model.layers.#"
    expert = f"{layers}.block_sparse_moe.experts.*"
    assert described(mixture("mixtral"))["layout"] == [
        {"sources": [f"{layers}.mlp.gate.weight"], "targets": [f"{layers}.block_sparse_moe.gate.weight"]},
        {
            "sources": [f"{layers}.mlp.experts.gate_up_proj"],
            "targets": [f"{expert}.w1.weight", f"{expert}.w3.weight"],
            "steps": [{"operation": "chunk", "dim": 1}, {"operation": "split", "dim": 0}],
        },
        {
            "sources": [f"{layers}.mlp.experts.down_proj"],
            "targets": [f"{expert}.w2.weight"],
            "steps": [{"operation": "split", "dim": 0}],
        },
    ]
    llama = transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=9)
    assert "layout" not in described(transformers.LlamaForCausalLM(llama))


def test_a_model_of_ones_own_has_no_layout_there() -> None:
    class Own(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.linear = torch.nn.Linear(2, 2)

    assert dzero.describe(Own(transformers.LlamaConfig())) is None

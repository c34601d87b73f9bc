"""`python -m dzero export`: what transformers loads is the model that was trained."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import by_hand
import pytest
import torch
from in_process import dzero
from parity_cells import whole
from pool import Pool
from torch import Tensor

from dzero import AdamW, CheckpointConfig, Checkpointer, CheckpointError, PrecisionConfig, ZeroConfig, describe, shard
from dzero.checkpoint import export_hf as exports
from dzero.checkpoint.export_hf import export, plan
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.store import checkpoint_at
from dzero.models.build import build, materialiser
from dzero.models.config import ModelConfig
from dzero.models.published import llama_config, published_name
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig

VOCAB = 61
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LLAMA = ModelConfig(hidden_size=32, layers=2, heads=4, kv_heads=2, ffn_size=48, rope_theta=5e5, norm_eps=1e-6)
TIED = ModelConfig(hidden_size=32, layers=2, heads=4, ffn_size=48, max_tokens=64, tied=True)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
HF: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},  # tied
    "qwen2": {**SIZES, "num_key_value_heads": 2},  # with biases
    "llama": {**SIZES, "num_key_value_heads": 2},
}


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(3))


def trained(
    rank: int, ranks: int, config: ModelConfig, param: str, tiles: int, folder: Path
) -> tuple[dict[str, Tensor], Tensor]:
    """Two steps, saved in `folder`; the working copies by name, and the logits that they make."""
    model = build(config, VOCAB)
    materialise = materialiser(config, model, seed=0, device="cpu")
    apply_blocks(model, BlockConfig(tiles=tiles), "cpu")
    sharded = shard(model, ZeroConfig(stage=3), precision=PrecisionConfig(param=param), init=materialise)
    optim = AdamW(sharded, lr=1e-2)
    for _ in range(2):
        model(tokens()).float().logsumexp(-1).square().mean().backward()
        optim.step()
    model.eval()
    logits = model(tokens()).detach()
    sharded.reshard()
    with Checkpointer(CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
        checkpoints.save(2, {"model": describe(sharded.model)})
        checkpoints.finish()
    return {name: whole(value).clone() for name, value in model.state_dict().items()}, logits


def config_of(kind: str, folder: Path) -> ModelConfig:
    """Of transformers, from a config.json in `folder`."""
    transformers = pytest.importorskip("transformers")
    folder.mkdir()
    transformers.AutoConfig.for_model(kind, vocab_size=VOCAB, **HF[kind]).save_pretrained(folder)
    return ModelConfig(kind="hf", name_or_path=str(folder))


def exported(checkpoints: Path, out: Path, dtype: str, **options: Any) -> Path:
    with Checkpoint(checkpoint_at(checkpoints)) as checkpoint:
        export(out, plan(checkpoint, dtype, **options))
    return out


def loaded(out: Path, dtype: str) -> Any:
    """By transformers, which finds a place for every tensor and a tensor for every place."""
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=DTYPES[dtype], output_loading_info=True, local_files_only=True
    )
    assert not any(report.values()), report
    return model.eval()


CASES: dict[str, Callable[[Path], tuple[ModelConfig, int]]] = {
    "llama": lambda folder: (LLAMA, 1),
    "llama tied": lambda folder: (TIED, 1),
    "llama in tiles": lambda folder: (LLAMA, 3),
    "hf gpt2": lambda folder: (config_of("gpt2", folder), 1),
    "hf qwen2": lambda folder: (config_of("qwen2", folder), 1),
    "hf llama": lambda folder: (config_of("llama", folder), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_transformers_makes_the_logits_of_the_model_that_was_trained(pool: Pool, tmp_path: Path, case: str) -> None:
    config, tiles = CASES[case](tmp_path / "hf")
    _, want = pool.run(trained, 2, config, "fp32", tiles, tmp_path / "ck")[0]
    model = loaded(exported(tmp_path / "ck", tmp_path / "out", "fp32"), "fp32")
    # The same fp32 values; sums of products, rotary tables and tiles in another order.
    torch.testing.assert_close(model(tokens()).logits, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["llama", "llama tied", "hf gpt2"])
def test_bf16_is_the_working_copy_to_the_bit(pool: Pool, tmp_path: Path, case: str) -> None:
    config, tiles = CASES[case](tmp_path / "hf")
    params, _ = pool.run(trained, 3, config, "bf16", tiles, tmp_path / "ck")[0]
    out = exported(tmp_path / "ck", tmp_path / "out", "bf16", shard_bytes=10_000)
    state = loaded(out, "bf16").state_dict()
    assert state.keys() == {published_name(config.kind, name) for name in params}
    for name, value in params.items():
        got = state[published_name(config.kind, name)]
        assert torch.equal(got.view(torch.int16), value.view(torch.int16)), name


def small_config(vocab: int = 5, width: int = 10, layers: int = 0) -> dict[str, Any]:
    """config.json of a llama with two embeddings and a norm, and a few layers or none."""
    shape = ModelConfig(hidden_size=width, layers=1, heads=1, ffn_size=4 * width).shape(vocab)
    return llama_config(shape) | {"num_hidden_layers": layers}


def checkpoint_of(
    tmp_path: Path, tensors: dict[str, Tensor], *, vocab: int = 5, width: int = 10, layers: int = 0, **options: Any
) -> Path:
    """A checkpoint of a small llama: `tensors`, and zeros for the embeddings and the norm that are not among them."""
    sizes = {"embedding.weight": (vocab, width), "norm.weight": (width,), "head.weight": (vocab, width)}
    there = {name.partition(".")[2] for name in tensors}
    rest = {f"master.{name}": torch.zeros(size) for name, size in sizes.items() if name not in there}
    described = {"kind": "llama", "config": json.dumps(small_config(vocab, width, layers))}
    return by_hand.write(tmp_path / "ck", tensors | rest, extra={"model": described}, **options)


def test_files_are_filled_to_the_size_that_was_asked_for(tmp_path: Path) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    rows = {"attention_norm": 1, "ffn_norm": 1}
    rows |= {f"attention.{name}": 10 for name in ("query", "key", "value", "out")}
    rows |= {f"ffn.{name}": 40 for name in ("gate", "up")}
    shapes = {f"layers.0.{name}.weight": (count, 10)[count == 1 :] for name, count in rows.items()}
    shapes |= {"layers.0.ffn.down.weight": (10, 40), "embedding.weight": (5, 10), "head.weight": (5, 10)}
    shapes |= {"norm.weight": (10,)}
    drawn = {f"master.{name}": torch.randn(shape) for name, shape in shapes.items()}
    out = exported(checkpoint_of(tmp_path, drawn, ranks=2, layers=1), tmp_path / "out", "fp16", shard_bytes=400)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    sizes: dict[str, list[int]] = {}
    for name in sorted(drawn):  # as checkpoints have them
        published = published_name("llama", name.removeprefix("master."))
        file = index["weight_map"][published]
        sizes.setdefault(file, []).append(safetensors_torch.load_file(out / file)[published].nbytes)
    files = [*sizes.values()]
    assert [*sizes] == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    assert all(sum(file) <= 400 or len(file) == 1 for file in files)
    assert all(sum(file) + after[0] > 400 for file, after in pairwise(files))
    assert max(map(len, files)) > 1
    assert index["metadata"] == {"total_size": 2 * sum(value.numel() for value in drawn.values())}
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.safetensors.index.json",
        *index["weight_map"].values(),
    }
    for name, value in drawn.items():
        published = published_name("llama", name.removeprefix("master."))
        got = safetensors_torch.load_file(out / index["weight_map"][published])[published]
        assert torch.equal(got, value.half())
    single = exported(tmp_path / "ck", tmp_path / "single", "fp16")
    assert {path.name for path in single.iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((single / "config.json").read_text())["dtype"] == "float16"


def test_frozen_parameters_and_buffers_are_what_they_were(tmp_path: Path) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    frozen, counts = torch.randn(5, 10).bfloat16(), torch.arange(5)
    stored = {
        "master.norm.weight": torch.randn(10),
        "param.norm.weight": torch.randn(10).bfloat16(),  # what forward used with overlap=delayed: the master is newer
        "param.head.weight": frozen,
        "buffer.layers.0.counts": counts,
        "exp_avg.norm.weight": torch.randn(10),
    }
    with pytest.warns(UserWarning, match=r"no place for \('model.layers.0.counts',\), which are written too"):
        out = exported(checkpoint_of(tmp_path, stored), tmp_path / "out", "fp32")
    found = safetensors_torch.load_file(out / "model.safetensors")
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.0.counts"}
    assert found.keys() == names
    assert torch.equal(found["model.norm.weight"], stored["master.norm.weight"])
    assert torch.equal(found["lm_head.weight"], frozen.float())
    assert torch.equal(found["model.layers.0.counts"], counts)


def test_a_llama_is_exported_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    path = checkpoint_of(tmp_path, {"master.norm.weight": torch.randn(10)})
    monkeypatch.setitem(sys.modules, "transformers", None)  # type: ignore[arg-type]  # as where it is not installed
    found = safetensors_torch.load_file(exported(path, tmp_path / "out", "fp32") / "model.safetensors")
    assert found.keys() == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


def test_what_cannot_be_exported_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint_of(tmp_path, {"master.norm.weight": torch.tensor([1.0, 7e4] * 5)})
    out = tmp_path / "out"

    def refused(what: str, dtype: str = "bf16", **options: Any) -> None:
        with pytest.raises(CheckpointError, match=what):
            exported(path, out, dtype, **options)
        assert {entry.name for entry in tmp_path.iterdir()} <= {"ck", "taken", "taken.partial", "full"}

    refused(r"master.norm.weight holds 7e\+04, more than torch.float16 can: export another --dtype", "fp16")
    data = path / "rank_00000.safetensors"
    sound = data.read_bytes()
    data.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    refused("is not what was written")
    data.write_bytes(sound)
    with pytest.raises(ValueError, match=r"--dtype=int8: choose one of bf16, fp16, fp32"):
        exported(path, out, "int8")
    with pytest.raises(ValueError, match=r"--shard-bytes=0: must be a whole number ≥ 1"):
        exported(path, out, "bf16", shard_bytes=0)
    with pytest.raises(CheckpointError, match=r"nowhere: No such file or directory"):
        exported(path, tmp_path / "nowhere" / "out", "bf16")
    out = tmp_path / "taken"
    out.mkdir()
    refused(r"taken: it is there already: remove it, or choose another folder")
    (tmp_path / "taken").rename(tmp_path / "taken.partial")
    refused(r"taken.partial: it is there already, left by an export that was stopped or is under way: remove it")
    out = tmp_path / "full"
    out.symlink_to(tmp_path / "absent")
    refused("full: it is there already")


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """A plan of 2^50 bytes, which no disk here holds."""
    path = checkpoint_of(tmp_path, {})
    with Checkpoint(path) as checkpoint:
        planned = plan(checkpoint, "bf16")
        (parts,) = planned.files.values()
        huge = {min(parts): exports.StoredBox(None, "F32", (1 << 48,), (0,), (1 << 48,), 0, 1 << 50)}
        planned = exports.ExportPlan({"model.safetensors": huge}, planned.source, planned.texts)
        with pytest.raises(CheckpointError, match=r"1.00 PiB to write, .* free: free space, or choose another disk"):
            export(tmp_path / "out", planned)
    assert {entry.name for entry in tmp_path.iterdir()} == {"ck"}


def limited(on_limit: str, path: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """An export by a process whose files may not grow beyond 64 KiB: it gets an error, or is killed in mid-write."""
    program = f"import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.{on_limit}); "
    program += "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
    program += "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); "
    program += "from dzero.__main__ import main; main()"
    line = [sys.executable, "-c", program, "export", str(path), str(out)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, {"master.head.weight": torch.ones(10_000, 10)}, vocab=10_000)
    ended = limited("SIG_IGN", path, tmp_path / "out")
    assert ended.returncode == 1
    assert os.strerror(errno.EFBIG) in ended.stderr
    assert "nothing was exported" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert {entry.name for entry in tmp_path.iterdir()} == {"ck"}


def test_an_export_that_is_killed_never_has_the_name_of_a_whole_one(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, {"master.head.weight": torch.ones(10_000, 10)}, vocab=10_000)
    assert limited("SIG_DFL", path, tmp_path / "out").returncode == -signal.SIGXFSZ
    assert {entry.name for entry in tmp_path.iterdir()} == {"ck", "out.partial"}
    with pytest.raises(CheckpointError, match=r"out.partial: it is there already, left by an export that was stopped"):
        exported(path, tmp_path / "out", "bf16")


def layout(source: str, target: str, *operations: Any) -> dict[str, Any]:
    """A description of a bare model that publishes one tensor in another layout, with one step or none."""
    operation, dim = (*operations, 0)[:2] if operations else (None, 0)
    steps = [] if operation is None else [{"operation": operation, "dim": dim}]
    conversion = {"sources": [source], "targets": [target], "steps": steps}
    return {"model": {"kind": "bare", "config": json.dumps(small_config()), "layout": [conversion]}}


def test_a_checkpoint_that_tells_no_model_or_another_is_refused(tmp_path: Path) -> None:
    tensors = {"master.weight": torch.ones(3)}
    for number, (extra, what) in enumerate(
        [
            ({}, "does not say which model it is of"),
            ({"model": None}, r"save extra=\{'model': dzero\.describe\(model\)\}"),
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
    ):
        path = by_hand.write(tmp_path / str(number), tensors, extra=extra)
        with Checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match=what):
            plan(checkpoint, "bf16")


PEAK = """
import sys
from pathlib import Path
from transformers import LlamaForCausalLM
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.export_hf import export, plan
from dzero.hardware import peak_rss_bytes, reset_peak_rss, rss_bytes
reset_peak_rss()
before = rss_bytes()
with Checkpoint(sys.argv[1]) as checkpoint:
    export(Path(sys.argv[2]), plan(checkpoint, "bf16"))
print(peak_rss_bytes() - before)
"""


def test_the_peak_of_memory_is_less_than_one_tensor(tmp_path: Path) -> None:
    """Two of 256 MiB: blocks that are read (4 and 2 kept of 16 MiB), and 4 MiB of a tensor in a few forms."""
    tensors = {f"master.{name}.weight": torch.full((16384, 4096), 1.0) for name in ("embedding", "head")}
    path = checkpoint_of(tmp_path, tensors, vocab=16384, width=4096, block_bytes=16 << 20)
    line = [sys.executable, "-c", PEAK, str(path), str(tmp_path / "out")]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 256 << 20
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 2 * 128 << 20


def test_the_command_takes_the_latest_and_tells_what_it_wrote(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, {"master.head.weight": torch.ones(100, 10)}, vocab=100)
    line = ["export", path, tmp_path / "out", "--dtype", "fp16"]
    ended = dzero(*line)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"{tmp_path / 'out'}: 3 tensors, 3.93 KiB of fp16 in 1 files\n"
    ended = dzero(*line)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: {tmp_path / 'out'}: it is there already")

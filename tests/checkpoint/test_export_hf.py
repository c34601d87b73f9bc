"""`python -m dzero export`: what transformers loads is the model that was trained."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_models
import pytest
import torch
import written_checkpoints as by_hand
from in_process import dzero as command
from pool import Pool
from torch import Tensor, nn

import dzero
from dzero import CheckpointConfig, Checkpointer

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
VOCAB = 61


def gpt2() -> nn.Module:
    """One of transformers, whose head is tied and whose projections are transposed."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: own_models.llama(VOCAB, rope_theta=5e5, norm_eps=1e-6),
    "gpt2": gpt2,
}


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(3))


def logits_of(model: nn.Module) -> Tensor:
    found = model(tokens())
    return getattr(found, "logits", found)


def trained(rank: int, ranks: int, kind: str, precision: str, folder: Path) -> Tensor:
    """Two steps, saved as a checkpoint and by `save_pretrained`; the logits that the working copies make."""
    sharded = dzero.shard(MODELS[kind](), stage=3, precision=precision)
    optim = dzero.AdamW(sharded, lr=1e-2)
    for _ in range(2):
        logits_of(sharded.model).float().logsumexp(-1).square().mean().backward()
        optim.step()
    sharded.model.eval()
    logits = logits_of(sharded.model).detach()
    sharded.reshard()
    dzero.save_pretrained(sharded, folder / "saved")
    with Checkpointer(CheckpointConfig(folder=str(folder / "ck")), sharded, optim) as checkpoints:
        checkpoints.save(2, {"model": dzero.describe(sharded.model)})
    return logits


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


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_makes_the_logits_of_the_model_that_was_trained(pool: Pool, tmp_path: Path, kind: str) -> None:
    """By transformers, which finds a place for every tensor and a tensor for every place."""
    want = pool.run(trained, 2, kind, "fp32", tmp_path)[0]
    exported(tmp_path / "ck", tmp_path / "out", "fp32")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert not any(report.values()), report
    # The same fp32 values; sums of products and rotary tables in another order.
    torch.testing.assert_close(model.eval()(tokens()).logits, want, rtol=1e-5, atol=1e-6)


def test_bf16_is_the_working_copy_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    pool.run(trained, 2, "llama", "bf16", tmp_path)
    found, want = exported(tmp_path / "ck", tmp_path / "out", "bf16"), tensors(tmp_path / "saved")
    assert found.keys() == want.keys()
    assert all(torch.equal(value.view(torch.int16), want[name].view(torch.int16)) for name, value in found.items())


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


def test_a_llama_is_exported_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = by_hand.write_llama(tmp_path / "ck", {"master.norm.weight": torch.randn(10)})
    monkeypatch.setitem(sys.modules, "transformers", None)  # type: ignore[arg-type]  # as where it is not installed
    assert exported(path, tmp_path / "out", "fp32").keys() == {*PUBLISHED.values()}


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


def test_the_command_takes_the_latest_and_tells_what_it_wrote(tmp_path: Path) -> None:
    shelf = by_hand.write_llama(tmp_path / "shelf" / "step_00000007", {}, vocab=100).parent
    by_hand.point(shelf, "step_00000007")
    line = ["export", shelf, tmp_path / "out", "--dtype", "fp16"]
    ended = command(*line)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"{tmp_path / 'out'}: 3 tensors, 3.93 KiB of fp16 in 1 files\n"

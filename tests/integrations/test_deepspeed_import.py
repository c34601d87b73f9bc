"""`dzero import-deepspeed`: a run of DeepSpeed goes on here as it went on there; damaged and hostile folders do not."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import in_process
import pytest
import torch
from pool import Pool
from safetensors.torch import load_file, save_file
from typed_commands import typed

from dzero.integrations.deepspeed import importer
from dzero.integrations.deepspeed.importer import import_deepspeed
from dzero.integrations.deepspeed.torch_reader import TorchFiles

pytest.importorskip("transformers")
import transformers
from imported_runs import resumed_run
from launched import launched, torchrun
from with_deepspeed.tiny_llama import LR, SAVED, config

MADE = Path(__file__).parent / "with_deepspeed"
"""Folders that DeepSpeed wrote (with_deepspeed/train_with_deepspeed.py)."""
KEPT = {"master": ("fp32", 1.0), "exp_avg": ("exp_avg", 2.0), "exp_avg_sq": ("exp_avg_sq", 3.0)}
"""States of a parameter: their files, and how many times the parameter `write_universal` makes them."""


@pytest.fixture(scope="module", autouse=True)
def _one_reader() -> Iterator[None]:
    """One process, which takes seconds to start, reads the files of all tests here; where a file ends it, another."""
    made: list[TorchFiles] = []

    def reader() -> nullcontext[TorchFiles]:
        if not made or made[-1]._process.poll() is not None:
            made.append(TorchFiles())
        return nullcontext(made[-1])

    with patch.object(importer, "TorchFiles", reader):
        yield
    for each in made:
        each.__exit__()


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint that a folder of DeepSpeed's becomes; each is imported once."""
    folder, found = tmp_path_factory.mktemp("imported"), dict[str, Path]()

    def checkpoint(made: str) -> Path:
        if made not in found:
            found[made] = import_deepspeed(MADE / made / "universal", folder / made)
        return found[made]

    return checkpoint


def facts_of(folder: Path) -> dict[str, Any]:
    """Losses and rates of DeepSpeed's own run after the checkpoint."""
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("made", "stage", "offload"), [("zero2", 3, "none"), ("zero3", 1, "host")])
def test_a_run_goes_on_as_with_deepspeed(
    made: str, stage: int, offload: str, pool: Pool, imported: Callable[[str], Path]
) -> None:
    facts, path = facts_of(MADE / made), imported(made)
    assert path.name == f"step_{SAVED:08d}"
    for found in pool.run(resumed_run, 2, str(path.parent), stage, offload, facts["rates"]):
        assert found["step"] == SAVED
        assert found["extra"]["imported"]["lr"] == [facts["rates"][0]] * 2, "the next rate of both groups"
        assert found["losses"] == pytest.approx(facts["losses"], rel=0, abs=1e-5)
        if found["rank"] == 0:
            wanted = load_file(MADE / made / "facts.safetensors")
            assert wanted.keys() <= found["params"].keys()
            for name, want in wanted.items():
                torch.testing.assert_close(found["params"][name], want, rtol=0, atol=1e-5)


def stored(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that one process wrote."""
    return load_file(path / "rank_00000.safetensors")


def states(path: Path) -> Any:
    """All of a checkpoint that is no tensor."""
    return json.loads((path / "manifest.json").read_text())["body"]["state"]


def test_states_are_those_of_the_files_to_the_bit(imported: Callable[[str], Path]) -> None:
    found = stored(imported("zero2"))
    for folder in (MADE / "zero2" / "universal" / "zero").iterdir():
        if folder.is_dir() and folder.name != "lm_head.weight":  # tied to the embedding
            for key, (file, _) in KEPT.items():
                want = torch.load(folder / f"{file}.pt", weights_only=True)["param"]
                assert torch.equal(found.pop(f"{key}.{folder.name}"), want)
    assert found == {}
    optim = states(imported("zero2"))["optim"]
    assert {state["step"] for state in optim["states"].values()} == {SAVED}
    assert [group["weight_decay"] for group in optim["groups"]] == [0.01, 0.0]


def save_config(folder: Path, settings: Any) -> str:
    settings.architectures = [f"{type(settings).__name__.removesuffix('Config')}ForCausalLM"]
    settings.save_pretrained(folder)
    return str(folder)


def test_the_command_names_parameters_for_a_run_of_model_hf(tmp_path: Path, imported: Callable[[str], Path]) -> None:
    model = save_config(tmp_path / "model", config())
    told = command(MADE / "zero3" / "universal", tmp_path / "out", "--model", model, "--step", "40").stdout
    assert "step_00000040: 11 trained parameters" in told
    assert f"moments after {SAVED} updates; the learning rate of the next step was 0.00945946" in told
    found = stored(tmp_path / "out" / "step_00000040")
    plain = {name: value.tolist() for name, value in stored(imported("zero3")).items()}
    assert {name.replace(".model.", ".", 1): value.tolist() for name, value in found.items()} == plain


def write_universal(folder: Path, params: dict[str, torch.Tensor], **told: Any) -> None:
    """Write what DeepSpeed writes at stage 2, with states that are multiples of the parameters."""
    for name, param in params.items():
        (folder / "zero" / name).mkdir(parents=True)
        for file, factor in KEPT.values():
            torch.save({"cat_dim": 0, "param": param * factor}, folder / "zero" / name / f"{file}.pt")
        torch.save(torch.tensor(6.0), folder / "zero" / name / "step.pt")
    states = {"param_shapes": [{name: param.shape for name, param in params.items()}], "module": params}
    torch.save({**states, "global_steps": 6, "skipped_steps": 0, **told}, folder / "mp_rank_00_model_states.pt")
    torch.save({"param_groups": [{"lr": 0.1, "params": [0]}]}, folder / "zero" / "optimizer_state.pt")


def check_written(found: dict[str, torch.Tensor], name: str, param: torch.Tensor) -> None:
    """The states of a parameter of `write_universal`; they are taken out."""
    for key, (_, factor) in KEPT.items():
        assert torch.equal(found.pop(f"{key}.{name}"), param * factor)


def test_experts_of_an_older_layout_become_those_of_the_model(tmp_path: Path) -> None:
    """One tensor per expert, as transformers kept them before it fused them; moments follow in the same way."""
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    model.save_pretrained(tmp_path / "published")
    old = load_file(tmp_path / "published" / "model.safetensors")
    assert any(".experts.1.w2" in name for name in old)
    write_universal(tmp_path / "old", old)
    found = stored(import_deepspeed(tmp_path / "old", tmp_path / "out", model))
    for name, param in model.named_parameters():
        check_written(found, name, param.detach())
    assert found == {}


def test_frozen_parameters_that_were_left_out_are_those_of_the_model(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(config())
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("norm.weight"))
    trained = {name: param.detach() + 1 for name, param in model.named_parameters() if param.requires_grad}
    left_out = {"ds_config": {"zero_optimization": {"stage": 2}}, "frozen_param_shapes": None}
    write_universal(tmp_path / "from", trained, **left_out)
    with pytest.raises(ValueError, match=r"frozen parameters were left out.*import_deepspeed\(FOLDER, TARGET, model\)"):
        import_deepspeed(tmp_path / "from", tmp_path / "refused")
    found = stored(import_deepspeed(tmp_path / "from", tmp_path / "out", model))
    for name, param in model.named_parameters():
        if name in trained:
            check_written(found, name, trained[name])
        else:
            assert torch.equal(found.pop(f"param.{name}"), param)
    assert found == {}
    with pytest.raises(ValueError, match="of the model is not in it"):
        import_deepspeed(tmp_path / "from", tmp_path / "on meta", model.to("meta"))


def test_weights_of_zero_to_fp32_start_without_moments(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(config())
    weights = {name: param.detach() for name, param in model.named_parameters()}
    for folder in ("bin", "safe"):
        (tmp_path / folder).mkdir()
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    save_file(weights, tmp_path / "safe" / "model.safetensors")
    for folder in ("bin", "safe"):
        found = stored(import_deepspeed(tmp_path / folder, tmp_path / f"out {folder}", model))
        for name, param in weights.items():
            assert torch.equal(found.pop(f"master.{name}"), param)
            assert not found.pop(f"exp_avg.{name}").any()
            assert not found.pop(f"exp_avg_sq.{name}").any()
        assert found == {}


class Code:
    """Leaves a file behind where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["LEFT_BEHIND"],)


def endless() -> bytes:
    """A pickle of lists in lists, which are 10^30 values when they are written out."""
    tree: Any = [1] * 10
    for _ in range(30):
        tree = [tree] * 10
    return pickle.dumps(tree, protocol=2)


def pickled_as(path: Path, data: bytes) -> None:
    """Put another pickle into a file of torch.save."""
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, part in parts.items():
            file.writestr(name, data if name.endswith("data.pkl") else part)


def saving(name: str, value: Any) -> Callable[[Path], object]:
    return lambda folder: torch.save(value, folder / name)


def resaving(name: str, change: Callable[[Any], Any]) -> Callable[[Path], object]:
    return lambda folder: torch.save(change(torch.load(folder / name, weights_only=True)), folder / name)


def pickling(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: pickled_as(folder / name, data)


def linking(name: str) -> Callable[[Path], object]:
    def link(folder: Path) -> None:
        (folder / name).rename(folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return link


STATES, NORM = "mp_rank_00_model_states.pt", "zero/model.norm.weight"
FP32, MOMENT, STEP = f"{NORM}/fp32.pt", f"{NORM}/exp_avg.pt", f"{NORM}/step.pt"
INFLATED = b"\x80\x02X" + struct.pack("<I", 3 << 30) + b"a" * (64 << 20)
TERABYTE = {"param": torch.zeros(1).expand(1 << 38)}  # whose elements are all the same one
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (saving(FP32, Code()), "names posix.mkdir, and only tensors"),
    "code beside": (saving(STATES, {"a": Code()}), "names posix.mkdir, and only tensors"),
    "code without zip": (lambda at: (at / FP32).write_bytes(pickle.dumps(Code(), protocol=2)), "nothing of it was run"),
    "cut short without zip": (
        lambda at: (at / FP32).write_bytes(pickle.dumps([1, 2], protocol=2)[:-1]),
        "it ends within its pickle",
    ),
    "eval": (pickling(STEP, b"cbuiltins\neval\n(X\x01\x00\x00\x001tR."), "names eval, and only tensors"),
    "cut short": (lambda at: os.truncate(at / MOMENT, 900), "exp_avg.pt: no file of tensors that"),
    "empty": (lambda at: os.truncate(at / MOMENT, 0), "exp_avg.pt: no file of tensors that"),
    "deep": (pickling(STEP, endless()), "more than 5000000 plain values"),
    "inflated": (pickling(STEP, INFLATED), "step.pt: no file of tensors that"),
    "expanded": (saving(FP32, TERABYTE), "more than a file of"),
    "other shape": (saving(MOMENT, {"param": torch.zeros(9)}), "exp_avg.pt: [9], model.norm.weight is [8]"),
    "whole numbers": (saving(FP32, {"param": torch.zeros(8).long()}), "fp32.pt: no state of a parameter"),
    "linked file": (linking(FP32), "symbolic links are not followed"),
    "linked folder": (linking(NORM), "neither the folder of a parameter"),
    "linked zero": (linking("zero"), "symbolic link is not followed"),
    "name of a folder above": (
        resaving(STATES, lambda s: s | {"param_shapes": [{"../../above": torch.Size([1])}]}),
        "'../../above' is no name of a parameter",
    ),
    "twice": (resaving(STATES, lambda s: s | {"param_shapes": s["param_shapes"] * 2}), "is there twice"),
    "unknown": (lambda at: (at / "zero" / "other").mkdir(), "know no parameter or buffer of that name"),
    "folder for a file": (lambda at: ((at / FP32).unlink(), (at / FP32).mkdir()), "no regular file"),
    "no moment": (lambda at: (at / MOMENT).unlink(), "exp_avg.pt: No such file"),
    "no parameter": (lambda at: shutil.rmtree(at / NORM), "model.norm.weight is not there"),
    "no model states": (lambda at: (at / STATES).unlink(), "no mp_rank_00_model_states.pt"),
    "no step": (lambda at: (at / STEP).unlink(), "no step.pt, as other parameters have"),
    "other step": (saving(STEP, torch.tensor(7.0)), "has made 6 updates"),
    "step of NaN": (saving(STEP, torch.tensor(float("nan"))), "no number of steps"),
    "other rule": (
        resaving(STATES, lambda s: s | {"ds_config": {"optimizer": {"type": "Lamb"}}}),
        "its optimizer is Lamb",
    ),
}


@pytest.mark.product(keep=4)
@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_or_hostile_folder_is_refused_in_a_line(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "universal"
    shutil.copytree(MADE / "zero2" / "universal", folder)
    spoil, said = HOSTILE[case]
    monkeypatch.setenv("LEFT_BEHIND", str(tmp_path / "code ran"))
    spoil(folder)
    assert said in refused(folder, tmp_path / "out")
    assert not any(name.name.startswith(("code ran", "out")) for name in tmp_path.iterdir())


def command(*words: Path | str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process."""
    return in_process.dzero("import-deepspeed", *words)


def refused(*words: Path | str) -> str:
    """The one line that the command tells."""
    ended = command(*words)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    return ended.stderr


def test_what_cannot_be_imported_is_told_with_what_helps(tmp_path: Path) -> None:
    plain = tmp_path / "run" / "global_step6"
    plain.mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("global_step6")
    (plain / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    out = tmp_path / "out"
    convert = f"ds_to_universal --inject_missing_state --input_folder {plain} --output_folder {plain}_universal"
    assert convert in refused(plain, out)
    assert convert in refused(plain.parent, out)
    assert "neither a universal checkpoint" in refused(tmp_path, out)
    assert "no such folder" in refused(tmp_path / "none", out)
    (tmp_path / "run" / "latest_universal").write_text("../elsewhere")
    assert "is no name of a folder beside it" in refused(plain.parent, out)
    out.mkdir()
    assert "it is there already" in refused(MADE / "zero2" / "universal", out)
    assert not [*out.iterdir()]
    (tmp_path / "bin").mkdir()
    torch.save({"a": torch.zeros(1)}, tmp_path / "bin" / "pytorch_model.bin")
    assert "name the model, --model FOLDER" in refused(tmp_path / "bin", tmp_path / "new")


def test_another_model_is_refused(tmp_path: Path) -> None:
    other = config()
    other.hidden_size = 16
    out, made = tmp_path / "out", MADE / "zero2" / "universal"
    assert "it is of another model" in refused(made, out, "--model", save_config(tmp_path / "wide", other))
    other = config()
    other.attention_bias = True
    assert "of the model is not in it" in refused(made, out, "--model", save_config(tmp_path / "biased", other))
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_of_deepspeed_made_now_goes_on_here(stage: int, tmp_path: Path, pool: Pool) -> None:
    pytest.importorskip("deepspeed")
    made, script = tmp_path / "made", str(MADE / "train_with_deepspeed.py")
    line = [sys.executable, *torchrun(2), script, str(stage), str(made)]
    subprocess.run(line, check=True, timeout=600, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    facts = facts_of(made)
    path = import_deepspeed(made / "universal", tmp_path / "out")
    (found, _) = pool.run(resumed_run, 2, str(path.parent), 3, "none", facts["rates"])
    assert found["losses"] == pytest.approx(facts["losses"], rel=0, abs=1e-5)


def test_a_run_of_train_goes_on_after_the_imported_step(tmp_path: Path) -> None:
    """With its own schedule, and with its data where six steps of its own would have left off."""
    settings = config()
    settings.vocab_size = 256
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(settings)
    write_universal(tmp_path / "universal", {name: param.detach().abs() for name, param in model.named_parameters()})
    folder = save_config(tmp_path / "model", settings)
    command(tmp_path / "universal", tmp_path / "imported", "--model", folder)
    (tmp_path / "text.txt").write_text("data in an order of its own. " * 400)
    words = f"model=hf model.name_or_path={folder} data.path=text.txt train.sequence_tokens=16 train.steps=8".split()
    words += ["train.microbatch_sequences=2", "zero.stage=3", "mesh.dp=1", "checkpoint.every=8", "resume=imported"]
    words += ["monitor.tensorboard=false", "train.evaluate_batches=1", "launch.workers=1", "hydra.run.dir=run"]
    done = typed("train.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "imported after step 6" in done.stdout
    state = states(tmp_path / "checkpoints" / "step_00000008")
    assert {each["step"] for each in state["optim"]["states"].values()} == {8}
    assert state["extra"]["stream"]["position"] == 8 * 2


@pytest.mark.full("tests/integrations/test_deepspeed_import.py::test_a_run_goes_on_as_with_deepspeed")
def test_a_trainer_goes_on_with_the_learning_rate_of_deepspeed(tmp_path: Path, imported: Callable[[str], Path]) -> None:
    folder = tmp_path / f"checkpoint-{SAVED}"
    shutil.copytree(imported("zero2").parent, folder / "dzero")
    saved = {"max_steps": 20, "num_train_epochs": 3, "train_batch_size": 2, "logging_steps": 1}
    transformers.TrainerState(global_step=SAVED, **saved).save_to_json(str(folder / "trainer_state.json"))
    rates = {row["step"]: row["learning_rate"] for row in launched("imported_runs.py", tmp_path, str(folder))}
    first = facts_of(MADE / "zero2")["rates"][0]
    assert rates == {SAVED + 1: first, SAVED + 2: LR / 2}, "then that of Trainer's own schedule"

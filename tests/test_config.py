"""Every mistake on the command line is one error that names the key, the value, and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from from_words import refusal, run_of
from typed_commands import refused, typed

from dzero import ZeroConfig


@pytest.fixture(autouse=True)
def _outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def test_padded_sequences_fit_products_in_8_bits() -> None:
    line = ["mesh.cp=2", "precision.compute=fp8_rowwise"]
    assert (run_of(*line).token_multiple, run_of(line[0]).token_multiple) == (32, 4)


MISTAKES = {
    # values outside the allowed set
    "precision.compute=fp8": "precision.compute='fp8': choose one of ['param', 'fp8_tensorwise', 'fp8_rowwise']",
    "precision.compute=fp8_rowwise train.sequence_tokens=50 train.microbatch_sequences=2": "mesh.cp = 100; make "
    "train.sequence_tokens a multiple of 16",
    "precision.reduce=int2": "precision.reduce='int2': choose one of",
    "precision.master=bf16": "precision.master='bf16': choose one of ['fp32', 'remainder']",
    "precision.moments=fp8": "precision.moments='fp8': choose one of ['fp32', 'bf16', 'int8']",
    "zero.reduction=fast": "zero.reduction='fast': choose one of ['auto', 'exact', 'native']",
    "zero.optimizer_shard_axes=[none]": "choose [shard] or [replicate,shard]",
    "zero.stage=5": "zero.stage=5: choose 0, 1, 2 or 3",
    "precision=bf17": "precision=bf17: choose one of ['bf16', 'bf16_remainder', 'fp16', 'fp32']; did you mean bf16?",
    "optim.rule=adam": "optim.rule='adam': choose adamw, muon or one of torch.optim's",
    "launch.workers=0": "launch.workers=0: must be a whole number ≥ 1 and ≤ 1048576, or null to choose",
    # names that do not exist
    "zero.stag=3": "zero.stag: unknown key; zero has ['node_ranks', 'optimizer_shard_axes', 'reduction', "
    "'reshard_after_forward', 'stage', 'unit_bytes', 'units', 'unused']; did you",
    "zero={stag: 3}": "zero.stag: unknown key",
    "lr=1": "lr: unknown key; the configuration has",
    "train.lr=1": "did you mean optim.lr=1?",
    "steps=5": "did you mean train.steps=5 or profile.steps=5?",
    "disk.thread=2": "did you mean offload.disk.threads=2?",
    # other types
    "zero.stage=abc": "zero.stage=abc: must be a whole number",
    "train.steps=1.5": "train.steps=1.5: must be a whole number",
    "launch.workers=two": "launch.workers=two: must be a whole number or null",
    "optim.lr=fast": "optim.lr=fast: must be a number",
    "data.paths={a.jsonl:1}": "data.paths={a.jsonl:1}: must be a list [...], each a word or null",
    "data.paths=[a.txt,b.txt] data.weights=[1,-1]": "data.weights=[1,-1]: -1.0 is no weight, which must be a number",
    "optim.betas=0.9": "optim.betas=0.9: must be a list [...], each a number or null",
    "train=3": "train=3: train is a group; set one of ['train.steps', ",
    "zero=aut": "zero=aut: choose one of ['auto', 'given']; did you mean auto?",
    "+zero=auto": "+zero=auto: zero is chosen already; leave the + away",
    "~zero.stage": "~zero.stage: a setting cannot be deleted",
    # what ranks cannot share
    "mesh.dp=3 mesh.tp=2 launch.workers=4": "mesh.dp=3 x mesh.tp=2, but there are 4 ranks: (dp, cp, tp, pp) that make "
    "as many, the nearest first: [(1, 1, 2, 2), (1, 2, 2, 1), (2, 1, 2, 1), (1, 1, 1, 4), (1, 1, 4, 1), (1, 4, 1, 1), "
    "(4, 1, 1, 1), (1, 2, 1, 2), (2, 1, 1, 2), (2, 2, 1, 1)], or start 6",
    "mesh.cp=4 launch.workers=6": "(2, 1, 1, 3), (2, 1, 3, 1)] and 4 more",
    "mesh.tp=3": "mesh.tp=3 does not divide the model's kv_heads=2, ffn_size=512; allowed: [1, 2]",
    "mesh.tp=2 train.sequence_tokens=255": "mesh.tp=2 does not divide train.sequence_tokens=255",
    "mesh.pp=8 train.accumulate=8 launch.workers=8": "mesh.pp=8: 8 pipeline stages of a model of 4 blocks",
    "mesh.pp=4 launch.workers=4 train.accumulate=3": "mesh.pp_schedule=1f1b over mesh.pp=4 ranks with 3 microbatches",
    "model=tiny_moe mesh.dp=2 mesh.tp=2 mesh.ep=8": "mesh.ep=8 does not divide the 2 data-parallel ranks of axis shard "
    "x mesh.tp=2, all of which share them, of which experts are shared by neighbours; allowed: [2, 4]",
    "mesh.replicate=0": "mesh.replicate=0: must be a whole number ≥ 1",
    "mesh.replicate=3": "mesh.replicate=3 does not divide the 2 ranks; allowed: [1, 2]",
    # what cannot be, or has no effect; tests/inside/test_inside_rules.py has what cannot be together
    "train.on_nan=ignore": "train.on_nan='ignore': choose skip or stop",
    "checkpoint.every=5 checkpoint.deadline_s=0": "checkpoint.deadline_s=0.0: must be a number in [0.001, ",
    "train.steps=5 schedule.warmup_steps=10": "schedule.warmup_steps=10 exceed train.steps=5: take fewer of them",
    "model=gpt2_124m train.sequence_tokens=2048": "the model takes sequences up to model.max_tokens=1024",
    "model=hf": "model.name_or_path is unset",
    "model.name_or_path=gpt2": "model.name_or_path=gpt2 has no effect with model.kind=llama",
    "optim.lr=nan": "optim.lr=nan: must be a number in [0, 1e+06]",
    "profile=on profile.start_step=500": "the trace ends with step 502, but the run has 200",
    "model.weights=no/such": "model.weights=no/such: no such folder",
    "model.weights=true": "model.weights=true: model.kind=llama has no folder of its own",
    "offload=nvme": "offload=nvme: choose one of ['disk', 'host', 'host_all', 'infinity', 'none']",
    "offload.disk.threads=0 offload.master=disk": "threads=0: must be 1 to 64",
    "offload=host offload.grad_fraction=0": "offload.grad_fraction=0.0: must be a number in (0, 1]; for none",
    "hardware=h100_80g hardware.device_byte=1": "hardware.device_byte: unknown key; hardware has ['attention_flops', ",
    "hardware=h100_80g hardware.efficiency=2": "hardware.efficiency=2.0: a part of the peak, must be in (0, 1]",
    "hardware.device_bytes=1": "this machine's figures are measured; choose a node as well",
    "data.path=/no/such/file.txt": "data.path=/no/such/file.txt: no such file or folder",
    # grammar, and sweeps: each run is checked before the first one starts
    "zero.stage=1,2": "several values are several runs, --multirun zero.stage=1,2; a list is zero.stage=[...]",
    "--zero.stage=3": "a setting is written without dashes, zero.stage=3",
    "--stage 3": "a setting is written without dashes, stage=3",
    "zero.stage = 3": "a setting is written without spaces, zero.stage=3",
    "--multirun zero.stage=1,5": "zero.stage=5: choose 0, 1, 2 or 3",
    "--multirun model=tiny,tinny": "model=tinny: choose one of",
    # words for a checkpoint, an update rule and its settings
    "resume.source=latest": "resume=latest: no such folder; take resume=auto for the latest in checkpoint.folder=",
    "resume.override=lr": "resume.override=lr: must be a list [...], each a word, such as resume.override=[lr]",
    "resume.override=[lr]": "; did you mean optim.lr or optim.muon.lr?",
    "optim.rule=sgd": "; did you mean SGD?",
    "optim.rule=SparseAdam zero.stage=0": "optim.rule=SparseAdam: it takes sparse gradients only",
}


@pytest.mark.product(keep=8)
@pytest.mark.parametrize(("line", "told"), MISTAKES.items(), ids=list(MISTAKES))
def test_a_mistake_names_the_key_the_value_and_what_is_allowed(line: str, told: str) -> None:
    found = refusal(*line.replace(": ", ":").split())
    assert told in found
    assert "reference_type" not in found


MEANT = {
    "model=llama_7b": "llama_8b",
    "model=llama": "llama_1b or llama_8b or llama_70b",
    "model=qwen_7b": None,
    "model=TINY": "tiny",
    "hardware=a100": "a100_40g or a100_80g",
    "hardware=h100_96g": "h100_80g",
    "experiment=gpu_500": "gpus_512",
    "--config-name=finetuning": "finetune",
}
"""Names that nobody gave, and those that they may stand for."""


@pytest.mark.product(keep=4)
@pytest.mark.parametrize(("line", "meant"), MEANT.items(), ids=list(MEANT))
def test_a_wrong_name_gets_the_nearest_of_its_family_and_size(line: str, meant: str | None) -> None:
    assert refusal(line).partition("]; did you mean ")[2] == ("" if meant is None else f"{meant}?")


@pytest.mark.product(keep=4)
@pytest.mark.parametrize(
    "line",
    [
        "",
        "precision=fp16 scaler.init=1024 block.activation_checkpoint=full",
        "offload.activations=disk offload.prefetch_units=3 block.activation_checkpoint=full",
        "optim.rule=SGD optim.options={momentum:0.9} optim.betas=null",
        "zero.units=[Block] optim.betas=[0.9,0.99]",
        "hydra.run.dir=elsewhere hydra/job_logging=none",
        "--multirun zero.stage=0,1,2,3 model=tiny,bench_21m",
        "--multirun optim.lr=range(1,3)",
        "--multirun model=glob(bench*)",
        "--multirun zero={stage:1},{stage:3}",
        "model=tiny_moe mesh.ep=2 zero.stage=3 offload=host mesh.cp=2 block.activation_checkpoint=full",
        "model=tiny_moe mesh.ep=4 mesh.tp=2 model.kv_heads=2",
        "zero=auto zero.stage=3 offload=host_all hardware=h100_80g",
        "--cfg job",
        "-sc install=bash",
        "hardware=h100_80g hardware.network=null",
        "model=llama_70b launch.workers=8 mesh.replicate=2 zero.stage=3 zero.reshard_after_forward=2",
    ],
)
def test_what_is_right_passes(line: str) -> None:
    assert refusal(*line.split()) == ""


def test_a_step_takes_what_the_batch_arithmetic_says() -> None:
    train = run_of("train.microbatch_sequences=3", "train.accumulate=5", "train.global_sequences=60").train
    assert train.sequences(4) == 3 * 5 * 4
    elastic = run_of("train.microbatch_sequences=3", "train.accumulate=null", "train.global_sequences=60").train
    assert [elastic.microbatches(ranks) for ranks in (1, 2, 4, 5, 10, 20)] == [20, 10, 5, 4, 2, 1]
    assert all(elastic.sequences(ranks) == 60 for ranks in (1, 2, 4, 5, 10, 20))


def test_workers_and_sweeps_are_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refusal("zero.stage=3") == ""
    assert "launch.workers=4 has no effect under torchrun" in refusal("launch.workers=4")
    assert "leave torchrun away" in refusal("-m", "zero.stage=0,1")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("zero.stage=5", "zero.stage=5: choose 0, 1, 2 or 3"),
        ("zero.stage", "zero.stage: a setting is written KEY=VALUE, such as zero.stage=3; see dzero train --help"),
    ],
)
def test_the_command_says_it_once_without_a_stack_trace_and_leaves_nothing(
    line: str, told: str, tmp_path: Path
) -> None:
    ended = typed("train.py", line, cwd=tmp_path)
    assert (refused(ended), ended.stdout) == (f"error: {told}\n", "")
    assert list(tmp_path.iterdir()) == []


def test_the_home_folder_is_meant_by_a_tilde_that_the_shell_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    disk = "offload.disk.paths=[~/a,'~/b','/c~/d']"
    words = ["checkpoint.folder=~/saved", "checkpoint.every=1", "resume=~/old", "offload=disk", disk]
    found = run_of(*words)
    assert (found.checkpoint.folder, found.resume.source) == ("/home/me/saved", "/home/me/old")
    assert found.offload.disk.paths == ["/home/me/a", "/home/me/b", "/c~/d"]
    of_a_group = run_of('checkpoint={folder: "~/saved", every: 1}')
    assert of_a_group.checkpoint.folder == "/home/me/saved"


def test_resume_is_short_for_the_source_of_its_group_wherever_settings_are_given() -> None:
    for words, source in (
        (["resume=auto"], "auto"),
        (["++resume=runs/a"], "runs/a"),
        (["resume={source:auto}"], "auto"),
    ):
        found = run_of(*words, "resume.strict=true").resume
        assert (found.source, found.strict) == (source, True)
    assert run_of("resume=null").resume.source is None
    assert "resume.strict=true has no effect with resume.source=null" in refusal("resume.strict=true")


def test_old_names_of_settings_are_taken_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    replicated = run_of("zero.states_over=all", "mesh.replicate=2", "mesh.dp=4")
    assert replicated.zero.optimizer_shard_axes == ["replicate", "shard"]
    cut = ["mesh.pp_parts=2", "mesh.pp=2", "mesh.pp_schedule=interleaved", "train.accumulate=2"]
    assert run_of(*cut).mesh.pp_stages_per_rank == 2
    told = capsys.readouterr().err
    assert "warning: zero.states_over is now zero.optimizer_shard_axes" in told
    assert "warning: mesh.pp_parts is now mesh.pp_stages_per_rank" in told
    with pytest.warns(FutureWarning, match=r"zero\.states_over is now zero\.optimizer_shard_axes"):
        assert ZeroConfig(states_over="all").optimizer_shard_axes == ["replicate", "shard"]  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"states_over is the old name of .*; give one of them"):
        ZeroConfig(states_over="all", optimizer_shard_axes=["shard"])  # type: ignore[call-arg]
    assert "did you mean zero.optimizer_shard_axes?" in refusal("zero={states_over:all}")

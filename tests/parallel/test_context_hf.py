"""Context parallelism of models of transformers: numbers of whole sequences, or a refusal in one line."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from context_hf_cases import KINDS, SIZES, Case, model_of, sharded, split, whole
from pool import Pool
from small_runs import CONF, ROOT

from dzero.overrides import composed
from dzero.parallel.context.hf import transformers_model
from dzero.trainer.trainer import Trainer

transformers = pytest.importorskip("transformers")

LOSS, GRADS = 1e-6, 3e-6
"""Relative, of gradients to the length of each: fp32 sums are cut elsewhere, and rounded a few times 2^-24."""
MIXES_DOCUMENTS = ("gpt_oss",)
"""Kinds whose own masks do not keep the documents of a sequence apart."""
EVERY = [
    Case(kind=kind, attention=attention, ranks=ranks, packed=packed)
    for kind, attention, ranks, packed in product(KINDS, ("all_gather", "ulysses"), (2, 4), (False, True))
    if not (packed and kind in MIXES_DOCUMENTS)
]
FIRST = [case for case in EVERY if case.ranks == 2 and case.packed == (case.attention == "all_gather")]
RINGS = [Case(kind=kind, attention="ring", ranks=ranks) for kind, ranks in (("llama", 4), ("gpt2", 2))]
MIXED = [Case(kind="gpt_oss", attention=attention) for attention in ("all_gather", "ulysses")]
CASES = [
    *FIRST,
    *MIXED,
    *RINGS,
    *(pytest.param(case, marks=pytest.mark.full) for case in EVERY if case not in (*FIRST, *MIXED)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients_are_those_of_whole_sequences(pool: Pool, case: Case) -> None:
    loss, grads = whole(case.kind, case.packed)
    for found, of_params in pool.run(split, case.ranks, case):
        assert found == pytest.approx(loss, rel=LOSS)
        assert of_params.keys() == grads.keys()
        for name, want in grads.items():
            assert (of_params[name] - want).norm() <= GRADS * want.norm() + 1e-9, name


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loop_of_ones_own_gives_parts_and_whole_positions(pool: Pool, stage: int) -> None:
    case = Case(kind="mistral", packed=True)
    want, _ = whole(case.kind, case.packed)
    assert pool.run(sharded, 2, case, stage) == [pytest.approx(want, rel=LOSS)] * 2


def told(rank: int, ranks: int, case: Case) -> str:
    """The error of a split forward."""
    try:
        split(rank, ranks, case)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(kind="mistral", attention="ring"), "ring: MistralForCausalLM has sliding_window=5"),
        (Case(kind="llama", attention="ring", packed=True), "ring: it takes no masks"),
        (Case(kind="llama", attention="ulysses", ranks=8), "mesh.cp=8, which does not divide heads=8 and kv_heads=4"),
    ],
    ids=str,
)
def test_what_an_attention_cannot_do_is_refused(pool: Pool, case: Case, message: str) -> None:
    for error in pool.run(told, case.ranks, case):
        assert message in error
        assert "all_gather" in error
        assert "\n" not in error


def test_a_model_of_torch_is_none_of_transformers() -> None:
    assert transformers_model(torch.nn.Linear(1, 1)) is None
    model = model_of("llama")
    assert transformers_model(torch.nn.Sequential(model)) is model


CHATS = ROOT / "examples" / "finetune" / "chats.jsonl"
OTHERS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "nemotron": SIZES,
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention"]},
    "qwen3_next": {**SIZES, "layer_types": ["linear_attention", "full_attention"]},
    "llama4_text": {**SIZES, "intermediate_size_mlp": 48, "num_local_experts": 2},
}


def written(kind: str, folder: Path, **more: Any) -> Path:
    """Configuration of a small model that reads bytes and some more ids."""
    sizes = KINDS.get(kind, {}) if kind == "gpt2" else {**SIZES, **KINDS.get(kind, {}), **more}
    transformers.AutoConfig.for_model(kind, **{**sizes, "vocab_size": 320}).save_pretrained(folder)
    return folder


def words(folder: Path, text: Path, *settings: str) -> list[str]:
    return [
        "model=hf",
        f"model.name_or_path={folder}",
        f"data.path={text}",
        "precision=fp32",
        "data.held_out=0",
        "train.sequence_tokens=32",
        "train.global_sequences=4",
        "train.accumulate=null",
        "train.steps=2",
        "schedule.kind=constant",
        "schedule.warmup_fraction=0",
        "monitor.tensorboard=false",
        *settings,
    ]


def trained(rank: int, ranks: int, settings: list[str], folder: Path) -> tuple[str, list[float], dict[str, Any]]:
    """Error, losses and parameters of a run."""
    try:
        trainer = Trainer(composed(settings, CONF), folder, torch.device("cpu"))
    except ValueError as error:
        return str(error), [], {}
    trainer.run()
    from parity_cells import whole as gathered

    params = {name: gathered(param).clone() for name, param in trainer.sharded.named_params().items()}
    return "", trainer.recorder.losses, params


@pytest.fixture
def text(tmp_path: Path) -> Path:
    from small_runs import write_text

    return write_text(tmp_path / "text.txt")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", "mesh.cp=2"),
        ("gemma2", "mesh.cp=2 mesh.cp_attention=ulysses block.activation_checkpoint=full"),
        pytest.param("mistral", "mesh.cp=2 block.activation_checkpoint=selective", marks=pytest.mark.full),
        pytest.param("llama", "mesh.cp=2 mesh.tp=2", marks=pytest.mark.full),
        pytest.param("llama", "mesh.cp=2 mesh.tp=2 block.loss_tiles=3", marks=pytest.mark.full),
        pytest.param("qwen2", "mesh.cp=2 block.compile=true", marks=pytest.mark.full),
    ],
)
def test_a_run_trains_as_with_whole_sequences_at_every_stage(
    pool: Pool, tmp_path: Path, text: Path, kind: str, settings: str
) -> None:
    folder, split_runs = written(kind, tmp_path / "model"), []
    ranks = 4 if "tp" in settings else 2
    ((_, losses, params),) = pool.run(trained, 1, words(folder, text, "zero.stage=0"), tmp_path / "one")
    for stage in (0, 3):
        run = words(folder, text, f"zero.stage={stage}", *settings.split())
        split_runs.append(pool.run(trained, ranks, run, tmp_path / f"stage{stage}", timeout_s=300))
    for error, found, _ in (each for of_run in split_runs for each in of_run):
        assert error == ""
        assert found == pytest.approx(losses, rel=1e-5)
    first, second = (of_run[0][2] for of_run in split_runs)
    for name, want in params.items():
        assert torch.equal(first[name], second[name]), name
        assert (first[name] - want).norm() <= 1e-3 * want.norm(), name


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bloom", "does not leave its attention to kernels without masks"),
        ("mamba", "does not leave its attention to kernels without masks"),
        ("lfm2", "has layers of kind conv"),
        ("llama", "has rotary positions of type dynamic"),
        pytest.param("nemotron", "NemotronAttention does not hand the keywords", marks=pytest.mark.full),
        pytest.param("qwen3_next", "does not leave its attention", marks=pytest.mark.full),
        pytest.param("llama4_text", "does not leave its attention", marks=pytest.mark.full),
    ],
)
def test_models_with_more_than_attention_are_refused(
    pool: Pool, tmp_path: Path, text: Path, kind: str, message: str
) -> None:
    run = words(written(kind, tmp_path / "model", **OTHERS[kind]), text, "mesh.cp=2")
    for error, _, _ in pool.run(trained, 2, run, tmp_path / "run"):
        assert message in error
        assert "\n" not in error
        assert error.endswith("take mesh.cp=1")


def shifted(rank: int, ranks: int, settings: list[str], folder: Path, what: str) -> str:
    """The error of a run whose model sees the token before each: in its feed-forward, or in its positions."""
    from transformers.models.llama import modeling_llama

    cls = {"feed-forward": modeling_llama.LlamaMLP, "positions": modeling_llama.LlamaRotaryEmbedding}[what]
    forward: Any = cls.forward

    def of_tokens(self: Any, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = forward(self, x) + 0.1 * x.roll(1, dims=1)
        return mixed

    def of_input(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(self, x, torch.arange(x.shape[1]).expand_as(position_ids))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "forward", {"feed-forward": of_tokens, "positions": of_input}[what])
        error, _, _ = trained(rank, ranks, settings, folder)
    return error


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("what", ["feed-forward", "positions"])
def test_a_model_that_computes_something_else_from_cut_sequences_is_refused(
    pool: Pool, tmp_path: Path, text: Path, what: str, precision: str
) -> None:
    run = words(written("llama", tmp_path / "model"), text, "mesh.cp=2", f"precision={precision}")
    for error in pool.run(shifted, 2, run, tmp_path / "run", what):
        assert error.startswith("mesh.cp=2: LlamaForCausalLM computes something else from cut sequences (")
        assert error.endswith("take mesh.cp=1")

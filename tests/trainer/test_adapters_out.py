"""Models of peft in loops of one's own and in DzeroTrainer: what was trained is what their folders hold, and of several
adapters one is trained at a time.

The rows of docs/reference/adapters.md are what is walked first. The oracle loads a folder without dzero.
"""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from in_process import dzero as command
from parity_cells import whole
from pool import Pool
from torch import Tensor, nn

import dzero
from dzero.integrations.transformers import DzeroTrainer

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
PAGE = Path(__file__).parents[2] / "docs/reference/adapters.md"
STEPS, LR, VOCAB = 2, 2e-2, 61
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "mixture": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


class Row(NamedTuple):
    """A row of the page: settings of peft as a call, the kind of model, and which folders it has."""

    call: str
    model: str
    alone: bool
    merged: bool

    @property
    def settings(self) -> dict[str, Any]:
        (call,) = (node for node in ast.walk(ast.parse(self.call)) if isinstance(node, ast.Call))
        return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}

    def config(self) -> Any:
        kind = getattr(peft, self.call.partition("(")[0])
        names = {each.name for each in fields(kind)}
        default = {"target_modules": ["q_proj", "down_proj"]} if "target_modules" in names else {}
        if kind is peft.AdaptionPromptConfig:  # which finds its own
            default = {}
        return kind(task_type="CAUSAL_LM", **default | self.settings)


def rows(title: str) -> list[Row]:
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "Config(" in line]
    assert all({alone, merged} <= {"yes", "no"} for _, _, alone, merged in cells)
    return [Row(call.strip("`"), kind, alone == "yes", merged == "yes") for call, kind, alone, merged in cells]


LORA, OTHERS = rows("LoRA"), rows("Other methods")
LOOP = "tests/trainer/test_adapters_out.py::test_a_loop_of_ones_own_leaves_what_it_trained"
USUAL = ("LoraConfig(r=2)", "ensure_weight_tying", "target_parameters", "pissa", "IA3", "PromptTuning", "AdaLora")
"""A kind of adapter each."""


def cases(usual: tuple[str, ...]) -> list[Any]:
    """Members of a test, those with one of the words in every run of it; what the installed peft lacks is skipped."""
    found = []
    for row in (*LORA, *OTHERS):
        kind = row.call.partition("(")[0]
        missing = pytest.mark.skipif(not hasattr(peft, kind), reason=f"peft {peft.__version__} has no {kind}")
        marks = [missing] if any(map(repr(row).count, usual)) else [missing, pytest.mark.full(LOOP)]
        found.append(pytest.param(row, id=f"{row.call}-{row.model}", marks=marks))
    return found


def tokens() -> Tensor:
    """Sequences that have the tokens which rows of the page name."""
    ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    ids[:, 1:5] = torch.tensor([2, 5, 1, 2])
    return ids


def base(folder: Path, kind: str) -> Path:
    """The folder of an untrained model."""
    torch.manual_seed(0)
    name = "mixtral" if kind == "mixture" else "llama"
    config = transformers.AutoConfig.for_model(name, **SIZES, **MODELS[kind])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    return folder / "base"


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    model.eval()
    found = model(tokens())
    found = found if isinstance(found, Tensor) else found.logits
    return found[:, -tokens().shape[1] :].clone()


def adapted(folder: Path, row: Row) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(loaded(folder / "base"), row.config())


def own_loop(rank: int, ranks: int, row: Row, folder: Path) -> dict[str, Any]:
    """Train in a loop, write what the row has, and return logits and what is refused."""
    built = adapted(folder, row)
    told: dict[str, Any] = {"before": logits(built)}
    if not (row.alone or row.merged):
        with pytest.raises(ValueError) as lost:  # noqa: PT011  # its text is looked at by the test
            dzero.shard(built, stage=3, precision="fp32")
        return told | {"refused": str(lost.value)}
    sharded = dzero.shard(built, stage=3, precision="fp32")
    optim = dzero.AdamW(sharded, lr=LR)
    for _ in range(STEPS):
        found = sharded.model(tokens()).logits[:, -tokens().shape[1] : -1]
        nn.functional.cross_entropy(found.flatten(0, 1), tokens()[:, 1:].flatten()).backward()
        optim.step()
        optim.zero_grad()
    for form, is_written in (("alone", row.alone), ("merged", row.merged)):
        if is_written:
            dzero.save_pretrained(sharded, folder / form, merge=form == "merged")
        else:
            with pytest.raises(ValueError) as refused:  # noqa: PT011
                dzero.save_pretrained(sharded, folder / form, merge=form == "merged")
            told["refused"] = str(refused.value)
    return told | {"after": logits(sharded.model)}


def by_trainer(rank: int, ranks: int, row: Row, folder: Path) -> dict[str, Any]:
    """Train by DzeroTrainer, whose checkpoint holds the adapter alone; refused before training if it cannot."""
    told: dict[str, Any] = {"before": logits(adapted(folder, row))}

    def trainer(save_strategy: str) -> Any:
        own = {"max_steps": STEPS, "save_steps": STEPS, "learning_rate": LR, "per_device_train_batch_size": 1}
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": save_strategy}
        args = transformers.TrainingArguments(output_dir=str(folder / "run"), **own, **quiet)
        data = [{"input_ids": ids, "labels": ids} for ids in tokens()]
        return DzeroTrainer(model=adapted(folder, row), args=args, train_dataset=data, dzero={"stage": 2})

    if not (row.alone or row.merged):
        with pytest.raises(ValueError) as lost:  # noqa: PT011
            trainer("steps").train()
        return told | {"refused": str(lost.value)}
    if not row.alone:
        with pytest.raises(ValueError, match=r"DzeroTrainer with save_strategy='steps'") as refused:
            trainer("steps")
        told["refused"] = str(refused.value)
    trained = trainer("steps" if row.alone else "no")
    trained.train()
    if row.alone and rank == 0:
        (folder / "run" / f"checkpoint-{STEPS}").rename(folder / "alone")
    if row.merged:
        dzero.save_pretrained(trained.sharded, folder / "merged", merge=True)
    return told | {"after": logits(trained.sharded.model)}


def compare(row: Row, folder: Path, told: list[dict[str, Any]], *, refused: bool) -> None:
    """Load the folders that a row has, and compare logits; every rank was told why it has no other."""
    for found in told:
        assert ("refused" in found) == refused
        assert "\n" not in found.get("refused", "")
    if row.alone or row.merged:
        want = told[0]["after"]
        assert (want - told[0]["before"]).abs().max() > 3e-5, "training changes logits"
    forms = {"alone": row.alone, "merged": row.merged}
    assert {each.name for each in folder.iterdir()} & forms.keys() == {form for form in forms if forms[form]}
    if row.alone:
        found = peft.PeftModel.from_pretrained(loaded(folder / "base"), folder / "alone")
        torch.testing.assert_close(logits(found), want, rtol=0, atol=1e-6)
    if row.merged:
        found, info = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged", output_loading_info=True)
        assert not any(info.values()), info
        torch.testing.assert_close(logits(found), want, rtol=0, atol=1e-6)
        assert (folder / "merged" / "generation_config.json").exists()


@pytest.mark.parametrize("row", cases(USUAL))
def test_a_loop_of_ones_own_leaves_what_it_trained(pool: Pool, tmp_path: Path, row: Row) -> None:
    base(tmp_path, row.model)
    told = pool.run(own_loop, 2, row, tmp_path)
    compare(row, tmp_path, told, refused=not (row.alone and row.merged))


@pytest.mark.parametrize("row", cases(("ensure_weight_tying", "PromptTuning")))
def test_a_trainer_leaves_what_it_trained(pool: Pool, tmp_path: Path, row: Row) -> None:
    base(tmp_path, row.model)
    compare(row, tmp_path, pool.run(by_trainer, 1, row, tmp_path), refused=not row.alone)


# Several adapters, of which one is trained at a time

ORDER = ("a", "b", "b", "a")


def two_adapters(*, unfrozen: bool, tied: bool = False) -> Any:
    """A PeftModel with the adapters a and b, of which a is active; `unfrozen`: both require gradients."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    settings = {
        name: peft.LoraConfig(r=2, target_modules=[layer, "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        for name, layer in (("a", "q_proj"), ("b", "o_proj"))
    }
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), settings["a"], adapter_name="a")
    model.add_adapter("b", settings["b"])
    if unfrozen:
        for name, param in model.named_parameters():
            param.requires_grad_(".lora_" in name)
    return model


def steps(model: Any, optim: torch.optim.Optimizer) -> list[float]:
    losses = []
    for name in ORDER:
        model.set_adapter(name)
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value).clone() for name, value in model.state_dict().items() if ".lora_" in name}


def turned(rank: int, ranks: int, stage: int, folder: Path) -> dict[str, Any]:
    """Train the adapters in turn, then save the one that is left."""
    sharded = dzero.shard(two_adapters(unfrozen=True), stage=stage, precision="fp32")
    losses = steps(sharded.model, dzero.AdamW(sharded, lr=1e-2))
    found = {"losses": losses, "adapters": adapters(sharded.model)}
    with pytest.raises(ValueError, match=r"the model has the adapters \['a', 'b'\]: only one is saved"):
        dzero.save_pretrained(sharded, folder / "both")
    sharded.model.delete_adapter("b")
    dzero.save_pretrained(sharded, folder / "a")
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_in_turn_have_the_numbers_of_plain_peft(pool: Pool, tmp_path: Path, stage: int) -> None:
    model = two_adapters(unfrozen=True)
    trained = [param for param in model.parameters() if param.requires_grad]
    losses = steps(model, torch.optim.AdamW(trained, lr=1e-2))
    want = adapters(model)
    for found in pool.run(turned, 2, stage, tmp_path):
        assert found["losses"] == pytest.approx(losses, rel=1e-6)
        assert found["adapters"].keys() == want.keys()
        for name, value in found["adapters"].items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-6)
    loaded = peft.PeftModel.from_pretrained(two_adapters(unfrozen=True).unload(), tmp_path / "a")
    state = {name: value for name, value in loaded.state_dict().items() if ".lora_" in name}
    assert len(state) == 2 * 2 * 2
    for name, value in state.items():
        torch.testing.assert_close(value, want[name.replace(".default.", ".a.")], rtol=0, atol=1e-6)


def switched(rank: int, ranks: int) -> str:
    """Switch to an adapter that was frozen when the model was sharded."""
    sharded = dzero.shard(two_adapters(unfrozen=False), stage=2, precision="fp32")
    optim = dzero.AdamW(sharded, lr=1e-2)
    with pytest.raises(RuntimeError) as told:
        steps(sharded.model, optim)
    return str(told.value)


def test_an_adapter_that_no_optimizer_has_is_refused_at_the_step(pool: Pool) -> None:
    for told in pool.run(switched, 2):
        assert "was frozen in shard() and requires gradients now, which no optimizer would use" in told
        assert "unfreeze all before shard(), then call set_adapter()" in told


def checkpointed(rank: int, ranks: int, folder: Path) -> dict[str, Tensor]:
    """Train one adapter and save a checkpoint; the adapter."""
    model = two_adapters(unfrozen=False, tied=True)
    model.delete_adapter("b")
    sharded = dzero.shard(model, stage=3, precision="fp32")
    optim = dzero.AdamW(sharded, lr=1e-2)
    sharded.model(tokens(), labels=tokens()).loss.backward()
    optim.step()
    with dzero.Checkpointer(dzero.CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
        checkpoints.save(1, {"model": dzero.describe(sharded.model)})
        checkpoints.finish()
    dzero.save_pretrained(sharded, folder / "merged by the loop", merge=True)
    return adapters(sharded.model)


def test_a_checkpoint_of_a_loop_is_exported_alone_and_merged(pool: Pool, tmp_path: Path) -> None:
    want = pool.run(checkpointed, 2, tmp_path / "checkpoints")[0]
    base = two_adapters(unfrozen=False, tied=True).unload()
    base.save_pretrained(tmp_path / "base")
    for name, options in {"adapter": (), "merged": ("--merge", "--base", str(tmp_path / "base"))}.items():
        made = command("export", tmp_path / "checkpoints", tmp_path / name, "--dtype", "fp32", *options)
        assert made.returncode == 0, made.stderr
    state = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").state_dict()
    assert all(torch.equal(state[name.replace(".a.", ".default.")], value) for name, value in want.items())
    folders = (tmp_path / "merged", tmp_path / "checkpoints" / "merged by the loop")
    one, two = (transformers.LlamaForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=0, msg=lambda told, name=name: f"{name}: {told}")

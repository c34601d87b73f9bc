"""The loss over tokens that count is that of `transformers.Trainer`, which divides by `num_items_in_batch`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool
from small_runs import CONF, write_text
from test_token_loss import SEQUENCES, STEPS, TOKENS, VOCAB, Masked, stepped
from torch import Tensor, nn

from dzero.data.batch import IGNORED
from dzero.overrides import composed
from dzero.trainer.trainer import Trainer

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

RULES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "sgd": (["optim.rule=SGD", "optim.lr=0.1"], {"optim": "sgd", "learning_rate": 0.1}),
    "adamw": (
        ["optim.rule=adamw", "optim.lr=1e-2", "optim.betas=[0.9,0.99]", "optim.eps=1e-4"],
        {"optim": "adamw_torch", "learning_rate": 1e-2, "adam_beta2": 0.99, "adam_epsilon": 1e-4},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of transformers."""
    found = tmp_path_factory.mktemp("published")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(found / "model")
    write_text(found / "words.txt")
    return found


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The masked sequences as transformers takes them: labels are shifted in its loss."""

    def __init__(self) -> None:
        batch = Masked().read(np.arange(SEQUENCES))
        self.ids = torch.cat([batch.tokens, batch.targets[:, -1:]], 1)
        self.labels = torch.cat([torch.full((SEQUENCES, 1), IGNORED), batch.targets], 1)

    def __len__(self) -> int:
        return SEQUENCES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


@cache
def oracle(folder: Path, rule: str, accumulate: int) -> dict[str, Any]:
    """Losses, gradient norms and parameters of `transformers.Trainer` after two steps over all sequences."""
    losses, norms = [0.0] * STEPS, list[float]()

    class Observed(transformers.Trainer):  # type: ignore[misc, name-defined]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(Rows())

        def training_step(self, *given: Any, **named: Any) -> Tensor:
            loss: Tensor = super().training_step(*given, **named)
            losses[self.state.global_step] += float(loss)
            return loss

    class Norms(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
            grads = [param.grad.double().flatten() for param in model.parameters() if param.grad is not None]
            norms.append(float(torch.cat(grads).norm()))

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / f"{rule}_{accumulate}"),
        per_device_train_batch_size=SEQUENCES // accumulate,
        gradient_accumulation_steps=accumulate,
        max_steps=STEPS,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        weight_decay=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **RULES[rule][1],
    )
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    Observed(model, arguments, train_dataset=Rows(), callbacks=[Norms()]).train()
    params = {f"model.{name}": param.detach().clone() for name, param in model.named_parameters()}
    return {"losses": losses, "norms": norms, "params": params}


def trained(rank: int, ranks: int, folder: Path, settings: list[str]) -> dict[str, Any]:
    """The same of dzero."""
    run = composed(
        [
            "model=hf",
            f"model.name_or_path={folder / 'model'}",
            "model.weights=true",
            f"data.path={folder / 'words.txt'}",
            "precision=fp32",
            "optim.max_norm=null",
            "optim.weight_decay=0",
            "schedule.kind=constant",
            "schedule.warmup_steps=0",
            f"train.sequence_tokens={TOKENS}",
            f"train.steps={STEPS}",
            "train.evaluate_batches=0",
            "monitor.plan=false",
            *settings,
        ],
        CONF,
    )
    return stepped(Trainer(run, folder, torch.device("cpu")))


@pytest.mark.product(keep=4)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_two_steps_are_those_of_the_trainer_of_transformers(
    pool: Pool, folder: Path, ranks: int, microbatches: int, rule: str
) -> None:
    split = [f"train.microbatch_sequences={SEQUENCES // (ranks * microbatches)}", f"train.accumulate={microbatches}"]
    found = pool.run(trained, ranks, folder, [*RULES[rule][0], *split, f"zero.stage={min(ranks, 3)}"])
    for accumulate in (1, 2, 4):
        want = oracle(folder, rule, accumulate)
        for each in found:
            assert each["losses"] == pytest.approx(want["losses"], rel=1e-6)
            assert each["norms"] == pytest.approx(want["norms"], rel=1e-6)
            assert each["params"].keys() == want["params"].keys()
            for name, param in each["params"].items():
                torch.testing.assert_close(param, want["params"][name], rtol=0, atol=1e-6)

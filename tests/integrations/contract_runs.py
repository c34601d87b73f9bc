"""What users do with a Trainer, done with the plain one and with `DzeroTrainer`.

    torchrun --nproc-per-node=2 contract_runs.py OUT '{"stage": 3}' [NAME ...]

Each habit returns what its user would look at; OUT/results.json has the answers of both sides, by name. On several
ranks plain Trainer is DDP, whose sums and samplers are those of ranks.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import small_models
import torch
import torch.distributed as dist
import transformers
from launched import as_script, is_first, wait_for_all, whole
from safetensors.torch import load_file
from torch import Tensor, nn
from trainer_runs import collate, samples

from dzero.integrations.transformers import DzeroMixin, DzeroTrainer

HABITS: dict[str, Callable[[Make], Any]] = {}
ARGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 3e-3,
    "max_steps": 4,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
}


class Make:
    """Trainers of one side, with small defaults.

    Args:
        settings: `dzero=` of DzeroTrainer; None for plain Trainer.
        within: the folder that theirs is made in.
    """

    def __init__(self, settings: dict[str, Any] | None, within: Path) -> None:
        self.settings = settings
        self.folder = Path(shared(lambda: tempfile.mkdtemp(dir=within)))

    def __call__(self, base: type[Any] = transformers.Trainer, arguments: Any = None, **given: Any) -> Any:
        kind = arguments or transformers.TrainingArguments
        args = kind(**{"output_dir": str(self.folder / "out"), **ARGS, **given.pop("args", {})})
        data = {"train_dataset": samples(48), "eval_dataset": samples(14), "data_collator": collate}
        if "model_init" not in given:
            data["model"] = small_models.llama()
        if self.settings is None:
            return base(args=args, **{**data, **given})
        over = DzeroTrainer if base is transformers.Trainer else type("Over", (DzeroMixin, base), {})
        return over(args=args, **{**data, **given}, dzero=self.settings)


def shared(make: Callable[[], Any]) -> Any:
    """What rank 0 makes."""
    made = [make() if is_first() else None]
    if dist.is_initialized():
        dist.broadcast_object_list(made, src=0)
    return made[0]


def habit(function: Callable[[Make], Any]) -> Callable[[Make], Any]:
    HABITS[function.__name__] = function
    return function


LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "epoch", "step", "num_input_tokens_seen")


def trained(trainer: Any, **given: Any) -> dict[str, Any]:
    """What a run logs, and sums of its weights."""
    trainer.train(**given)
    history = trainer.state.log_history
    logs = [{key: row[key] for key in LOGGED if key in row} | {"keys": sorted(row)} for row in history]
    params = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    return {"logs": logs, "weights": {name: whole(param).detach().double().sum().item() for name, param in params}}


def trained_and_saved(make: Make, model: nn.Module, rows: list[dict[str, Any]], **args: Any) -> list[Any]:
    """What a run logs and weighs, its loss of other rows, and sums of the weights that it saved."""
    given = {"train_dataset": rows, "eval_dataset": rows[:9], "data_collator": transformers.default_data_collator}
    trainer = make(model=model, args=args, **given)
    found = [trained(trainer), trainer.evaluate()["eval_loss"]]
    trainer.save_model()
    wait_for_all()  # for the first rank, as a script must that reads it on all
    saved = load_file(make.folder / "out" / "model.safetensors")
    return [*found, {"weights": {name: value.double().sum().item() for name, value in saved.items()}}]


def accuracy(predictions: Any) -> dict[str, float]:
    right = predictions.predictions.argmax(-1)[:, :-1] == predictions.label_ids[:, 1:]
    return {"accuracy": float(right[predictions.label_ids[:, 1:] != -100].mean())}


SCHEDULES = ("linear", "cosine", "constant_with_warmup", "polynomial", "inverse_sqrt")
GIVEN: dict[str, list[dict[str, Any]]] = {
    "smooths_labels": [{"label_smoothing_factor": 0.1}],
    "follows_a_plateau": [
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0},
            "eval_strategy": "steps",
            "eval_steps": 1,
        }
    ],
    "takes_every_schedule": [
        *({"lr_scheduler_type": kind, "warmup_steps": 1} for kind in SCHEDULES),
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}, "warmup_steps": 1},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 1}, "warmup_steps": 1},
    ],
    "takes_classes_of_torch": [
        {"optim": kind, "weight_decay": 0.1} for kind in ("sgd", "adagrad", "adamw_torch", "adamw_torch_fused")
    ],
    "groups_by_length_and_counts_tokens": [
        {"train_sampling_strategy": "group_by_length", "include_num_input_tokens_seen": True}
    ],
    "recomputes": [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    "keeps_the_embeddings_noise": [{"neftune_noise_alpha": 5.0}],
    "compiles": [{"torch_compile": True, "torch_compile_backend": "aot_eager"}],
}
"""Habits that only give arguments."""


def with_arguments(make: Make, given: list[dict[str, Any]]) -> Any:
    return [trained(make(args=args)) for args in given]


HABITS |= {name: partial(with_arguments, given=given) for name, given in GIVEN.items()}


@habit
def evaluates_first_and_again(make: Make) -> Any:
    trainer = make(compute_metrics=accuracy)
    if make.settings is not None or not dist.is_initialized():
        trainer.evaluate()  # after which accelerate 1.15 leaves out DDP, so that the gradients of ranks differ
    return [trained(trainer), trainer.evaluate()["eval_loss"]]


@habit
def predicts(make: Make) -> Any:
    found = make(compute_metrics=accuracy).predict(samples(10))
    return [found.predictions.shape, float(found.predictions.sum()), found.metrics["test_loss"]]


@habit
def accumulates_an_uneven_epoch(make: Make) -> Any:
    args = {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2}
    return trained(make(args=args, train_dataset=samples(40)))


@habit
def computes_a_loss_of_its_own(make: Make) -> Any:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        each = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return each / num_items_in_batch

    return trained(make(compute_loss_func=loss, args={"gradient_accumulation_steps": 2}))


@habit
def passes_an_optimizer(make: Make) -> Any:
    model = small_models.llama()
    head = [model.lm_head.weight]
    body = [param for name, param in model.named_parameters() if name != "lm_head.weight"]
    optim = torch.optim.AdamW([{"params": body}, {"params": head, "lr": 1e-3}], lr=1e-2, betas=(0.8, 0.9))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=[1e-2, 1e-3], total_steps=10)
    trainer = make(model=model, optimizers=(optim, schedule))
    return [trained(trainer), [group["lr"] for group in trainer.optimizer.param_groups]]


@habit
def overrides_create_optimizer(make: Make) -> Any:
    class Own(transformers.Trainer):
        def create_optimizer(self, *_: Any) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            return self.optimizer

    return trained(make(Own))


@habit
def passes_a_class(make: Make) -> Any:
    return trained(make(optimizer_cls_and_kwargs=(torch.optim.Adam, {"lr": 1e-3, "betas": (0.8, 0.95)})))


@habit
def makes_the_optimizer_before(make: Make) -> Any:
    trainer = make()
    trainer.create_optimizer_and_scheduler(num_training_steps=4)
    return trained(trainer)


@habit
def trains_twice(make: Make) -> Any:
    trainer = make()
    return [trained(trainer), trained(trainer)]


@habit
def makes_a_model_for_each_run(make: Make) -> Any:
    def fresh() -> Any:
        return small_models.llama()

    trainer = make(model_init=fresh)
    return [trained(trainer), trained(trainer)]


@habit
def reads_an_endless_stream(make: Make) -> Any:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            while True:
                # Of one length: the first rank reads batches for all of them.
                yield from ({key: value[-5:] for key, value in each.items()} for each in samples(12))

    return trained(make(train_dataset=Stream()))


@habit
def steers_by_callbacks(make: Make) -> Any:
    seen: list[str] = []

    class Callback(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append(f"before {state.global_step}")

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append(f"{state.global_step} {given['optimizer'].param_groups[0]['lr']:.6f}")
            control.should_training_stop = state.global_step == 3
            control.should_evaluate = state.global_step == 2

    return [trained(make(callbacks=[Callback])), seen]


@habit
def classifies(make: Make) -> Any:
    rows = [{"input_ids": each["input_ids"][:5], "labels": int(each["input_ids"][0]) % 3} for each in samples(24)]
    return trained_and_saved(make, small_models.bert(), rows, gradient_accumulation_steps=2)


@habit
def trains_experts(make: Make) -> Any:
    return trained(make(model=small_models.mixtral(), args={"gradient_accumulation_steps": 2}))


@habit
def looks_at_pictures(make: Make) -> Any:
    """A vision-language model, with four words for each picture."""
    rows = [
        {
            "input_ids": [1, *[small_models.IMAGE] * 4, *each["input_ids"][:5]],
            "labels": [-100] * 5 + [*each["input_ids"][:5]],
            "pixel_values": torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(number)),
        }
        for number, each in enumerate(samples(24))
    ]
    return trained_and_saved(make, small_models.llava(), rows)


class Line(nn.Module):
    """A regression that is no model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor([0.25]))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = x * self.a + self.b
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


@habit
def trains_a_module_of_ones_own(make: Make) -> Any:
    rows = [{"x": float(number % 7), "labels": 2.0 * (number % 7) + 1} for number in range(64)]
    return trained_and_saved(make, Line(), rows, gradient_accumulation_steps=2, learning_rate=0.1)


@habit
def generates(make: Make) -> Any:
    trainer = make()
    trainer.train()
    prompts = torch.arange(3, 9).view(2, 3)[dist.get_rank() % 2 if dist.is_initialized() else 0 :][:1]
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.generate(prompts, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()


@habit
def predicts_with_generate(make: Make) -> Any:
    args = {"predict_with_generate": True, "generation_max_length": 8}
    trainer = make(
        transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments, model=small_models.t5(), args=args
    )
    return [trained(trainer), trainer.predict(samples(6)).predictions.tolist()]


@habit
def saves_and_goes_on_from_the_last(make: Make) -> Any:
    args = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    run = trained(make(args=args))
    names = sorted(each.name for each in (make.folder / "out").iterdir())
    trainer = make(args={**args, "max_steps": 6})
    return [run, names, trained(trainer, resume_from_checkpoint=True)]


@habit
def goes_on_with_what_schedules_and_callbacks_wrote(make: Make) -> Any:
    """OneCycleLR cycles betas too; a callback writes weight decay; the run goes on with other arguments."""

    class Cycled(transformers.Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if self.lr_scheduler is None:
                self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=7)
            return self.lr_scheduler

    class Decays(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 2:
                for group in given["optimizer"].param_groups:
                    group["weight_decay"] = 0.3

    args = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "weight_decay": 0.1}
    run = trained(make(Cycled, args=args, callbacks=[Decays]))
    if is_first():
        shutil.rmtree(make.folder / "out" / "checkpoint-6")
    wait_for_all()
    args |= {"learning_rate": 1e-4, "weight_decay": 0.0, "adam_beta1": 0.5}
    trainer = make(Cycled, args=args, callbacks=[Decays])
    resumed = trained(trainer, resume_from_checkpoint=True)
    assert resumed["weights"] == run["weights"], "a resumed run is the run"
    kept = ("lr", "betas", "weight_decay", "initial_lr", "max_momentum")
    groups = trainer.optimizer.param_groups
    return [run, resumed, [[[*group[key]] if key == "betas" else group[key] for key in kept] for group in groups]]


@habit
def drops_out(make: Make) -> Any:
    settings = ({}, {"gradient_checkpointing": True, "gradient_accumulation_steps": 2})
    return [trained(make(model=small_models.llama(attention_dropout=0.2), args=args)) for args in settings]


@habit
def evaluates_between_microbatches(make: Make) -> Any:
    class Callback(transformers.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            trainer.evaluate()

    trainer = make(callbacks=[Callback()], args={"gradient_accumulation_steps": 2, "max_steps": 2})
    return trained(trainer)


@habit
def drops_columns_that_the_model_does_not_know(make: Make) -> Any:
    rows = [{key: value.tolist() for key, value in row.items()} for row in samples(8)]
    data = datasets.Dataset.from_list([{"ids": number, "note": "x", **rows[number % 8]} for number in range(32)])

    def padded(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        return collate([{key: torch.tensor(value) for key, value in row.items()} for row in batch])

    trainer = make(train_dataset=data, eval_dataset=data, data_collator=padded, args={"dataloader_num_workers": 1})
    return trained(trainer)


@habit
def tells_what_it_trained(make: Make) -> Any:
    def seen(predictions: Any) -> dict[str, float]:
        return {"seen": float(predictions.inputs.sum() + predictions.losses.sum())}

    trainer = make(args={"include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": 1}, compute_metrics=seen)
    trainer.train()
    trainer.save_state()
    rates = [trainer.get_learning_rates()[0], trainer.get_num_trainable_parameters(), trainer.state.total_flos]
    return [rates, trainer.evaluate()["eval_seen"]]


def main(folder: Path, words: list[str]) -> dict[str, Any]:
    settings, *names = words
    found: dict[str, Any] = {}
    for name in names or HABITS:
        found[name] = {}
        for side, given in (("plain", None), ("dzero", json.loads(settings))):
            print(f"{name}: {side}", flush=True)
            transformers.set_seed(1)
            found[name][side] = HABITS[name](Make(given, folder))
    return {"ranks": dist.get_world_size() if dist.is_initialized() else 1, "habits": found}


if __name__ == "__main__":
    as_script(main)

"""What trainer_versus_deepspeed.py compares, in the processes of a side: one user's script, by three trainers.

    side        trainer                                               states
    plain       transformers.Trainer, DDP; bf16 is autocast           whole on every rank
    dzero       DzeroTrainer(deepspeed=FILE)                          as the file says
    deepspeed   Trainer with TrainingArguments(deepspeed=FILE)        as the file says

The file asks for AdamW, which DeepSpeed and dzero put over all parameters in one group; so plain Trainer gets the same
group, where its own would leave norms without decay.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from children import process_group
from harness import WARM_STEPS
from torch import Tensor
from workload import library_bytes

SIDES = ("plain", "dzero", "deepspeed")
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, its data, and the configuration that dzero and DeepSpeed take.

    file: of DeepSpeed. chats: whether samples have very different lengths up to `tokens` and a prompt without loss;
    else all have `tokens`. max_norm: the gradient's, to which it is clipped.
    """

    file: str = ""
    bf16: bool = False
    hidden: int
    layers: int
    vocab: int
    tokens: int
    samples: int
    accumulate: int
    chats: bool
    evaluate: bool
    max_norm: float
    lr: float
    samples_held: int
    steps: int
    warm_up: int


def model_of(setting: Setting, *, tiny: bool = False) -> Any:
    """A Llama of transformers in fp32, with the same values in every process."""
    import transformers

    hidden = 64 if tiny else setting.hidden
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=2 if tiny else setting.layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        vocab_size=setting.vocab,
        max_position_embeddings=setting.tokens,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def samples_of(setting: Setting, count: int, seed: int) -> list[dict[str, Tensor]]:
    """Windows of the standard library's text; of chats the first part is a prompt."""
    draw, text, found = torch.Generator().manual_seed(seed), library_bytes().long(), []

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    for _ in range(count):
        tokens = number(8, setting.tokens + 1) if setting.chats else setting.tokens
        start = number(0, text.numel() - tokens)
        ids = text[start : start + tokens]
        labels = ids.clone()
        if setting.chats:
            labels[: number(1, tokens - 2)] = IGNORED
        found.append({"input_ids": ids, "labels": labels})
    return found


def collate(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest."""

    def padded(tensors: list[Tensor], value: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    ids = [each["input_ids"] for each in batch]
    return {
        "input_ids": padded(ids, 0),
        "labels": padded([each["labels"] for each in batch], IGNORED),
        "attention_mask": padded([torch.ones_like(each) for each in ids], 0),
    }


def trainer_of(side: str, setting: Setting, folder: str, *, tiny: bool = False, callbacks: Any = None) -> Any:
    """The trainer of a side; `tiny` stops after two steps of a tiny model."""
    import transformers

    model = model_of(setting, tiny=tiny)
    args = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=2 if tiny else setting.steps,
        per_device_train_batch_size=setting.samples,
        per_device_eval_batch_size=setting.samples,
        gradient_accumulation_steps=setting.accumulate,
        learning_rate=setting.lr,
        lr_scheduler_type="cosine",
        warmup_steps=setting.warm_up,
        weight_decay=0.1,
        max_grad_norm=setting.max_norm,
        bf16=setting.bf16,
        logging_steps=1,
        eval_strategy="steps" if setting.evaluate else "no",
        eval_steps=25,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
        seed=3,
        deepspeed=setting.file if side == "deepspeed" else None,
    )
    given: dict[str, Any] = {
        "model": model,
        "args": args,
        "train_dataset": samples_of(setting, setting.samples_held, seed=1),
        "eval_dataset": samples_of(setting, 32, seed=2),
        "data_collator": collate,
        "callbacks": callbacks,
    }
    if side == "dzero":
        from dzero.integrations.transformers import DzeroTrainer

        return DzeroTrainer(**given, deepspeed=setting.file)
    if side == "plain":
        betas = (args.adam_beta1, args.adam_beta2)
        options = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "weight_decay": 0.1}
        given["optimizers"] = (torch.optim.AdamW(model.parameters(), fused=True, **options), None)
    return transformers.Trainer(**given)


@contextmanager
def _member(pipe: Connection, side: str, folder: str, ranks: int, rank: int) -> Iterator[None]:
    """Join the side's group; an error goes to the parent."""
    torch.set_num_threads(1)
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        with process_group(rank, ranks, folder):
            if side == "deepspeed":
                import deepspeed  # type: ignore[import-untyped]

                deepspeed.init_distributed(dist_backend="gloo", verbose=False)
            yield
    except BaseException as error:
        pipe.send(RuntimeError(f"{side}, rank {rank}: {type(error).__name__}: {error}"))
        raise


def log(pipe: Connection, side: str, settings: Sequence[Setting], group: str, ranks: int, rank: int) -> None:
    """A child process: train to the end with each setting, and send what was logged."""
    with _member(pipe, side, group, ranks, rank):
        found = []
        for number, setting in enumerate(settings):
            trainer = trainer_of(side, setting, f"{group}_{number}")
            trainer.train()
            found.append(trainer.state.log_history)
        pipe.send(found)


def serve(pipe: Connection, side: str, setting: Setting, group: str, ranks: int, _: str, rank: int) -> None:
    """A child process of `harness.measure`: train as many steps as it asks for."""
    from dzero.hardware import rss_bytes

    with _member(pipe, side, group, ranks, rank):
        trainer_of(side, setting, f"{group}_tiny", tiny=True).train()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        turns = turns_of(pipe, rss_bytes())
        turns.trainer = trainer_of(side, setting, f"{group}_out", callbacks=[turns])
        turns.trainer.train()


def turns_of(pipe: Connection, baseline: int) -> Any:
    """A callback that waits between the steps for what the parent asks."""
    import transformers

    from dzero.hardware import peak_rss_bytes, reset_peak_rss, rss_bytes

    class Turns(transformers.TrainerCallback):  # type: ignore[misc]
        """Its events are the logs of steps. `left`: steps until it tells."""

        trainer: Any

        def __init__(self) -> None:
            self.left, self.began, self.losses = WARM_STEPS, (0.0, 0.0), []
            self.built = 0

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" not in logs:
                return
            self.losses.append(logs["loss"])
            self.left -= 1
            if self.left:
                return
            if hasattr(self.trainer.optimizer, "synchronize"):  # an update of dzero that still runs
                self.trainer.optimizer.synchronize()
            self._tell()
            count = pipe.recv()
            if count is None:
                memory = {"peak_bytes": peak_rss_bytes(), "rest_bytes": rss_bytes(), "build_bytes": self.built}
                pipe.send({key: value - baseline for key, value in memory.items()})
                control.should_training_stop = True
                return
            self.left, self.losses = count, []
            dist.barrier()
            self.began = time.perf_counter(), time.process_time()

        def _tell(self) -> None:
            if self.built:
                began_s, cpu_s = self.began
                pipe.send((time.perf_counter() - began_s, time.process_time() - cpu_s, self.losses))
                return
            self.built = peak_rss_bytes()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            if not reset_peak_rss():
                raise RuntimeError("this kernel cannot restart the high-water mark (/proc/self/clear_refs)")
            pipe.send(self.losses)

    return Turns()

"""`transformers.Trainer` over a model that dzero shards.

    trainer = DzeroTrainer(model=model, args=args, train_dataset=data, dzero={"stage": 3, "offload": "host"})
    trainer.train()

    what Trainer does              here
    wraps the model                `dzero.shard`, in place, where training or evaluation first needs the model
    creates an optimizer           `dzero.AdamW`, or `dzero.TorchOptimizer` around another class (trainer_optimizer.py)
    accumulates                    `Sharded.microbatch` around each training step
    clips and logs the norm        the optimizer clips by the true norm of all ranks in its step, and tells it after it;
                                   if a callback looks at gradients before the step, they are clipped there
    bf16=True, fp16=True           dtypes of the layout: 16-bit parameters with fp32 masters, instead of autocast
    torch_compile=True             each block is compiled, inside of the hooks that gather it
    saves a checkpoint             `dzero.Checkpointer` in the checkpoint's folder, beside what `from_pretrained` loads

Everything else is Trainer's own: data, schedules, callbacks, evaluation, logs and the files of its state.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from dzero.checkpoint.checkpointer import Checkpointer
from dzero.checkpoint.config import CheckpointConfig
from dzero.checkpoint.save_pretrained import save_pretrained
from dzero.checkpoint.weights import weights
from dzero.errors import import_optional
from dzero.integrations.deepspeed.trainer import TrainerConfig
from dzero.integrations.trainer_checkpoints import checkpoint_to_resume
from dzero.integrations.trainer_optimizer import OptimizerRecipe, Skips
from dzero.integrations.trainer_refusals import refuse
from dzero.mesh import join_alone, make_mesh
from dzero.models.published import why_unpublished
from dzero.optim.base import MasterOptimizer
from dzero.optim.total_norm import clip_grad_norm_
from dzero.parallel.blocks import find_blocks
from dzero.parallel.forward_wrapping import wrap_method
from dzero.utils.torch_internals import TIMEOUTS, set_timeout
from dzero.zero.shard import shard
from dzero.zero.sharded import Sharded

transformers: Any = import_optional("transformers", "DzeroTrainer", "hf")
accelerate: Any = import_optional("accelerate", "DzeroTrainer", "hf")

ARGUMENTS = ("stage", "precision", "offload", "replicate")
"""What `dzero=` may hold. Every rank reads batches of its own, so no axis may cut the model itself."""
SEAMS = (
    *("_build_accelerator_args", "_move_model_to_device", "_prepare_for_training", "_clip_grad_norm", "_get_grad_norm"),
    *("_save", "_save_optimizer_and_scheduler", "_load_from_checkpoint", "_load_best_model"),
)
"""Methods of Trainer, private to it, that are overridden here: without one, a run would not be sharded or saved."""
STATES = "dzero"
"""Folder of model and optimizer states in a checkpoint of Trainer."""


class DzeroMixin:
    """Part of a trainer that shards by dzero; put it before `Trainer` or a subclass, such as TRL's `SFTTrainer`.

    Args:
        args, kwargs: Those of the trainer.
        dzero: Arguments of `dzero.shard`: stage, precision, offload; and `replicate`, the number of groups of ranks
            that each hold all shards (HSDP).
        deepspeed: In place of `dzero`, a DeepSpeed configuration: its JSON file, or its content as a mapping.

    Raises:
        RuntimeError: A version of transformers whose Trainer has other methods.
        TypeError: `dzero` has another argument, or `deepspeed` is given beside it.
        ValueError: An argument of Trainer asks for another way of sharding.
    """

    def __init__(
        self,
        *args: Any,
        dzero: Mapping[str, Any] | None = None,
        deepspeed: str | Path | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if dzero is not None and deepspeed is not None:
            raise TypeError("dzero= and deepspeed=: both say how to shard; give one")
        if missing := [name for name in SEAMS if not hasattr(transformers.Trainer, name)]:
            raise RuntimeError(
                f"DzeroTrainer overrides {missing} of Trainer, which transformers {transformers.__version__} does not "
                "have: install transformers>=5.3"
            )
        if not isinstance(dzero, Mapping | None):
            raise TypeError(f"dzero={dzero!r}: pass a dict, such as {{'stage': 3}}, of {[*ARGUMENTS]}")
        self._shard_settings = dict(dzero or {})
        if unknown := self._shard_settings.keys() - {*ARGUMENTS}:
            raise TypeError(f"dzero={{{min(unknown)!r}: ...}}: it takes {[*ARGUMENTS]}")
        self.sharded: Sharded | None = None
        self._norm = torch.zeros(())
        self._clipped_norm: float | None = None
        super().__init__(*args, **kwargs)
        trainer: Any = self
        refuse(trainer)
        self._refuse_unsaved()
        self._deepspeed = None if deepspeed is None else TrainerConfig(deepspeed, trainer.args)
        if self._deepspeed is not None:
            self._shard_settings = self._deepspeed.settings
            if trainer.optimizer is not None:
                raise ValueError("deepspeed= and optimizers=: give the optimizer in the file or in TrainingArguments")
        trainer.place_model_on_device = False
        trainer.accelerator.backward = self._backward

    def _refuse_unsaved(self) -> None:
        """Raise ValueError before training for a model that the first checkpoint could not hold."""
        trainer: Any = self
        model: nn.Module = trainer.model
        if trainer.args.save_strategy == "no" or not isinstance(model, _published()):
            return
        if reason := why_unpublished(model, merge=False):
            raise ValueError(
                f"DzeroTrainer with save_strategy={trainer.args.save_strategy.value!r}: {reason}. With "
                "save_strategy='no', dzero.save_pretrained and dzero.Checkpointer save trainer.sharded after training"
            )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Leave 16-bit dtypes and compilation to the layout."""
        trainer: Any = super()
        plain = {"mixed_precision": "no", "dynamo_plugin": accelerate.utils.TorchDynamoPlugin(backend="no")}
        return {**trainer._build_accelerator_args(**kwargs), **plain}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is; its shards are made on the device."""

    # Model and optimizer.

    def _shard(self) -> Sharded:
        """Shard the model, once; and again the new one that `model_init` made for another `train`."""
        trainer: Any = self
        if self.sharded is not None and self.sharded.model is trainer.model:
            return self.sharded
        settings = {"stage": 2, "precision": self._precision(), **self._shard_settings}
        replicas = settings.pop("replicate", None)
        join_alone()  # a script that was started without torchrun
        # transformers 5.24 gives the process group `ddp_timeout` on GPUs, and torch's 30 minutes on CPUs.
        world = dist.group.WORLD
        if TIMEOUTS.is_there and world is not None:
            set_timeout(trainer.args.ddp_timeout_delta, world)
        if replicas is not None:
            settings["mesh"] = make_mesh(trainer.args.device.type, replicate=replicas)
        if trainer.args.torch_compile:
            self._compile_blocks()
        given = trainer.optimizer
        recipe = None if given is None else OptimizerRecipe.of(given, trainer.model)
        self.sharded = shard(trainer.model, microbatches=trainer.args.gradient_accumulation_steps, **settings)
        if recipe is not None:
            self._make_optimizer(recipe)
        return self.sharded

    def _precision(self) -> str:
        """Return the name of the dtypes that Trainer's arguments and the model's own dtype ask for."""
        trainer: Any = self
        if (asked := trainer.args.mixed_precision) != "no":  # of the arguments, or of `accelerate launch`
            return str(asked)
        dtype = next(param.dtype for param in trainer.model.parameters() if param.is_floating_point())
        return "bf16" if dtype == torch.bfloat16 else "fp32"

    def _compile_blocks(self) -> None:
        trainer: Any = self
        blocks = [block for _, block in find_blocks(trainer.model)]
        if not blocks:
            raise ValueError(
                f"DzeroTrainer with torch_compile: {type(trainer.model).__name__} has no blocks, which are elements of "
                "an nn.ModuleList or nn.Sequential; leave it away"
            )
        backend, mode = trainer.args.torch_compile_backend, trainer.args.torch_compile_mode
        wrap_method(blocks, "forward", partial(torch.compile, backend=backend, mode=mode))

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer that `args.optim`, or a subclass of Trainer, makes, over the shards."""
        trainer: Any = self
        self._shard()
        given = trainer.optimizer
        if given is None:
            super().create_optimizer(model)  # type: ignore[misc]  # of Trainer, behind this class
            if self._deepspeed is not None:
                self._make_optimizer(self._deepspeed.optimizer(OptimizerRecipe.of(trainer.optimizer, trainer.model)))
        self._put_optimizer_over_shards()
        return trainer.optimizer

    def _put_optimizer_over_shards(self) -> None:
        trainer: Any = self
        if not isinstance(trainer.optimizer, MasterOptimizer):
            self._make_optimizer(OptimizerRecipe.of(trainer.optimizer, trainer.model))

    def _make_optimizer(self, recipe: OptimizerRecipe) -> None:
        """Create the optimizer over shards, in place of one of torch, which a schedule may be of."""
        trainer: Any = self
        given, trainer.optimizer = trainer.optimizer, recipe.make(self._shard())
        trainer.optimizer.register_step_post_hook(self._tell_norm)
        if trainer.lr_scheduler is not None:
            if trainer.lr_scheduler.optimizer is not given:
                raise ValueError("optimizers=: the schedule is of another optimizer than the one beside it")
            trainer.lr_scheduler.optimizer = trainer.optimizer

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *more: Any, **given: Any
    ) -> Any:
        """Train, as Trainer does, but save over no checkpoint that is there already."""
        trainer: Any = self
        if trial is None:
            output, saves = Path(trainer.args.output_dir), trainer.args.save_strategy != "no"
            resume_from_checkpoint = checkpoint_to_resume(output, resume_from_checkpoint, saves=saves)
        own: Any = super()
        return own.train(resume_from_checkpoint, trial, *more, **given)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule of a DeepSpeed configuration if it has one, else the one of Trainer's arguments."""
        trainer: Any = self
        if self._deepspeed is not None and trainer.lr_scheduler is None:
            trainer.lr_scheduler = self._deepspeed.scheduler(trainer.optimizer, num_training_steps, trainer.args)
            trainer._created_lr_scheduler = trainer.lr_scheduler is not None
        own: Any = super()
        return own.create_scheduler(num_training_steps, optimizer)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Shard the model, create optimizer and schedule, and load a checkpoint."""
        trainer: Any = self
        if trainer._created_lr_scheduler:
            trainer.lr_scheduler, trainer._created_lr_scheduler = None, False
        self._shard().reshard()
        trainer.accelerator.prepare_model(trainer.model)  # which tells `evaluate` that there is nothing to prepare
        trainer.create_optimizer()
        self._put_optimizer_over_shards()
        trainer.accelerator._optimizers = [Skips(trainer.optimizer)]
        trainer.create_scheduler(num_training_steps=max_steps)
        trainer.model_wrapped = trainer.model
        if resume_from_checkpoint is not None:
            trainer.lr_scheduler.load_state_dict(self._load_states(resume_from_checkpoint)["schedule"])
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(trainer.callback_handler, name, getattr(trainer, name))
        trainer.callback_handler.train_dataloader = train_dataloader
        return trainer.model, train_dataloader

    # Steps.

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of one microbatch."""
        trainer: Any = super()
        own: Any = self
        with self._shard().microbatch(is_last=own.accelerator.sync_gradients):
            loss: Tensor = trainer.training_step(model, inputs, num_items_in_batch)
        return loss

    def _backward(self, loss: Tensor, **_: Any) -> None:
        trainer: Any = self
        trainer.optimizer.scale_loss(loss).backward()

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip in the optimizer's step; return a tensor that the step sets to the norm.

        For callbacks that look at gradients before the step, and expect them to be clipped, clip at once. Gradients in
        fp16 are clipped in the step in any case, as they are scaled until then.
        """
        trainer: Any = self
        trainer.optimizer.max_norm = trainer.args.max_grad_norm
        silent = transformers.TrainerCallback.on_pre_optimizer_step
        looked_at = any(type(each).on_pre_optimizer_step is not silent for each in trainer.callback_handler.callbacks)
        if trainer.args.fp16 or not looked_at:
            return self._norm
        norm = clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.max_norm = None
        self._clipped_norm = float(norm)
        return self._norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        """Return the tensor that the optimizer's step sets to the norm; without `grad_norm`, nothing is clipped."""
        trainer: Any = self
        if grad_norm is None:
            trainer.optimizer.max_norm = None
        return self._norm

    def _tell_norm(self, optim: MasterOptimizer, *_: Any) -> None:
        if optim.last_decision is not None:
            self._norm.fill_(optim.last_decision.norm if self._clipped_norm is None else self._clipped_norm)
        self._clipped_norm = None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the sharded model."""
        trainer: Any = super()
        self._shard()
        found = trainer.evaluation_loop(*args, **kwargs)
        self._shard().reshard()
        return found

    # Files.

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model, whole, for `from_pretrained`. All ranks call this."""
        trainer: Any = self
        target, sharded = Path(output_dir or trainer.args.output_dir), self._shard()
        if trainer.args.should_save:
            target.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        # A name that all ranks know, in the folder itself, so that files move into place one by one.
        made = [tempfile.mkdtemp(dir=target) if trainer.args.should_save else None]
        dist.broadcast_object_list(made, src=0)
        folder = Path(str(made[0])) / "model"
        try:
            if isinstance(trainer.model, _published()):
                save_pretrained(sharded, folder)
            else:
                self._save_whole(folder)
            if trainer.args.should_save:
                for each in folder.iterdir():
                    os.replace(each, target / each.name)
        finally:
            if trainer.args.should_save:
                shutil.rmtree(folder.parent)
        if trainer.args.should_save:
            processing = trainer.processing_class
            if processing is None:
                processing = getattr(trainer.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(target)
            torch.save(trainer.args, target / "training_args.bin")

    def _save_whole(self, folder: Path) -> None:
        """Write the state dict of a model that is not of transformers, whole on the first rank's host."""
        trainer: Any = self
        state = {}
        for name, tensor in weights(self._shard()):
            if trainer.args.should_save:
                state[name] = tensor.cpu()
        if trainer.args.should_save:
            folder.mkdir()
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, whole, for `from_pretrained`. All ranks call this."""
        trainer: Any = self
        self._save(output_dir)
        if trainer.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write model and optimizer states by shard, and the schedule."""
        trainer: Any = self
        folder = Path(output_dir) / STATES
        with Checkpointer(CheckpointConfig(folder=str(folder)), self._shard(), trainer.optimizer) as checkpoints:
            checkpoints.save(trainer.state.global_step, {"schedule": trainer.lr_scheduler.state_dict()})

    def _load_states(self, checkpoint: str) -> dict[str, Any]:
        """Load model and optimizer states, and return what was saved beside them."""
        trainer: Any = self
        folder = Path(checkpoint) / STATES
        if not folder.is_dir():
            raise ValueError(
                f"{checkpoint}: no states of dzero ({STATES}/) are there, as after save_only_model=True; to begin with "
                "its weights and a new optimizer, load the model from that folder by from_pretrained"
            )
        with Checkpointer(CheckpointConfig(folder=str(folder)), self._shard(), trainer.optimizer) as checkpoints:
            resumed = checkpoints.resume("auto", strict=True)
        assert resumed is not None
        return resumed.extra

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Wait for `_prepare_for_training`, which loads weights with the optimizer's states."""

    def _load_best_model(self) -> None:
        """Load the states of the best checkpoint."""
        trainer: Any = self
        self._load_states(trainer.state.best_model_checkpoint)


def _published() -> tuple[type, ...]:
    """Return the classes of models that have a layout of their own on disk: those of transformers and of peft."""
    peft = sys.modules.get("peft")
    return (transformers.PreTrainedModel, *([peft.PeftModel] if peft else []))


class DzeroTrainer(DzeroMixin, transformers.Trainer):  # type: ignore[misc]  # an optional package, typed as Any
    """`transformers.Trainer` over a model that dzero shards; see `DzeroMixin`."""

"""What Trainer's arguments may not ask for together with `dzero=`."""

from __future__ import annotations

from typing import Any


def refuse(trainer: Any) -> None:
    """Raise ValueError for arguments that shard in another way, need the whole model, or would hang."""
    args = trainer.args
    of_accelerate = args.parallelism_config is not None
    by_transformers = getattr(trainer, "is_distributed_loading_by_transformers", False)  # from transformers 5.20 on
    placed = trainer.is_model_parallel or by_transformers
    full_eval = args.bf16_full_eval or args.fp16_full_eval
    unsaved_best = args.save_only_model and args.load_best_model_at_end
    for given, told in (
        (trainer.is_fsdp_enabled, "fsdp: the model would be sharded twice; leave it away"),
        (
            trainer.is_deepspeed_enabled,
            "deepspeed of TrainingArguments: DeepSpeed itself would run; give the file to DzeroTrainer(deepspeed=)",
        ),
        (args.n_gpu > 1, "several GPUs in one process: start one process per GPU, with torchrun"),
        (of_accelerate, "parallelism_config: each rank reads batches of its own; leave it away"),
        (placed, "a model that is on several devices: load it without device_map and distributed_config"),
        (args.auto_find_batch_size, "auto_find_batch_size: the layout depends on the batch; choose one"),
        (
            args.save_on_each_node,
            "save_on_each_node: all ranks write into one folder, which all nodes see; leave it away",
        ),
        (full_eval, "full_eval: dtypes are those of dzero=; take its precision"),
        (
            args.enable_jit_checkpoint and args.world_size > 1,
            "enable_jit_checkpoint: ranks may be told to stop at different steps, and save together; take save_steps",
        ),
        (
            getattr(args, "sync_ref_model", False),
            "sync_ref_model of TRL: it mixes the shards of each rank into a whole reference; leave it away",
        ),
        (
            unsaved_best,
            "save_only_model and load_best_model_at_end: the best model is loaded from its states; save these too",
        ),
    ):
        if given:
            raise ValueError(f"DzeroTrainer with {told}")

"""Names and learning rates of the installed DeepSpeed, which tests of its translation compare with.

    DS_ACCELERATOR=cpu python benchmarks/deepspeed_keys.py keys > tests/integrations/deepspeed_keys.json
    DS_ACCELERATOR=cpu python benchmarks/deepspeed_keys.py rates > tests/integrations/deepspeed_rates.json

Keys are the fields of DeepSpeed's pydantic models, and of other sections the constants of its source.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any, get_args

with redirect_stdout(sys.stderr):
    import deepspeed
    import pydantic
    import torch
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime import constants, lr_schedules
    from deepspeed.runtime.activation_checkpointing import config as checkpointing
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS, HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

MODELS = {
    "": DeepSpeedMonitorConfig,
    "bf16.": DeepSpeedBF16Config,
    "comms_logger.": CommsLoggerConfig,
    "compile.": CompileConfig,
    "fp16.": DeepSpeedFP16Config,
    "hybrid_engine.": HybridEngineConfig,
    "tensor_parallel.": TPTrainingConfig,
    "weight_quantization.": WeightQuantConfig,
    "zero_optimization.": DeepSpeedZeroConfig,
}
TOP = """TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU GRADIENT_ACCUMULATION_STEPS MANAGED_GRADIENT_ACCUMULATION
OPTIMIZER SCHEDULER ZERO_ALLOW_UNTESTED_OPTIMIZER ZERO_FORCE_DS_CPU_OPTIMIZER STEPS_PER_PRINT BFLOAT16
FP16 TORCH_AUTOCAST GRADIENT_CLIPPING COMMUNICATION_DATA_TYPE SEQ_PARALLEL_COMMUNICATION_DATA_TYPE PRESCALE_GRADIENTS
GRADIENT_PREDIVIDE_FACTOR GRADIENT_ALLREDUCE_OP DISABLE_ALLGATHER DUMP_STATE DISABLE_PYTHON_GC VOCABULARY_SIZE
WALL_CLOCK_BREAKDOWN MEMORY_BREAKDOWN CHECKPOINT DATA_TYPES DATALOADER_DROP_LAST USE_DATA_BEFORE_EXPERT_PARALLEL
LOG_LEVEL"""
INNER = {
    "data_types.": "GRAD_ACCUM_DTYPE PARAM_DTYPE BUFFER_DTYPE KEEP_IN_FP32_MODULES",
    "checkpoint.": "CHECKPOINT_TAG_VALIDATION LOAD_UNIVERSAL_CHECKPOINT USE_NODE_LOCAL_STORAGE_CHECKPOINT "
    "CHECKPOINT_PARALLEL_WRITE",
    "torch_autocast.": "TORCH_AUTOCAST_ENABLED TORCH_AUTOCAST_DTYPE TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES",
    "optimizer.": "TYPE OPTIMIZER_PARAMS LEGACY_FUSION",
    "scheduler.": "TYPE SCHEDULER_PARAMS",
}
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
WORKS: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 5}),
    ("WarmupLR", {"warmup_min_lr": 1e-5, "warmup_max_lr": 3e-4, "warmup_num_steps": 1, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_min_lr": 1e-5, "warmup_max_lr": 3e-4, "warmup_num_steps": 7, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_max_lr": 0, "warmup_min_lr": 1e-4, "warmup_num_steps": 4}),
    ("WarmupDecayLR", {"total_num_steps": 15, "warmup_num_steps": 4}),
    ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 2e-5}),
    ("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 8}),
    ("WarmupCosineLR", {"total_num_steps": 14, "warmup_num_steps": 4, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05}),
    ("WarmupCosineLR", {"total_num_steps": 14, "warmup_num_steps": 4, "warmup_type": "linear"}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-3,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 6,
            "decay_step_size": 3,
            "decay_lr_rate": 0.5,
            "cycle_momentum": False,
        },
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-3,
            "cycle_first_step_size": 6,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 2,
            "cycle_momentum": False,
        },
    ),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 4, "lr_range_test_staircase": True}),
    ("LRRangeTest", {}),
]
UPDATES, LR = 20, 2e-3


def fields(model: Any, section: str) -> Iterator[str]:
    """Yield names and aliases of a model's fields, and of the models in them."""
    for name, field in model.model_fields.items():
        for each in {name, field.alias or name}:
            yield f"{section}{each}"
            for kind in (field.annotation, *get_args(field.annotation)):
                if inspect.isclass(kind) and issubclass(kind, pydantic.BaseModel):
                    yield from fields(kind, f"{section}{each}.")


def keys() -> list[str]:
    found = {key for section, model in MODELS.items() for key in fields(model, section)}
    found |= {getattr(constants, name) for name in TOP.split()}
    found |= {f"{section}{getattr(constants, name)}" for section, names in INNER.items() for name in names.split()}
    found |= {checkpointing.ACT_CHKPT, *_REMOVED_TOP_LEVEL_CONFIG_KEYS}
    found |= {f"zero_optimization.{key}" for key in _REMOVED_ZERO_CONFIG_KEYS}
    for name in SCHEDULES:
        taken = inspect.signature(getattr(lr_schedules, name)).parameters
        found |= {f"scheduler.params.{each}" for each in taken if each != "optimizer"}
    more = "aio autotuning data_efficiency flops_profiler pipeline sequence_parallel_size datastates_ckpt timers"
    return sorted({*found, *more.split(), "expert_parallel"})


def rates() -> list[dict[str, Any]]:
    """Return the rate of each update, of optimizers that step before their schedule does."""
    found = []
    for kind, params in WORKS:
        optim = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
        schedule, each = getattr(lr_schedules, kind)(optim, **params), []
        for _ in range(UPDATES):
            each.append(optim.param_groups[0]["lr"])
            schedule.step()
        found.append({"kind": kind, "params": params, "lr": LR, "rates": each})
    return found


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        what = keys() if sys.argv[1] == "keys" else rates()
    print(json.dumps({"deepspeed": deepspeed.__version__, sys.argv[1]: what}, indent=1))

"""Table of DeepSpeed's configuration keys: how each is taken, why it is needless, or what to do in its place.

    taken      dzero does what the key asks for; the text says by which setting
    needless   nothing is lost without it; the text says why
    refused    dzero cannot do it; the text says what to do. Values that ask for nothing are needless

The names are those of DeepSpeed's documentation and of its source, version 0.19.8, with keys of older versions that are
still met. The command, `DzeroTrainer` and the documentation's page of keys read this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dzero.config import MOST_SEQUENCES
from dzero.integrations.deepspeed.forms import (
    ANY,
    BETAS,
    COUNT,
    DTYPE,
    FLAG,
    NAMES,
    OFF,
    PATH,
    POSITIVE,
    RATE,
    SECTION,
    SIGNED,
    TEXT,
    Form,
    is_switched_on,
    numbers,
    one_of,
)
from dzero.optim.config import MOST_NORM
from dzero.utils.ranges import MOST_COUNT, MOST_RANKS, Range, number, whole

TAKEN, NEEDLESS, REFUSED = "taken", "needless", "refused"


@dataclass(frozen=True)
class Key:
    """Rule for one key.

    Attributes:
        verdict: `taken`, `needless` or `refused`.
        form: Values that it takes.
        text: As what it is taken, why it is needless, or what to do in its place.
        asks_nothing: Of refused keys: whether a value leaves off what dzero cannot do.
        auto: The value of TrainingArguments that transformers fills in for "auto".
    """

    verdict: str
    form: Form
    text: str
    asks_nothing: Callable[[Any], bool] = lambda _: False
    auto: str | None = None


def taken(form: Form, text: str, auto: str | None = None) -> Key:
    """Return a key that dzero obeys."""
    return Key(TAKEN, form, text, auto=auto)


def needless(form: Form, text: str) -> Key:
    """Return a key without which nothing is lost."""
    return Key(NEEDLESS, form, text)


def refused(form: Form, text: str, *nothing: Any) -> Key:
    """Return a key that dzero cannot obey, but for the values that ask for `nothing`."""
    return Key(REFUSED, form, text, lambda value: any(type(value) is type(each) and value == each for each in nothing))


def refused_section(text: str) -> Key:
    """Return a section that dzero cannot obey if anything in it is enabled."""
    return Key(REFUSED, SECTION, text, lambda value: not is_switched_on(value))


def below(section: str, **groups: tuple[str, Key]) -> dict[str, Key]:
    """Return rows for keys of a section: each group is a list of names, and what becomes of all of them."""
    return {f"{section}.{name}": key for names, key in groups.values() for name in names.split()}


SEQUENCES = numbers(whole(1, MOST_SEQUENCES))
STEPS, COUNTED = numbers(whole(1, MOST_COUNT)), numbers(whole(0, MOST_COUNT))
LOGGED = needless(ANY, "changes what DeepSpeed prints, not what it trains")
TRACE = needless(ANY, "a log of DeepSpeed; take report_to= of TrainingArguments, or TensorBoard of dzero train")
UNITS = needless(
    ANY, "dzero gathers and reduces a unit (a block) at a time, so no bucket is tuned; zero.unit_bytes bounds a unit"
)
DISK = needless(ANY, "dzero's transfers have settings of their own (offload.disk); dzero disk-bench finds them")
CPU = needless(ANY, "host memory is page-locked beside a GPU, and pooled by dzero's own schedule")
SAVED = needless(ANY, "dzero.Checkpointer writes and reads states by shard, on any number of ranks")
CALLED = needless(
    ANY,
    "speaks to models that call deepspeed.checkpointing; take gradient_checkpointing=True of TrainingArguments, or "
    "block.activation_checkpoint=full (with offload.activations=host for cpu_checkpointing)",
)

BATCH = {
    "train_batch_size": taken(
        SEQUENCES, "train.global_sequences; of Trainer, the product", "train_batch_size (calculated)"
    ),
    "train_micro_batch_size_per_gpu": taken(
        SEQUENCES, "per_device_train_batch_size, train.microbatch_sequences", "per_device_train_batch_size"
    ),
    "gradient_accumulation_steps": taken(
        SEQUENCES,
        "gradient_accumulation_steps, microbatches of dzero.shard, train.accumulate",
        "gradient_accumulation_steps",
    ),
    "gradient_clipping": taken(
        numbers(number(MOST_NORM)),
        "max_grad_norm, max_norm of the optimizer, optim.max_norm (0: none)",
        "max_grad_norm",
    ),
    "managed_gradient_accumulation": needless(FLAG, "a loop says itself which microbatch is last: Sharded.microbatch"),
    "prescale_gradients": needless(FLAG, "changes when a sum is divided; dzero's exact sums are divided once, in fp32"),
    "gradient_predivide_factor": needless(SIGNED, "changes when a sum is divided, not its mean"),
    "gradient_allreduce_op": refused(one_of("mean", "sum"), "mean: multiply the loss by the number of ranks", "mean"),
    "communication_data_type": taken(DTYPE, "precision.reduce"),
    "seq_parallel_communication_data_type": needless(DTYPE, "only read with sequence parallelism"),
    "sparse_gradients": needless(FLAG, "gradients of embeddings are reduced dense, with the same sums"),
    "disable_allgather": needless(FLAG, "dzero gathers what it needs"),
    "fp32_allreduce": refused(FLAG, 'communication_data_type: "fp32"', False),
}
OPTIMIZER = {
    "optimizer.type": taken(TEXT, "dzero.AdamW, or a class of torch.optim in dzero.TorchOptimizer; optim.rule"),
    "optimizer.legacy_fusion": needless(FLAG, "chooses among kernels of the same update"),
    **below(
        "optimizer.params",
        lr=("lr", taken(RATE, "learning_rate, lr, optim.lr", "learning_rate")),
        betas=("betas", taken(BETAS, "adam_beta1 and adam_beta2, betas, optim.betas", "betas")),
        eps=("eps", taken(numbers(number(1.0)), "adam_epsilon, eps, optim.eps", "adam_epsilon")),
        decay=(
            "weight_decay",
            taken(
                RATE,
                "weight_decay: of every parameter in DzeroTrainer and in a loop, as in DeepSpeed; dzero train decays "
                "matrices only",
                "weight_decay",
            ),
        ),
        mode=("adam_w_mode", taken(FLAG, "true: AdamW, DeepSpeed's default for Adam too; false: torch.optim.Adam")),
        torch=("torch_adam", taken(FLAG, "the same update; weight_decay is then 0.01 unless given, as torch has it")),
        options=(
            "momentum dampening lr_decay initial_accumulator_value",
            taken(RATE, "an argument of torch's rule, optim.options"),
        ),
        flags=("nesterov", taken(FLAG, "an argument of torch's rule, optim.options")),
        kernels=("foreach fused set_grad_none", needless(FLAG, "chooses among kernels of the same update")),
        bias=("bias_correction", refused(FLAG, "true: dzero.AdamW corrects its moments, as AdamW does", True)),
        amsgrad=("amsgrad", refused(FLAG, "false, or dzero.TorchOptimizer with torch.optim.AdamW of yours", False)),
        moments=(
            "fp32_optimizer_states",
            refused(FLAG, "true; moments in bf16 are precision=dzero.PrecisionConfig(moments='bf16')", True),
        ),
        clip=(
            "max_grad_norm",
            refused(SIGNED, "write gradient_clipping beside the optimizer, as DeepSpeed asks too", 0, 0.0),
        ),
        muon=(
            "muon_lr adam_lr ns_method",
            refused(ANY, "optim.rule=muon with optim.muon, whose updates are scaled otherwise"),
        ),
        onebit=(
            "freeze_step cuda_aware comm_backend_name coeff_beta factor_max factor_min factor_threshold max_coeff "
            "min_coeff var_freeze_step var_update_scaler local_step_scaler local_step_clipper",
            refused(ANY, "remove it, with the optimizer that it belongs to"),
        ),
    ),
}
OPTIMIZERS = {
    "adam": "AdamW",
    "adamw": "AdamW",
    "fusedadam": "AdamW",
    "cpuadam": "AdamW",
    "deepspeedcpuadam": "AdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
}
"""Class of each optimizer that is taken: dzero.AdamW, or a class of torch.optim in dzero.TorchOptimizer."""
REFUSED_OPTIMIZERS = {
    "lion": "dzero.TorchOptimizer(sharded, Lion, elementwise=True) with a class of yours",
    "muon": "dzero.Muon, optim.rule=muon; its updates are scaled otherwise, so its lr is another",
    "lamb": "dzero.TorchOptimizer(sharded, Lamb, elementwise=False) with a class of yours",
    "onebitlamb": "dzero.TorchOptimizer(sharded, Lamb, elementwise=False) with a class of yours, uncompressed",
    **dict.fromkeys(("onebitadam", "zerooneadam"), "Adam: gradients are reduced whole, in 16 or 32 bits"),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "Adam, AdamW or SGD with parameter groups of mup's rates"),
    **{
        name.lower(): f"dzero.TorchOptimizer(sharded, torch.optim.{name}), optim.rule={name}"
        for name in ("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")
    },
}
SCHEDULER = {
    "scheduler.type": taken(
        one_of("warmuplr", "warmupdecaylr", "warmupcosinelr", "onecycle", "lrrangetest"),
        "the schedule, by DeepSpeed's formula in DzeroTrainer and in a loop; dzero train has the nearest of its own",
    ),
    **below(
        "scheduler.params",
        steps=("warmup_num_steps", taken(COUNTED, "steps of the warm-up; fewer than 2 are 2", "warmup_steps")),
        total=("total_num_steps", taken(STEPS, "train.steps; of Trainer, the steps of the run", "num_training_steps")),
        kind=("warmup_type", taken(one_of("log", "linear"), "how the rate rises; DeepSpeed's default is log")),
        low=("warmup_min_lr", taken(RATE, "the rate at which the warm-up starts", "zero")),
        high=("warmup_max_lr", taken(RATE, "the rate after the warm-up, in place of the optimizer's", "learning_rate")),
        ratios=(
            "warmup_min_ratio cos_min_ratio",
            taken(numbers(number(1.0)), "part of the rate at the start, the end"),
        ),
        rates=("cycle_min_lr cycle_max_lr lr_range_test_min_lr", taken(RATE, "rates of the schedule")),
        slopes=("decay_lr_rate lr_range_test_step_rate", taken(RATE, "slope of the schedule")),
        sizes=(
            "cycle_first_step_size cycle_second_step_size lr_range_test_step_size",
            taken(STEPS, "steps of the schedule"),
        ),
        stairs=("cycle_first_stair_count cycle_second_stair_count decay_step_size", taken(COUNT, "steps")),
        staircase=("lr_range_test_staircase", taken(FLAG, "whether the rate rises in stairs")),
        cycles=("cycle_momentum", taken(OFF, "only the rate is scheduled, betas stay")),
        momentum=("cycle_min_mom cycle_max_mom decay_mom_rate", needless(ANY, "read with cycle_momentum only")),
        last=("last_batch_iteration", refused(SIGNED, "-1: a checkpoint knows its step", -1)),
    ),
}
PRECISION = {
    **below(
        "bf16",
        on=("enabled", taken(FLAG, "precision=bf16 (fp32 masters); bf16=True", "bf16")),
        check=(
            "check_grad_overflow check_overflow",
            needless(FLAG, "a step whose gradients are not finite is always skipped"),
        ),
        now=("immediate_grad_update", needless(FLAG, "gradients are added as they arrive")),
        scale=(
            "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
            "min_loss_scale",
            needless(ANY, "of fp16; bf16 has the range of fp32, and no loss scale"),
        ),
        masters=(
            "bf16_master_weights_and_grads bf16_optimizer_states",
            refused(
                FLAG, "false; precision='bf16_remainder' saves 2 bytes and keeps the numbers of fp32 masters", False
            ),
        ),
    ),
    **below(
        "fp16",
        on=("enabled", taken(FLAG, "precision=fp16 (fp32 masters) with a loss scale; fp16=True", "fp16")),
        cast=("auto_cast", needless(FLAG, "inputs of a unit are cast to its dtype")),
        scale=(
            "loss_scale",
            taken(numbers(number(2.0**40)), "scaler.init and scaler.floor (a fixed scale); 0: dynamic"),
        ),
        power=("initial_scale_power", taken(numbers(whole(0, 40)), "scaler.init=2^N")),
        window=("loss_scale_window", taken(POSITIVE, "scaler.growth_interval, one finite step sooner at first")),
        hysteresis=("hysteresis", taken(POSITIVE, "scaler.hysteresis, refilled by each finite step")),
        refill=("consecutive_hysteresis", needless(FLAG, "true is what dzero does: a finite step refills hysteresis")),
        floor=("min_loss_scale", taken(numbers(Range(2.0**-40, 2.0**40)), "scaler.floor")),
        masters=(
            "fp16_master_weights_and_grads",
            refused(FLAG, "false: masters are fp32, or 16 bits and a remainder (precision='bf16_remainder')", False),
        ),
    ),
    **below(
        "torch_autocast",
        on=("enabled", taken(FLAG, "parameters of the dtype with fp32 masters, in place of autocast", None)),
        dtype=("dtype", taken(one_of("bfloat16", "bf16", "float16", "fp16", "half"), "precision.param")),
        modules=("lower_precision_safe_modules", needless(NAMES, "all parameters have one dtype, with fp32 masters")),
    ),
    **below(
        "data_types",
        grad=("grad_accum_dtype", taken(DTYPE, "precision.grad")),
        param=("param_dtype", taken(DTYPE, "precision.param; it must be that of bf16 or fp16")),
        buffers=("buffer_dtype", refused(DTYPE, "leave it away: buffers keep the dtype of the model")),
        keep=(
            "keep_in_fp32_modules",
            refused(ANY, "leave it away: parameters of a unit have one dtype, with fp32 masters", "auto", []),
        ),
    ),
    "amp": refused_section("bf16 or fp16"),
}
STAGE = one_of("none", "cpu", "nvme")
ZERO = below(
    "zero_optimization",
    stage=("stage", taken(numbers(whole(0, 3)), "stage, zero.stage")),
    legacy=("cpu_offload", taken(FLAG, "as offload_optimizer with device cpu")),
    legacy_params=("cpu_offload_param cpu_offload_params", taken(FLAG, "as offload_param with device cpu")),
    hpz=("zero_hpz_partition_size", taken(numbers(whole(1, MOST_RANKS)), "zero.reshard_after_forward (1: none)")),
    buckets=(
        "allgather_bucket_size reduce_bucket_size allgather_partitions reduce_scatter overlap_comm "
        "contiguous_gradients use_multi_rank_bucket_allreduce round_robin_gradients parameter_alignment "
        "sub_group_size legacy_stage1 prefetch_bucket_size stage3_prefetch_bucket_size max_live_parameters "
        "stage3_max_live_parameters "
        "max_reuse_distance stage3_max_reuse_distance module_granularity_threshold stage3_module_granularity_threshold "
        "use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params allgather_sequential "
        "stage3_allgather_sequential memory_efficient_linear stage3_gather_fp16_weights allgather_size",
        UNITS,
    ),
    persistence=(
        "param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold "
        "stage3_model_persistence_threshold",
        needless(ANY, "small parameters are gathered with their unit, in one collective"),
    ),
    save=(
        "gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save",
        needless(ANY, "save_model of DzeroTrainer, dzero.save_pretrained and export.at_end always write whole weights"),
    ),
    load=("load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint", SAVED),
    logs=("log_trace_cache_warnings enable_sanity_checks", LOGGED),
    norm=("compute_grad_norm", needless(FLAG, "the norm is always known")),
    unused=(
        "ignore_unused_parameters find_unused_parameters",
        needless(ANY, "a parameter that no rank reaches stays as it is, one that some reach has zeros on the others"),
    ),
    module=("override_module_apply leaf_module", needless(ANY, "modules are sharded unit by unit (zero.units)")),
    pinned=("cpu_offload_use_pin_memory", CPU),
    muon=("save_muon_momentum_buffer_in_memory", needless(FLAG, "states of Muon never leave for disk")),
    qwz=(
        "zero_quantized_weights",
        refused(FLAG, "false, and precision=dzero.PrecisionConfig(gather='int8') or precision.gather=int8", False),
    ),
    qgz=(
        "zero_quantized_gradients",
        refused(FLAG, "false, and precision=dzero.PrecisionConfig(reduce='int4') or precision.reduce=int4", False),
    ),
    frozen=(
        "zero_quantized_nontrainable_weights",
        refused(FLAG, "precision=dzero.PrecisionConfig(frozen='int8') beside adapters", False),
    ),
    mics=(
        "mics_shard_size",
        refused(SIGNED, "a mesh of replicas: dzero.make_mesh(replicate=RANKS/SIZE), mesh.replicate", -1, 0, 1),
    ),
    mics_gather=("mics_hierarchical_params_gather", needless(FLAG, "only read with mics_shard_size")),
    loco=(
        "zeropp_loco_param",
        refused(ANY, "remove it; precision.feedback=true feeds back the errors of precision.reduce=int4"),
    ),
    zenflow=("zenflow", refused(ANY, "remove it; offload.overlap=delayed hides updates one step late, for all states")),
)
OFFLOAD = {
    **below(
        "zero_optimization.offload_optimizer",
        device=("device", taken(STAGE, "offload: masters, moments and gradients on the host, or on disk")),
        path=("nvme_path", taken(PATH, "offload.disk.paths")),
        ratio=("ratio", taken(numbers(number(1.0)), "offload.master_fraction, moments_fraction and grad_fraction")),
        host=("pin_memory super_offload cpuadam_cores_perc buffer_count buffer_size fast_init", CPU),
        pipeline=("pipeline pipeline_read pipeline_write", needless(ANY, "transfers and updates always overlap")),
    ),
    **below(
        "zero_optimization.offload_param",
        device=("device", taken(STAGE, "offload: parameters on the host, or on disk; their masters leave with them")),
        path=("nvme_path", taken(PATH, "offload.disk.paths")),
        host=("pin_memory buffer_count buffer_size max_in_cpu", CPU),
    ),
    "aio": needless(SECTION, DISK.text),
}
PARALLEL = {
    "sequence_parallel_size": refused(COUNT, "mesh.cp of dzero train, dzero.parallelize in a loop", 1, 0),
    "tensor_parallel.autotp_size": refused(COUNT, "mesh.tp of dzero train, dzero.parallelize in a loop", 0, 1),
    "tensor_parallel.tp_size": refused(COUNT, "mesh.tp of dzero train, dzero.parallelize in a loop", 0, 1),
    **below(
        "tensor_parallel",
        rest=(
            "dtype tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend tensor_parallel tp preset_model "
            "injection_policy_tuple partition_config keep_module_on_host kernel_inject replace_with_kernel_inject",
            needless(ANY, "only read with autotp_size"),
        ),
    ),
    "expert_parallel": refused_section("mesh.ep of dzero train, dzero.parallelize in a loop"),
    "use_data_before_expert_parallelism": needless(FLAG, "only read with experts that ranks share"),
    "pipeline.stages": refused(ANY, "mesh.pp of dzero train, dzero.parallelize in a loop", "auto", 1, 0),
    **below(
        "pipeline",
        rest=(
            "partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned use_reentrant",
            needless(ANY, "only read by a PipelineModule"),
        ),
    ),
}
TRAINING = {
    "progressive_layer_drop": refused_section("remove it: layers are not dropped"),
    "curriculum_learning": refused_section("order the data before training"),
    "data_efficiency": refused_section("order or shorten the data before training"),
    "compression_training": refused_section("remove it: weights train unquantized"),
    "quantize_training": refused_section("remove it: weights train unquantized"),
    "weight_quantization": refused_section("remove it: it serves inference"),
    "sparse_attention": refused(SECTION, "remove it: attention is the model's own", {}),
    "hybrid_engine": refused_section("generate with the model that save_model or dzero.save_pretrained writes"),
    "elasticity": refused_section("write the three batch sizes"),
    "compile.deepcompile": refused(FLAG, "block.compile=true of dzero train compiles blocks", False),
    **below(
        "compile",
        rest=(
            "enabled disable backend kwargs passes autoep_non_moe free_activation free_activation_threshold "
            "offload_activation offload_activation_pin_memory offload_opt_states offload_parameters double_buffer "
            "symmetric_memory debug_log sync_before_reduce sync_after_reduce sync_before_allgather "
            "sync_after_allgather keep_int_input_tensors keep_all_input_tensors",
            needless(ANY, "only read with deepcompile"),
        ),
    ),
    "eigenvalue": needless(SECTION, "only read with quantize_training"),
    "graph_harvesting": needless(FLAG, "replays the same work from CUDA graphs"),
    "autotuning": needless(SECTION, "read by DeepSpeed's launcher alone; dzero train zero=auto finds settings"),
    "activation_checkpointing": CALLED,
    "dataloader_drop_last": needless(FLAG, "a loader is yours or Trainer's: dataloader_drop_last of TrainingArguments"),
    "seed": needless(SIGNED, "DeepSpeed reads no seed; seed of TrainingArguments, train.seed"),
    "vocabulary_size": needless(COUNT, "DeepSpeed only warns if it is odd"),
}
SERVICE = {
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet", "monitor_config"), needless(SECTION, TRACE.text)),
    "flops_profiler": needless(SECTION, "dzero plan predicts a step; profile=on of dzero train traces one"),
    "comms_logger": needless(SECTION, "sharded.ledger counts what travels"),
    **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"), LOGGED),
    **dict.fromkeys(("log_level", "timers"), LOGGED),
    "steps_per_print": needless(SIGNED, "logging_steps of TrainingArguments; dzero train logs every step"),
    "zero_allow_untested_optimizer": needless(FLAG, "every optimizer that dzero takes is tested"),
    "zero_force_ds_cpu_optimizer": needless(FLAG, "updates on the host are dzero's own, with the same bits"),
    "checkpoint.use_node_local_storage": refused(FLAG, "false: name a folder that all nodes see", False),
    **below(
        "checkpoint",
        rest=("tag_validation load_universal parallel_write checkpoint_serialization writer async_io", SAVED),
    ),
    "nebula": needless(SECTION, SAVED.text),
    "datastates_ckpt": needless(ANY, SAVED.text),
}
TABLE: dict[str, Key] = {
    **BATCH,
    **OPTIMIZER,
    **SCHEDULER,
    **PRECISION,
    **ZERO,
    **OFFLOAD,
    **PARALLEL,
    **TRAINING,
    **SERVICE,
}
SECTIONS = {name.rpartition(".")[0] for name in TABLE} - {""}
SECTIONS |= {each.rpartition(".")[0] for each in SECTIONS} - {""}
"""Sections that are read key by key; others are judged as a whole."""
SWITCHED = ("bf16", "fp16", "torch_autocast")
"""Sections without effect unless they are enabled."""

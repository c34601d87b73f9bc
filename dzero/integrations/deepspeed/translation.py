"""Translation of a DeepSpeed configuration into dzero's settings.

    configuration --judge--> a verdict for every key --> values that are taken --> Translation
                                                     `--> conflicts between them: refused too

A value that is "auto" stays open: it is the trainer's, or yours in a loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dzero.compatibility import ELEM_BYTES
from dzero.integrations.deepspeed.config_keys import NEEDLESS, REFUSED, TAKEN
from dzero.integrations.deepspeed.forms import AUTO, FLOATS
from dzero.integrations.deepspeed.optimizers import Optimizer, optimizer_of, schedule_of
from dzero.integrations.deepspeed.verdicts import Conflict, Verdict, judge
from dzero.optim.loss_scaler import ScalerConfig
from dzero.utils.ranges import MOST_COUNT
from dzero.zero.config import PRECISIONS, PrecisionConfig, ZeroConfig
from dzero.zero.offload_config import OFFLOADS, DiskConfig, OffloadConfig

ZERO, OPTIM, PARAM = "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
PARAM_DTYPE, GRAD_DTYPE = "data_types.param_dtype", "data_types.grad_accum_dtype"
SUM_DTYPE = "communication_data_type"
OFFLOADING = (f"{ZERO}.offload_", f"{ZERO}.cpu_offload")
HPZ = f"{ZERO}.zero_hpz_partition_size"
CPU_PARAMS = (f"{ZERO}.cpu_offload_param", f"{ZERO}.cpu_offload_params")
STAGE_3 = (f"{PARAM}.", CPU_PARAMS[0], HPZ)
DYNAMIC = tuple(f"fp16.{key}" for key in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"))
TIERS = {"none": "device", "cpu": "host", "nvme": "disk"}
PRESETS = {
    ("device", "device"): "none",
    ("device", "host"): "host",
    ("host", "host"): "host_all",
    ("device", "disk"): "disk",
    ("disk", "disk"): "infinity",
    ("host", "disk"): "infinity",
    ("disk", "host"): "host_all",
}
"""Preset of offload that is nearest to the tiers of parameters and of states of the optimizer."""


@dataclass(frozen=True)
class Translation:
    """Settings of dzero that a configuration asks for, with a verdict on each key.

    Attributes:
        verdicts: What becomes of each key.
        stage: The stage, or a config with what differs from dzero's defaults.
        precision: Name or config of the dtypes; None: the trainer's.
        offload: Name or config of the tiers.
        scaler: Loss scale of fp16; None: dzero's default.
        batch: Values of the batch sizes that are given, by DeepSpeed's names.
        max_norm: Norm above which gradients are clipped; None: no clipping; "auto": the trainer's.
        optimizer: None: the trainer's.
        schedule: Its type in lower case and its parameters, which may be "auto"; None: the trainer's.
    """

    verdicts: tuple[Verdict, ...]
    stage: int | ZeroConfig = 0
    precision: str | PrecisionConfig | None = None
    offload: str | OffloadConfig = "none"
    scaler: ScalerConfig | None = None
    batch: dict[str, Any] = field(default_factory=dict)
    max_norm: float | str | None = AUTO
    optimizer: Optimizer | None = None
    schedule: tuple[str, dict[str, Any]] | None = None

    @property
    def refused(self) -> list[Verdict]:
        """Verdicts of the keys that dzero cannot obey."""
        return [each for each in self.verdicts if each.kind == REFUSED]

    @property
    def shard(self) -> dict[str, Any]:
        """Arguments of `dzero.shard`, which `dzero=` of DzeroTrainer takes too."""
        given = {"stage": self.stage, "precision": self.precision, "offload": self.offload}
        return {key: value for key, value in given.items() if value is not None}


def translate(config: Mapping[str, Any], ranks: int | None = None, param: str | None = None) -> Translation:
    """Translate a configuration as `read` returns it.

    Args:
        config: The configuration.
        ranks: Number of ranks, by which batch sizes are checked; None: not known.
        param: Dtype of parameters if the configuration leaves it open; None: not known.
    """
    verdicts = [*judge(config)]
    values = {each.key: each.value for each in verdicts if each.kind == TAKEN}
    idle = dict(_idle(values))
    verdicts = [replace(each, kind=NEEDLESS, text=idle[each.key]) if each.key in idle else each for each in verdicts]
    values = {key: value for key, value in values.items() if key not in idle}
    found: dict[str, Any] = {}
    against: dict[str, str] = {}
    for part in (_batch, _clipping, _zero, _precision, _offload, optimizer_of, schedule_of):
        while True:  # without a key that is refused, the others are still followed
            try:
                found |= part(values, ranks=ranks, param=param)
            except Conflict as error:
                against.setdefault(error.key, error.text)
                if values.pop(error.key, None) is not None:
                    continue
            break
    for number, each in enumerate(verdicts):
        if (text := against.pop(each.key, None)) is not None:
            verdicts[number] = replace(each, kind=REFUSED, text=text)
    verdicts += [Verdict(key, None, REFUSED, text) for key, text in against.items()]
    return Translation(tuple(verdicts), **found)


def _idle(v: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield keys that DeepSpeed does not read beside the other values, and why."""
    stage = int(v.get(f"{ZERO}.stage", 0))
    for key in v:
        if stage == 0 and key.startswith(OFFLOADING):
            yield key, "stage 0 offloads nothing"
        elif stage != 3 and key.startswith(STAGE_3):
            yield key, "read at stage 3 alone"
        elif v.get("fp16.loss_scale") and key in DYNAMIC:
            yield key, "the loss scale is fixed"


def _batch(v: dict[str, Any], ranks: int | None, **_: Any) -> dict[str, Any]:
    total, micro, accumulate = (
        value if isinstance(value := v.get(key), int | float) else None
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if total is not None:
        factors = [each for each in (micro, accumulate, ranks) if each is not None]
        product = 1
        for each in factors:
            product *= int(each)
        names = "train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks"
        if total % product or (len(factors) == 3 and total != product):
            known = " x ".join(str(int(each)) for each in factors)
            raise Conflict("train_batch_size", f"make it {names}, of which are known {known} = {product}")
    given = {"total": total, "micro": micro, "accumulate": accumulate}
    return {"batch": {key: int(value) for key, value in given.items() if value is not None}}


def _clipping(v: dict[str, Any], **_: Any) -> dict[str, Any]:
    norm = v.get("gradient_clipping", 1.0)
    return {"max_norm": norm if norm == AUTO else norm or None}


def _zero(v: dict[str, Any], ranks: int | None, **_: Any) -> dict[str, Any]:
    stage, part = int(v.get(f"{ZERO}.stage", 0)), int(v.get(HPZ, 1))
    if part in (1, ranks):  # a second copy over all ranks is the first
        return {"stage": stage}
    if ranks is not None and ranks % part:
        raise Conflict(HPZ, f"a divisor of the {ranks} ranks, such as those of a node")
    if any(v.get(key) for key in CPU_PARAMS) or v.get(f"{PARAM}.device", "none").lower() != "none":
        raise Conflict(HPZ, "1 with offload_param: FSDP2 keeps the second copy on the device")
    return {"stage": ZeroConfig(stage=3, reshard_after_forward=part)}


def _precision(v: dict[str, Any], param: str | None, **_: Any) -> dict[str, Any]:
    switches = {each: v.get(f"{each}.enabled", False) for each in ("fp16", "bf16")}
    enabled = [each for each, value in switches.items() if value is True]
    if len(enabled) == 2:
        raise Conflict("fp16.enabled", "bf16 is enabled too; choose one")
    if not enabled and v.get("torch_autocast.enabled") is True:
        enabled = [FLOATS[v.get("torch_autocast.dtype", "bfloat16").lower()]]
    is_open = AUTO in switches.values() and not enabled and param is None
    dtype = None if is_open else enabled[0] if enabled else param or "fp32"
    stored, grad, reduce = (
        FLOATS[v[key].lower()] if key in v else AUTO for key in (PARAM_DTYPE, GRAD_DTYPE, SUM_DTYPE)
    )
    for key, value in ((PARAM_DTYPE, stored), (GRAD_DTYPE, grad), (SUM_DTYPE, reduce)):
        if is_open and value != AUTO:
            raise Conflict(key, "it depends on bf16 and fp16, which are auto; write them as true or false")
    if is_open or dtype is None:
        return {}
    if stored not in (AUTO, dtype):
        raise Conflict(PARAM_DTYPE, f"parameters are {dtype}: remove it, or enable bf16 or fp16")
    if grad not in (AUTO, dtype, "fp32"):
        raise Conflict(GRAD_DTYPE, f"fp32, or that of parameters, {dtype}")
    if reduce == "fp32" and grad == AUTO:
        grad = "fp32"  # sums carry no more than what is stored
    if reduce != AUTO and ELEM_BYTES[reduce] > ELEM_BYTES.get(grad, 2):
        raise Conflict(SUM_DTYPE, f"data_types.grad_accum_dtype fp32 as well, or {dtype}")
    config = PrecisionConfig(param=dtype) if dtype == "fp32" == grad else PrecisionConfig(param=dtype, grad=grad)
    config = replace(config, reduce=AUTO if reduce == dtype == "fp32" else reduce)
    scaler = _scaler(v) if dtype == "fp16" and "fp16" in enabled else None
    return {"precision": dtype if config == PRECISIONS[dtype] else config, "scaler": scaler}


def _scaler(v: dict[str, Any]) -> ScalerConfig:
    """Return the loss scale; a fixed one neither grows nor falls below itself."""
    if fixed := v.get("fp16.loss_scale", 0):
        return ScalerConfig(init=float(fixed), floor=float(fixed), growth_interval=MOST_COUNT)
    init, floor = 2.0 ** v.get("fp16.initial_scale_power", 16), float(v.get("fp16.min_loss_scale", 1.0))
    if floor > init:
        raise Conflict("fp16.min_loss_scale", f"at most the first scale, {init:g}")
    window, hysteresis = int(v.get("fp16.loss_scale_window", 1000)), int(v.get("fp16.hysteresis", 2))
    return ScalerConfig(init=init, floor=floor, growth_interval=window, hysteresis=hysteresis)


def _offload(v: dict[str, Any], **_: Any) -> dict[str, Any]:
    legacy = {OPTIM: v.get(f"{ZERO}.cpu_offload"), PARAM: any(v.get(key) for key in CPU_PARAMS)}
    tiers = {each: TIERS["cpu" if legacy[each] else v.get(f"{each}.device", "none").lower()] for each in (OPTIM, PARAM)}
    ratio = float(v.get(f"{OPTIM}.ratio", 1.0))
    if ratio < 1.0 and v.get(f"{ZERO}.stage") != 3:
        raise Conflict(f"{OPTIM}.ratio", "1.0, or stage 3")
    if tiers[OPTIM] == "device" or ratio == 0.0:
        tiers[OPTIM], ratio = ("device" if tiers[PARAM] == "device" else "host"), 1.0
    if ratio < 1.0 and tiers[PARAM] != "device":
        raise Conflict(f"{OPTIM}.ratio", "1.0: masters leave the device with their parameters")
    paths = []
    for each in (OPTIM, PARAM):
        if tiers[each] == "disk":
            if f"{each}.nvme_path" not in v:
                raise Conflict(f"{each}.nvme_path", "write the folder of the disk")
            paths.append(v[f"{each}.nvme_path"])
    name = PRESETS[tiers[PARAM], tiers[OPTIM]]
    more: dict[str, Any] = {}
    if tiers[PARAM] != OFFLOADS[name].param:
        more["param"] = tiers[PARAM]
    if ratio < 1.0:
        more |= {f"{kind}_fraction": ratio for kind in ("grad", "master", "moments")}
    if paths:
        more["disk"] = DiskConfig(paths=[*dict.fromkeys(paths)])
    return {"offload": replace(OFFLOADS[name], **more) if more else name}

"""Private names of torch: the only file that uses them, but for FSDP2's and those of ring attention.

    file                            private names of
    utils/torch_internals.py        tensors, modules, DTensor, operators, dispatch modes, process groups, the profiler
    zero/fsdp_internals.py          FSDP2
    parallel/context/ring.py        torch's loops of ring attention

Torch may rename these names in any release. So none is needed to import dzero, and the tables `SEAMS` of the three
files list what training needs. `check` looks for them when a model is sharded: where torch lacks a name, a feature
falls back to torch's own behavior with a warning, or the run ends with one error.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from importlib import import_module
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DTensor, Partial
from torch.multiprocessing.reductions import StorageWeakRef

from dzero.utils.launched import is_first_of_node

logger = logging.getLogger(__name__)

VERSIONS = "torch>=2.11,<2.15"
"""Versions of torch that are tested (docs/reference/limits.md); `check` warns of a newer one that has all names."""
RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])
NEWEST = (2, 14)


@dataclass(frozen=True)
class Seam:
    """Private names of torch that one feature needs.

    Attributes:
        names: The names, each as `module:attribute.attribute`; alternatives are separated by " or ".
        used_for: The feature, which completes the sentence "dzero needs it for ...".
        without: What happens instead where a name is missing, and what it costs; None: such a torch is refused.
    """

    names: tuple[str, ...]
    used_for: str
    without: str | None = None

    @cached_property
    def missing(self) -> str | None:
        """First name that this torch lacks, or None."""
        return next((name for name in self.names if not any(map(_exists, name.split(" or ")))), None)

    @property
    def is_there(self) -> bool:
        """Whether this torch has all names."""
        return self.missing is None

    def require(self) -> None:
        """Raise RuntimeError if a name is missing, or warn if there is a fallback."""
        if self.is_there:
            return
        lacks = f"torch {torch.__version__} has no {self.missing}, which dzero needs for {self.used_for}"
        if self.without is None:
            raise RuntimeError(f"{lacks}: install {VERSIONS}")
        warnings.warn(f"{lacks}: {self.without}. {VERSIONS} has it", stacklevel=2)


@cache
def check(seams: tuple[Seam, ...]) -> None:
    """Look for all names of `seams`, once per process; warn for each that has a fallback, and of an unknown torch.

    Raises:
        RuntimeError: A name without a fallback is missing.
    """
    for seam in seams:
        seam.require()
    if RELEASE > NEWEST and is_first_of_node():
        _warn_of_newer(torch.__version__)


@cache
def _warn_of_newer(version: str) -> None:
    logger.warning("torch %s is newer than those that dzero is tested with, %s", version, VERSIONS)


def _exists(name: str) -> bool:
    """Return whether torch has `module:attribute.attribute`; an attribute of instances counts if its class names it."""
    owner, _, last = name.rpartition(".")
    found = found_by(name)
    return found is not None or (isinstance(of := found_by(owner), type) and last in _named_by(of))


def found_by(name: str) -> Any:
    """Return what torch has as `module:attribute.attribute`; None for what is missing, which `check` reports."""
    module, _, attributes = name.partition(":")
    try:
        found: Any = import_module(module)
    except ImportError:
        return None
    for each in attributes.split("."):
        found = getattr(found, each, None)
    return found


@cache
def _named_by(cls: type) -> frozenset[str]:
    """Return the names that a class annotates, or that its methods use."""
    members = [each.fget if isinstance(each, property) else each for each in vars(cls).values()]
    members = [getattr(each, "__wrapped__", each) for each in members]
    code: list[CodeType] = [each.__code__ for each in members if isinstance(each, FunctionType)]
    return frozenset(getattr(cls, "__annotations__", ())).union(*(each.co_names for each in code))


TENSORS = Seam(
    (
        "torch:_C._disabled_torch_function_impl",
        "torch:Tensor._make_subclass",
        "torch:Tensor._make_wrapper_subclass",
        "torch:Tensor._version",
        "torch:Tensor._base",
        "torch:Tensor._backward_hooks",
        "torch:Tensor._post_accumulate_grad_hooks",
        "torch.utils._pytree:tree_leaves",
        "torch.utils._pytree:tree_map_only",
        "torch._ops:OpOverload._schema",
    ),
    "gradients and parameters that report who writes into them",
)
DTENSORS = Seam(
    ("torch.distributed.tensor:DTensor._local_tensor", "torch.distributed.tensor:DTensor._spec"),
    "the shards of parameters and gradients",
)
MODULES = Seam(
    (
        "torch.nn:Module._apply",
        "torch.nn:Module._parameters",
        "torch.nn:Module._non_persistent_buffers_set",
        "torch.nn:Module._compiled_call_impl",
    ),
    "the parameters that modules register, their dtypes, and buffers of checkpoints",
)
OPERATORS = Seam(
    (
        "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers",
        "torch:ops.aten._local_scalar_dense",
        "torch:_C._dispatch_get_all_op_names",
        "torch._ops:OpOverload._overloadname",
        "torch.distributed.tensor:Partial._reduce_value",
        "torch:ops.aten._foreach_norm",
        "torch:ops.aten._foreach_clamp_min_",
        "torch:ops.aten._foreach_clamp_max_",
    ),
    "numbers, rows, random values and losses of sharded tensors",
    "float() and item() of a sharded tensor silently return this rank's part, writes into its rows are lost, and "
    "F.mse_loss of it has gradients times the ranks. Call full_tensor() before",
)
CLIPPING = Seam(
    ("torch.nn.utils.clip_grad:_get_total_norm", "torch.nn.utils.clip_grad:_clip_grads_with_norm_"),
    "the norm of all gradients in torch's clip_grad_norm_",
    "where it was imported by name before shard(), it clips each pipeline stage by its own norm and is refused with tp "
    "and ep. Call dzero.clip_grad_norm_ or torch.nn.utils.clip_grad_norm_",
)
FOREACH = Seam(
    ("torch:_foreach_add_",),
    "accumulating many gradients at once",
    "they are added one by one, which takes longer with many parameters",
)
TRANSFORMS = Seam(
    ("torch:_C._functorch.get_interpreter_stack",),
    "refusing torch.func.grad, vjp, jacrev and hessian of a sharded model",
    "they raise torch's error about the storage of a TensorWrapper",
)
MODES = Seam(
    ("torch.utils._python_dispatch:TorchDispatchMode",),
    "counting the traffic of tensor parallelism",
    "that traffic is missing in the ledger",
)
FLASH = Seam(
    ("torch:ops.aten._scaled_dot_product_flash_attention",),
    "attention over sequences that ranks share, on CUDA",
    "it runs tile by tile with masks, which takes longer",
)
PROPAGATION = Seam(
    (
        "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs",
        "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator.register_op_strategy",
        "torch.distributed.tensor._op_schema:OpSpec",
        "torch.distributed.tensor._op_schema:OpStrategy",
    ),
    "norms that one rank takes by itself",
    "all ranks must take them",
)
STORAGES = Seam(
    ("torch:UntypedStorage._new_with_weak_ptr", "torch.multiprocessing.reductions:StorageWeakRef"),
    "empty_init, which makes values again that somebody still has",
)
SEAMS = (TENSORS, DTENSORS, MODULES, OPERATORS, CLIPPING, TRANSFORMS, FOREACH, MODES, FLASH)
"""What training needs of torch besides FSDP2."""
TIMEOUTS = Seam(
    (
        "torch.distributed:set_timeout or torch.distributed.distributed_c10d:_set_pg_timeout",
        "torch.distributed:ProcessGroup._get_backend",
        "torch.distributed:ProcessGroup._device_types",
    ),
    "giving the groups of a mesh the timeout of the default group",
    "these groups keep torch's timeouts of 10 or 30 minutes",
)
STORES = Seam(
    (
        "torch.distributed.distributed_c10d:_get_default_store",
        "torch.distributed.distributed_c10d:_get_process_group_store",
        "torch.distributed:Store.clone",
    ),
    "watching the ranks of a process group",
    "ranks that are missing are not named, and others wait for torch's timeouts",
)
GATHERS = Seam(
    (
        "torch:ops.c10d.allgather_into_tensor_coalesced_",
        "torch:ops.c10d._allgather_base_",
        "torch:_C._AutoDispatchBelowAutograd",
        "torch.distributed:Work.unbox",
        "torch:_C._distributed_c10d._create_work_from_future",
    ),
    "gathering DTensors on the CPU",
    "an error in torch's gloo, by which two of its threads may free the same memory, can crash a run",
)
FAKE_TENSORS = Seam(
    (
        "torch._subclasses:FakeTensorMode",
        "torch.utils._python_dispatch:TorchDispatchMode",
        "torch.distributed.distributed_c10d:_resolve_process_group",
        "torch:UntypedStorage._cdata",
        "torch._subclasses.fake_tensor:DataDependentOutputException",
        "torch._subclasses.fake_tensor:DynamicOutputShapeException",
        "torch._subclasses.fake_tensor:UnsupportedOperatorException",
    ),
    "running a model without memory, as plans do",
)
FAKE_GROUPS = Seam(
    (
        "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
        "torch.testing._internal.distributed.fake_pg:FakeStore",
    ),
    "planning for ranks that are not there",
)


# Tensors.

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Return a tensor's version counter, which writes in place increment."""
NO_TORCH_FUNCTION: Any = found_by("torch:_C._disabled_torch_function_impl")
"""Value of `__torch_function__` for tensor subclasses that only handle operators, in `__torch_dispatch__`."""
make_subclass: Callable[..., Any] = found_by("torch:Tensor._make_subclass")
"""Return a tensor of a subclass in the memory of a plain one."""
make_wrapper: Callable[..., Any] = found_by("torch:Tensor._make_wrapper_subclass")
"""Return a tensor of a subclass without memory, of a given size, strides, offset, dtype and device."""
tree_leaves: Callable[[Any], list[Any]] = found_by("torch.utils._pytree:tree_leaves")
"""Return what is in nested containers, which torch calls a pytree."""
tree_map_only: Callable[[type[Any], Callable[[Any], Any], Any], Any] = found_by("torch.utils._pytree:tree_map_only")
"""Return nested containers with every object of a type in them replaced by the function of it."""


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd knows `tensor` as a view of another one."""
    return tensor._base is not None


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `tensor` is a view of, by autograd, or itself."""
    return tensor if tensor._base is None else tensor._base


def hooked_param(params: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of a parameter that has a gradient hook; one loop, because every step runs it."""
    for name, param in params.items():
        if param._post_accumulate_grad_hooks or param._backward_hooks:
            return name
    return None


def hooks_of(param: torch.Tensor) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Return the hooks of a parameter before and after its gradient is accumulated: the dicts that handles edit."""
    return param._backward_hooks or {}, param._post_accumulate_grad_hooks or {}


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage while it lives, also one without memory."""
    key: int = storage._cdata
    return key


def add_each(into: list[torch.Tensor], more: list[torch.Tensor]) -> None:
    """Add each tensor of `more` to that of `into`, in place."""
    if FOREACH.is_there:
        torch._foreach_add_(into, more)
        return
    for total, each in zip(into, more, strict=True):
        total.add_(each)


transforms: Callable[[], list[Any] | None] = found_by("torch:_C._functorch.get_interpreter_stack") or (lambda: None)
"""Return the transforms of torch.func in which code runs, the outermost first; None outside of all."""


def is_transformed() -> bool:
    """Return whether code runs inside a transform of torch.func."""
    return bool(transforms())


TRANSFORMS_REFUSED = ("Grad",) if RELEASE >= (2, 13) else ("Grad", "Jvp")
"""Transforms of torch.func inside of which FSDP2 cannot gather a unit, or keeps what it gathered."""


def is_in_func_gradient() -> bool:
    """Return whether code runs inside torch.func.grad, vjp (before torch 2.13 jvp), or what is made of these."""
    return any(each.key().name in TRANSFORMS_REFUSED for each in transforms() or ())


# Modules.


def registered(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict in which a module itself registers parameters; tensors of any kind can be put there."""
    return module._parameters


Convert = Callable[[torch.Tensor], torch.Tensor]
"""Function that `to`, `half`, `cuda` and the like apply to each parameter and buffer of a module."""


def check_conversions(module: nn.Module, check: Callable[[nn.Module, Convert], None]) -> None:
    """Call `check(module, convert)` before a module's tensors are converted; it raises to refuse."""
    here = ref(module)  # a module that referred to itself would be freed late

    def apply(convert: Convert, *args: Any, **kwargs: Any) -> nn.Module:
        module = here()
        assert module is not None
        check(module, convert)
        convert_module: Callable[..., nn.Module] = type(module)._apply
        return convert_module(module, convert, *args, **kwargs)

    module._apply = apply  # type: ignore[method-assign, assignment]


def storage_of(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage that a weak reference refers to; None if it is no more."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return found


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether a module's own buffer is part of its state dict."""
    return buffer not in module._non_persistent_buffers_set


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile(model)` wraps; any other model itself."""
    return getattr(model, "_orig_mod", model)


def without_wrappers(name: str) -> str:
    """Return a parameter's name without what `torch.compile(module)` and torch's `checkpoint_wrapper` add to it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def initializer_of(module: nn.Module) -> Callable[[], None] | None:
    """Return `reset_parameters`, or `_reset_parameters` as nn.MultiheadAttention calls it, or None."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def set_last_lr(schedule: Any, rates: list[Any]) -> None:
    """Set what `get_last_lr` of a scheduler of torch.optim returns."""
    schedule._last_lr = rates


# DTensor.

local_tensor_of: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")
"""Return the local tensor of a DTensor, without recording gradients as `to_local` does."""


def set_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor, in place."""
    tensor._local_tensor = local


def become(tensor: DTensor, other: DTensor) -> None:
    """Let a DTensor have the local tensor and the placements of another one, in place."""
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec


def spec_of(tensor: DTensor) -> Any:
    """Return mesh, placements and global shape of a DTensor, from which others like it are made at less cost."""
    return tensor._spec


def number_operator() -> Any:
    """Return the operator that makes the Python number of a tensor with one element."""
    return torch.ops.aten._local_scalar_dense.default


@cache
def detach_parts() -> None:
    """Let `detach` of a number of parts, such as a norm, stay one of parts.

    Torch 2.14 joins norms there, which all ranks must then run; one often takes a norm alone, to log it. Its rule is
    replaced by that of earlier releases, because a handler costs every other `detach` 10 to 20 us.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator if PROPAGATION.is_there else None
    detach = torch.ops.aten.detach.default
    if propagator is not None and propagator.op_single_dim_strategy_funcs.pop(detach, None) is not None:
        propagator.register_op_strategy(detach, _as_placed)


def _as_placed(schema: Any) -> Any:
    """Return DTensor's strategy for an operator that changes no placement: the inputs' own, at no cost."""
    schemas = import_module("torch.distributed.tensor._op_schema")
    inputs = schema.args_schema[0].strategies
    costs = [[0.0 if each is other else math.inf for other in inputs] for each in inputs]
    return schemas.OpStrategy(
        [
            schemas.OpSpec(output_specs=each.output_spec, input_specs=[each.output_spec], redistribute_cost=[cost])
            for each, cost in zip(inputs, costs, strict=True)
        ]
    )


Arguments = tuple[object, ...]
Keywords = dict[str, object]


def clipping_operators() -> tuple[Any, ...]:
    """Return the operators by which `clip_grad_norm_`, `get_total_norm` and `clip_grad_value_` take values."""
    aten = torch.ops.aten
    foreach = (aten._foreach_norm.Scalar, aten._foreach_clamp_min_.Scalar, aten._foreach_clamp_max_.Scalar)
    return aten.linalg_vector_norm.default, aten.clamp_.default, *foreach


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def replace_clipping(clip: Wrap, norm: Wrap, scale: Wrap) -> None:
    """Replace torch's functions that clip, take the norm of, and scale gradients, by what these return for them.

    Torch's `clip_grad_norm_` calls the other two by private names of its module, so that code which imported it by name
    is affected too.
    """
    module: Any = import_module("torch.nn.utils.clip_grad")
    utils: Any = torch.nn.utils
    clips, norms, scales = clip(utils.clip_grad_norm_), norm(utils.get_total_norm), scale(utils.clip_grads_with_norm_)
    utils.clip_grad_norm_ = module.clip_grad_norm_ = clips
    utils.get_total_norm, utils.clip_grads_with_norm_ = norms, scales
    if CLIPPING.is_there:
        module._get_total_norm, module._clip_grads_with_norm_ = norms, scales


Handler = Callable[[Any, Arguments, Keywords], Any]
"""Function that runs an operator on DTensors, from the operator, its arguments and its keywords."""


_handlers: dict[Any, list[Handler]] = {}
"""Handlers of each operator in the order in which they run; the last one may be DTensor's own."""


def handle_operators(handler: Handler, operators: Iterable[Any]) -> None:
    """Let `handler(operator, args, kwargs)` run operators on DTensors, in this process, before earlier handlers."""
    if not OPERATORS.is_there:
        return
    table: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for operator in operators:
        handlers = _handlers.setdefault(operator, [table[operator]] if operator in table else [])
        if handler not in handlers:
            handlers.insert(0, handler)
        table[operator] = handlers[0]


def run_next(handler: Handler, operator: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run an operator on DTensors by the handler after this one, or else as DTensor does; for use in handlers."""
    handlers = _handlers[operator]
    if (after := handlers.index(handler) + 1) < len(handlers):
        return handlers[after](operator, args, kwargs)
    table: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    first = table.pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        if first is not None:
            table[operator] = first


def tensor_operators() -> tuple[Any, ...]:
    """Return all operators of torch's own library, in all overloads; none where `handle_operators` does nothing."""
    if not OPERATORS.is_there:
        return ()
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    pairs = [name.partition(".")[::2] for name in names]
    packets: list[Any] = [(getattr(torch.ops.aten, name, None), overload or "default") for name, overload in pairs]
    return tuple(getattr(packet, overload) for packet, overload in packets if hasattr(packet, overload))


def name_of(operator: Any) -> str:
    """Return the name of an operator without its overload, such as `add_`."""
    name: str = schema_of(operator).name
    return name.partition("::")[2]


def out_of_place(operator: Any) -> Any:
    """Return the operator that computes what one in place writes, `add.Tensor` for `add_.Tensor`; others themselves."""
    packet = getattr(torch.ops.aten, name_of(operator).removesuffix("_"), None)
    return getattr(packet, operator._overloadname, operator)


class ExtremeOfParts(Partial):
    """Placement of the largest or smallest of all elements, of which ranks have those of their parts; NaN is kept.

    `Partial("max")` may drop NaN. The other names keep DTensor's rules for it away.
    """

    def __init__(self, kind: str) -> None:
        super().__init__({"max": "largest", "min": "smallest"}.get(kind, kind))

    def _reduce_value(self, tensor: torch.Tensor, mesh: Any, mesh_dim: int) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(mesh.size(mesh_dim))]
        dist.all_gather(parts, tensor, group=mesh.get_group(mesh_dim))
        return torch.stack(parts).amax() if self.reduce_op == "largest" else torch.stack(parts).amin()


def forget_meshes() -> None:
    """Clear DTensor's cache of shardings, which refers to meshes that no longer exist."""
    import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()


# Operators and dispatch modes.

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return the schema of an operator."""
COLLECTIVES = "_c10d_functional"
"""Namespace of torch's functional collectives, which DTensors call."""
SENDS_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators of this namespace that are not collectives."""
ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


def attention_operators(suffix: str = "") -> list[Any]:
    """Return the operators of fused attention that this torch has, with the `suffix` "_backward" those of backward."""
    found = (getattr(torch.ops.aten, f"_scaled_dot_product_{name}{suffix}", None) for name in ATTENTION)
    return [each for each in found if each is not None]


def grouped_product() -> Any:
    """Return the operator that multiplies rows by the weights of their experts (`torch.nn.functional.grouped_mm`)."""
    return torch.ops.aten._grouped_mm


def fp8_products() -> list[Any]:
    """Return the operators that multiply matrices of 8-bit floats, by their scales."""
    found = getattr(torch.ops.aten, "_scaled_mm", None)
    return [] if found is None else [found]


def is_cast(operator: Any) -> bool:
    """Return whether an operator copies a tensor to another dtype or device."""
    return operator is torch.ops.aten._to_copy


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float | None = None, dropout: float = 0.0
) -> torch.Tensor:
    """Return causal attention by CUDA's flash kernel, which aligns queries and keys at their ends."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    attended: torch.Tensor = kernel(query, key, value, dropout_p=dropout, is_causal=True, scale=scale)[0]
    return attended


Dispatch = Callable[[Any, Sequence[type], tuple[Any, ...], dict[str, Any]], Any]
"""Function that runs an operator, from the operator, the types of its tensors, its arguments and its keywords."""


def intercept(dispatch: Dispatch) -> AbstractContextManager[object]:
    """Return a context in which `dispatch` runs every operator."""
    mode: AbstractContextManager[object] = _dispatch_mode()(dispatch)
    return mode


@cache
def _dispatch_mode() -> Any:
    base: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode

    class Intercepted(base):  # type: ignore[misc]
        def __init__(self, dispatch: Dispatch) -> None:
            super().__init__()
            self.dispatch = dispatch

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self.dispatch(func, types, args, kwargs or {})

    return Intercepted


def fake_tensors() -> AbstractContextManager[object]:
    """Return a context in which tensors have shapes and dtypes, but neither memory nor values."""
    FAKE_TENSORS.require()
    mode: AbstractContextManager[object] = import_module("torch._subclasses").FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def fake_tensor_limits() -> tuple[type[Exception], ...]:
    """Return the errors by which fake tensors say that a model needs values or operators that they do not have."""
    FAKE_TENSORS.require()
    fakes = import_module("torch._subclasses.fake_tensor")
    return (
        fakes.DataDependentOutputException,
        fakes.DynamicOutputShapeException,
        fakes.UnsupportedOperatorException,
        NotImplementedError,
    )


# Process groups.


def _method(names: Iterable[str], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return the group's own method, which costs less than torch.distributed's function `wrapper` around it."""
    found = (getattr(dist.ProcessGroup, name, None) for name in names)
    return next((each for each in found if each is not None), lambda group, *given: wrapper(*given, group))


def gather_method() -> Callable[..., Any]:
    """Return the all-gather of single tensors, called with group, output and input; torch 2.13 renamed it."""

    def gather(output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Any:
        return dist.all_gather_into_tensor(output, part, group=group, async_op=True)

    return _method(("all_gather_single", "_allgather_base"), gather)


def reduce_scatter_method() -> Callable[..., Any]:
    """Return the reduce-scatter of single tensors, called with group, output, input and torch's options."""

    def reduce(output: torch.Tensor, full: torch.Tensor, options: Any, group: dist.ProcessGroup) -> Any:
        return dist.reduce_scatter_tensor(output, full, options.reduceOp, group=group, async_op=True)

    return _method(("reduce_scatter_single", "_reduce_scatter_base"), reduce)


@cache
def gather_under_short_names() -> object:
    """Make functional all-gathers of CPU tensors use `_allgather_base_`, in the whole process.

    Return the registration, which ends with the object; the cache of this function keeps it.

    Note: why. gloo runs a group's collectives on two threads. Each writes the name of a collective that it completed to
    the same string, without a lock (seen in torch 2.11 and 2.13). A name of up to 15 characters is inside the string
    object. A longer one has memory of its own, which both threads may free: "double free or corruption", or a crash
    much later. DTensor gathers by `allgather_into_tensor_coalesced_`, which gloo names in 19 characters, so
    `full_tensor()` of many small parameters could crash.
    """
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    if GATHERS.is_there:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # as is meant
            library.impl("allgather_into_tensor_coalesced_", _gather_each, "CPU")  # type: ignore[no-untyped-call]
    return library


def _gather_each(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any, async_op: bool = True) -> Any:
    """Start a gather of each input into its output, and return the work that ends with all of them.

    Note: below autograd, as in the operator that this replaces. gloo writes outputs from another thread, where autograd
    would refuse those of inputs that require gradients.
    """
    with torch._C._AutoDispatchBelowAutograd():
        pairs = [[_gathered(each) for each in pair] for pair in zip(outputs, inputs, strict=True)]
        works = [torch.ops.c10d._allgather_base_.default(*pair, group, async_op, -1)[1] for pair in pairs]
    if len(works) == 1:
        return works[0]
    every = torch.futures.collect_all([dist.Work.unbox(work).get_future() for work in works])
    return import_module("torch._C._distributed_c10d")._create_work_from_future(every).boxed()


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a dtype that gloo can gather: it has no int16, which masters keep as remainders."""
    return tensor.view(torch.float16) if tensor.dtype == torch.int16 else tensor


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of a group's collectives; torch's default if it does not tell. A fake group has none."""
    if not TIMEOUTS.is_there:
        return default_pg_timeout
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Change the timeout of a group's collectives."""
    change = found_by("torch.distributed:set_timeout")  # public since torch 2.14
    if change is None:
        change = found_by("torch.distributed.distributed_c10d:_set_pg_timeout")
    change(timeout, group)


def another_connection() -> Any:
    """Return a connection of its own to the store of the default process group."""
    return import_module("torch.distributed.distributed_c10d")._get_default_store().clone()


def is_in_default_store(group: dist.ProcessGroup | None) -> bool:
    """Return whether a process group (None: the default one) met in the store of the default one.

    One that met elsewhere, as trainers and inference engines do, may say that its ranks are those of the default group.

    Raises:
        KeyError, TypeError, ValueError: It is no group that torch knows.
    """
    c10d = import_module("torch.distributed.distributed_c10d")
    return is_default_store(c10d._get_process_group_store(group or dist.group.WORLD))


def are_all_in_default_store() -> bool:
    """Return whether all process groups of this process met in the store of the default one."""
    c10d = import_module("torch.distributed.distributed_c10d")
    return all(is_default_store(store) for _, store in [*c10d._world.pg_map.values()])


def is_default_store(store: Any) -> bool:
    """Return whether a store is that of the default process group, whatever prefixes it has."""
    default = import_module("torch.distributed.distributed_c10d")._get_default_store()
    return _innermost(store) is _innermost(default)


def _innermost(store: Any) -> Any:
    """Return the store that the prefixes of `store` are put before."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def group_called(name: str) -> dist.ProcessGroup:
    """Return the process group with this name, by which functional collectives refer to it."""
    found: dist.ProcessGroup = import_module("torch.distributed.distributed_c10d")._resolve_process_group(name)
    return found


def fake_store() -> Any:
    """Return the store of a process group whose collectives move nothing."""
    FAKE_GROUPS.require()
    return import_module("torch.testing._internal.distributed.fake_pg").FakeStore()


# The profiler and the allocator's history.


def is_profiling() -> bool:
    """Return whether torch's profiler runs; True where torch does not tell."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


def profile_every_thread() -> Any:
    """Return the profiler setting without which traces leave out threads that it did not start, or None."""
    config = getattr(torch.profiler, "_ExperimentalConfig", None)
    return None if config is None else config(profile_all_threads=True)


def record_allocations(most: int | None) -> None:
    """Record the allocator's last `most` events on CUDA, or stop with None.

    Raises:
        RuntimeError: This torch records no history.
    """
    memory: Any = torch.cuda.memory
    if not hasattr(memory, "_record_memory_history") or not hasattr(memory, "_dump_snapshot"):
        raise RuntimeError(f"torch {torch.__version__} records no memory history; set profile.memory_snapshot=false")
    if most is None:
        memory._record_memory_history(enabled=None)
    else:
        memory._record_memory_history(max_entries=most)


def dump_allocations(path: str) -> None:
    """Write the allocator's blocks, and its history where it is recorded, to a pickle that is never read here.

    Raises:
        RuntimeError: This torch writes none.
    """
    memory: Any = torch.cuda.memory
    if not hasattr(memory, "_dump_snapshot"):
        raise RuntimeError(f"torch {torch.__version__} writes no snapshot of memory")
    memory._dump_snapshot(path)

"""Construction of a module of one's own, of which at most `live_bytes` exist at a time, with the values of a plain one.

    with dzero.empty_init() as init:
        model = MyModel()
    sharded = dzero.shard(model, stage=3, init=init)

Operators run as they would, on real tensors, one after another, so constructors and initializers may do anything. What
they did to the large storages is kept (zero/value_history.py), and from time to time the values of parameters are
dropped. They are made again when an operator needs them, and at last, unit by unit, when the model is sharded. Outside
of the context, such parameters are on meta.

    values                                                        parameter
    large, made by operators of torch                             on meta, made again by `EmptyInit.fill`
    of less than `MIN_BYTES`, and all buffers                     as they are
    from outside: files, NumPy, operators of other libraries      as they are
    seen by others through an address (`numpy`, `data_ptr`)       as they are
    of more than `MAX_CALLS` calls                                as they are
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from dzero.utils.torch_internals import intercept, registered, storage_key
from dzero.zero.init_recorder import MIN_BYTES, AddressWatch, InitRecorder
from dzero.zero.units import swap
from dzero.zero.value_history import Operand


class EmptyInit:
    """Values that a module was constructed with, for `init=` of `shard`."""

    def __init__(self) -> None:
        self._values: dict[nn.Parameter, Operand] = {}
        self._made: weakref.WeakValueDictionary[nn.Parameter, nn.Parameter] = weakref.WeakValueDictionary()

    def keep(self, param: nn.Parameter, values: Operand) -> None:
        """Note the values of a parameter on meta."""
        self._values[param] = values

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Replace the parameters on meta of a module, and of those inside it, by ones that have their values."""
        found = {param for each in module.modules() for param in registered(each).values() if param in self._values}
        made = {param: self._made.get(param) for param in found if param is not None}
        for param in [param for param, known in made.items() if known is None]:
            made[param] = self._made[param] = _with_attributes_of(param, _compact(self._values[param].replay()))
        swap([module], {param: new for param, new in made.items() if new is not None})


@contextmanager
def empty_init(live_bytes: int = 256 << 20) -> Iterator[EmptyInit]:
    """Construct modules without holding the values of all their parameters at once.

    Afterwards, large parameters are on meta, and `shard(..., init=init)` gives each unit its values, rank 0's on all
    ranks, as for a module that was constructed plainly. `init.fill(module)` does so without sharding. Modules must be
    constructed in the thread that enters.

    Args:
        live_bytes: Bytes that may be made before values are dropped again.

    Yields:
        The values, of about 6 KB per large parameter.

    Warns:
        UserWarning: Parameters of more than `live_bytes` keep their values; it says why.
    """
    init, modules = EmptyInit(), weakref.WeakSet[nn.Module]()
    recorder = InitRecorder(live_bytes, lambda: _params_of(modules))

    def note(module: nn.Module, _: str, inner: object) -> None:
        modules.add(module)
        if isinstance(inner, nn.Module):
            modules.add(inner)

    with ExitStack() as stack:
        stack.callback(_leave, init, recorder, modules)
        for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
            stack.callback(register(note).remove)
        stack.enter_context(AddressWatch(recorder))
        stack.enter_context(intercept(recorder.run))
        yield init


def _params_of(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of modules and of all inside them, which a deep copy does not announce."""
    found = {inner for module in modules for inner in module.modules()}
    return {param for module in found for param in registered(module).values() if type(param) is nn.Parameter}


def _leave(init: EmptyInit, recorder: InitRecorder, modules: Iterable[nn.Module]) -> None:
    """Replace parameters by ones on meta where their values can be made again, and make all other values again."""
    params = _params_of(modules)
    sharing = Counter(storage_key(param.untyped_storage()) for param in params)
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for param in params:
        alone = sharing[storage_key(param.untyped_storage())] == 1  # else tied by .data, which `shard` refuses
        values = recorder.values_of(param) if alone else None
        if values is not None:
            replaced[param] = _with_attributes_of(param, torch.empty_like(param, device="meta"))
            init.keep(replaced[param], values)
    swap(list(modules), replaced)
    kept = sum(param.nbytes for param in params - replaced.keys() if param.nbytes >= MIN_BYTES)
    params.clear()
    replaced.clear()
    recorder.restore_all()
    if kept > recorder.live_bytes:
        warnings.warn(
            f"empty_init: parameters of {kept / 2**30:.2f} GiB keep their values, since they came from outside "
            "(files, NumPy, other libraries), were read by their address, or took too many calls to make",
            stacklevel=4,
        )


def _with_attributes_of(param: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """Return a parameter with other values, and what was set on `param`."""
    made = nn.Parameter(values, param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, in a storage that has nothing else."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

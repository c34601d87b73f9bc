"""Recording of what operators do to large storages while modules are constructed, and dropping of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from dzero.utils.torch_internals import schema_of, storage_key, storage_of, tree_leaves, tree_map_only
from dzero.zero.value_history import Call, GeneratorState, History, Operand, Source, default_generator

MIN_BYTES = 1 << 16
"""Least size of a storage whose values can be dropped: the state of a generator, which most need, has 5,056 bytes."""
MAX_CALLS = 256
"""Most calls that making values again may take."""
FILLS = {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_"}
"""Operators whose result does not depend on the values of the tensor that they write to."""
ADDRESSES = {
    *("numpy", "__array__", "__dlpack__", "data_ptr", "share_memory_"),
    *("storage", "untyped_storage", "_typed_storage"),
}
"""Methods through which others read or write without an operator."""


class _Record:
    """A storage: a weak reference, its source, and its history. None: its values cannot be made again.

    Attributes:
        shown: Whether others may write to it without operators.
    """

    def __init__(self, storage: torch.UntypedStorage, history: History | None) -> None:
        self.weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.source = Source(storage.nbytes(), storage.device)
        self.history, self.shown = history, False

    @property
    def exists(self) -> bool:
        """Whether the storage still exists."""
        return not self.weak.expired()  # type: ignore[no-untyped-call]

    def write(self, call: Call | None, *, whole: bool) -> None:
        """Note a call that wrote to it. None: with unknown values. whole: it does not depend on what was there."""
        before = History() if whole else self.history
        after = None if call is None or before is None or self.shown else before.then(call)
        self.history = after if after is not None and after.cost <= MAX_CALLS else None


class InitRecorder:
    """Keeper of the histories of large storages, which drops the values of parameters from time to time.

    Args:
        live_bytes: As in `empty_init`.
        params: Function that returns the parameters whose values may be dropped.
    """

    def __init__(self, live_bytes: int, params: Callable[[], set[nn.Parameter]]) -> None:
        self.live_bytes, self._params = live_bytes, params
        self._records: dict[int, _Record] = {}
        self._made_bytes = 0

    def run(self, func: Any, types: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Run an operator on values that are there, and note what it wrote or made."""
        operands, written = _tensors((args, given)), _tensors(_written(func, args, given))
        whole = _fills(func, args)
        for each in operands[1:] if whole else operands:
            self.restore(each)
        blank = whole and self._allocate(operands[0])
        keys = [_key(each) for each in written]
        described = self._describe(func, args, given, {*keys})
        generator = given.get("generator") or default_generator(_device_of(operands, given))
        state = generator.get_state()
        try:
            out = func(*args, **given)
        except BaseException:
            if blank:
                self._replay(self._records[keys[0]], operands[0].untyped_storage())
            raise
        call = None
        if described is not None:
            changed = not torch.equal(state, generator.get_state())
            random = (generator.device, state) if changed else None
            call = _call(func, described, out, random, own_generator=given.get("generator") is not None)
        for each, key in zip(written, keys, strict=True):
            self._note_write(each, key, call, whole=whole)
        self._note_outputs(func, call, out, {_key(each) for each in operands})
        if self._made_bytes > self.live_bytes:
            self._made_bytes = 0
            self._drop({_key(each) for each in (*operands, *_tensors(out))})
        return out

    def values_of(self, param: nn.Parameter) -> Operand | None:
        """Return how to make the values of a parameter again; None if they must stay."""
        record = self._records.get(_key(param)) if _is_plain(param) else None
        return None if record is None or record.history is None else Operand.of(param, record.source, record.history)

    def show(self, tensor: torch.Tensor) -> None:
        """Keep the values of a tensor from now on, because others see them without operators."""
        tensor.detach()  # an operator, before which values are made again
        record = self._records.setdefault(_key(tensor), _Record(tensor.untyped_storage(), None))
        record.shown, record.history = True, None

    def restore(self, tensor: torch.Tensor) -> None:
        """Make the values of a tensor's storage again, if they were dropped."""
        if self._allocate(tensor):
            self._replay(self._records[_key(tensor)], tensor.untyped_storage())

    def restore_all(self) -> None:
        """Make all values again that were dropped and that somebody still has."""
        for record in self._records.values():
            storage = storage_of(record.weak)
            if storage is not None and storage.nbytes() < record.source.nbytes:
                storage.resize_(record.source.nbytes)
                self._replay(record, storage)

    def _replay(self, record: _Record, storage: torch.UntypedStorage) -> None:
        assert record.history is not None  # else it would not have been dropped
        with torch.no_grad():
            record.source.replay(record.history, into=storage)

    def _allocate(self, tensor: torch.Tensor) -> bool:
        """Give a tensor's storage its memory if it has none; return whether it had none."""
        record, storage = self._records.get(_key(tensor)), tensor.untyped_storage()
        if record is None or storage.nbytes() >= record.source.nbytes:
            return False
        storage.resize_(record.source.nbytes)
        self._made_bytes += record.source.nbytes
        return True

    def _describe(self, func: Any, args: Any, kwargs: Any, written: set[int]) -> tuple[Any, Any] | None:
        """Return the arguments of a call with operands for tensors; None if it cannot be made again.

        A replay has the storage that is `written` already, so its operand needs no history.
        """
        leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if func.namespace != "aten" or not all(map(self._is_known, leaves)):
            return None
        itself = written if len(written) == 1 else set()
        given = {key: kwargs[key] for key in kwargs if key != "generator"}
        described: tuple[Any, Any] = tree_map_only(
            torch.Tensor, lambda each: self._operand(each, itself), (args, given)
        )
        return described

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether values can be made again, or copied."""
        if not _is_plain(tensor):
            return False
        record = self._records.get(_key(tensor))
        return _is_small(tensor) if record is None else record.history is not None

    def _operand(self, argument: torch.Tensor, itself: set[int]) -> Operand | torch.Tensor:
        record = self._records.get(_key(argument))
        if record is None:
            return argument.detach().clone()
        assert record.history is not None
        history = History() if _key(argument) in itself else record.history
        return Operand.of(argument, record.source, history)

    def _note_write(self, tensor: torch.Tensor, key: int, call: Call | None, *, whole: bool) -> None:
        storage = tensor.untyped_storage()
        record = self._records.get(key)
        if record is None and whole and not _is_small(tensor) and storage.resizable():
            record = self._records[key] = _Record(storage, None)
        if record is None:
            return
        moved = _key(tensor) != key or storage.nbytes() != record.source.nbytes  # set_, resize_
        record.write(None if moved else call, whole=whole)

    def _note_outputs(self, func: Any, call: Call | None, out: Any, known: set[int]) -> None:
        for index, each in enumerate(tree_leaves(out)):
            if not _is_plain(each) or _is_small(each) or (key := _key(each)) in known or key in self._records:
                continue
            storage = each.untyped_storage()
            self._made_bytes += storage.nbytes()
            if not storage.resizable():
                continue
            blank = "empty" in schema_of(func).name  # has no values yet
            history = None if call is None else History() if blank else History().then(call, index)
            self._records[key] = _Record(storage, history if history and history.cost <= MAX_CALLS else None)

    def _drop(self, in_use: set[int]) -> None:
        """Drop the values of all parameters that can be made again, and forget storages that are no more."""
        for param in self._params():
            record = self._records.get(_key(param)) if _is_plain(param) else None
            if record is not None and record.history is not None and _key(param) not in in_use:
                param.untyped_storage().resize_(0)
        self._records = {key: record for key, record in self._records.items() if record.exists}


class AddressWatch(TorchFunctionMode):
    """Mode that keeps the values of tensors whose address is taken."""

    def __init__(self, recorder: InitRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, after the values are there and kept."""
        if getattr(func, "__name__", "") in ADDRESSES and args and _is_plain(args[0]):
            self._recorder.show(args[0])
        return func(*args, **(kwargs or {}))


def _call(
    func: Any, described: tuple[Any, Any], out: Any, random: GeneratorState | None, *, own_generator: bool
) -> Call:
    """Return a call that depends on no default: dtype and device of what a factory made become arguments."""
    args, kwargs = described
    is_factory = isinstance(out, torch.Tensor) and not any(isinstance(each, Operand) for each in tree_leaves(described))
    if is_factory and not _tensors(described):
        names = {argument.name for argument in schema_of(func).arguments}
        kwargs = {**kwargs, **{name: getattr(out, name) for name in ("dtype", "device") if name in names}}
    return Call(func, args, kwargs, random, own_generator)


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the plain tensors of a tree."""
    return [each for each in tree_leaves(tree) if _is_plain(each)]


def _is_plain(each: Any) -> bool:
    """Return whether it is a tensor, of no other class, with memory of its own."""
    return type(each) in (torch.Tensor, nn.Parameter) and each.layout is torch.strided and not each.is_meta


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() < MIN_BYTES


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to."""
    names = [argument.name for argument in schema_of(func).arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    writes = [
        each.name for each in schema_of(func).arguments if each.alias_info is not None and each.alias_info.is_write
    ]
    return [given[name] for name in writes if given.get(name) is not None]


def _fills(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator writes all values of its first operand's storage, and reads none of them."""
    if func.namespace != "aten" or schema_of(func).name.removeprefix("aten::") not in FILLS or not _is_plain(args[0]):
        return False
    first, others = args[0], _tensors(args[1:])
    covered = first.is_contiguous() and first.numel() * first.element_size() == first.untyped_storage().nbytes()
    return covered and all(_key(each) != _key(first) for each in others)


def _device_of(operands: list[torch.Tensor], kwargs: Mapping[str, Any]) -> torch.device:
    return operands[0].device if operands else torch.device(kwargs.get("device") or "cpu")

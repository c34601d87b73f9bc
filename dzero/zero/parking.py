"""Parking: all states leave the device between two phases of training, and come back to the same tensors.

    park      save      every storage is copied to page-locked host memory, or to an unnamed file
              free      the device's memory is freed, once all of it is saved
    unpark    restore   memory is allocated again, and filled with the same bytes

A storage is what tensors are views of: that of a parameter's shard, a master, or a moment. It is resized to nothing and
back in place, so tensors stay what they are, but their addresses change (`StateHolder.forget_addresses`). Until then,
whatever would read the states raises: kernels would read memory that is not there.

What is on the host or on disk stays there. The device keeps the model's buffers, which modules read without telling
anyone, and the optimizer's bookkeeping of a few bytes for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from dzero import streams
from dzero.hardware import format_bytes, give_back_freed_memory, host_available_bytes
from dzero.utils.forward_hooks import before_forward
from dzero.utils.launched import local_ranks
from dzero.zero.dtensors import local_of
from dzero.zero.init_on_disk import InitSpillFile, SpilledTensor
from dzero.zero.offloaded_param import memory_of
from dzero.zero.unit import PARKED, Unit, as_module

WHERE = ("host", "disk")
CHUNK_BYTES = 64 << 20
"""Size of a piece of page-locked memory: a power of 2, to which torch's allocator would round it up anyway."""
INSTEAD = "take park(where='disk')"


class StateHolder(Protocol):
    """Optimizer of a sharded model, as parking sees it."""

    def await_updates(self) -> None:
        """Wait for the updates of the last step."""

    def device_tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors of all states that are stored on the device."""

    def forget_addresses(self) -> None:
        """Drop what depends on the addresses of the states, which are about to change."""


class Copies(Protocol):
    """Copies of storages, by their offset in the order in which they were saved."""

    def save(self, offset: int, data: torch.Tensor) -> None:
        """Start copying `data`, uint8 [bytes] on the device."""

    def load(self, offset: int, data: torch.Tensor) -> None:
        """Start filling `data` with what was saved."""


class Parking:
    """States of a sharded model off the device, until `restore`.

    Args:
        units: Units of the model.
        holders: Optimizers of the model.
        device: The device.
        where: "host" or "disk".
        path: Directory of the file.

    Attributes:
        freed_bytes: Bytes that were freed on the device.

    Raises:
        MemoryError: There is too little host memory; everything is still on the device.
        DiskError: The disk is too small or fails; everything is still on the device.
    """

    def __init__(
        self, units: Sequence[Unit], holders: Iterable[StateHolder], device: torch.device, where: str, path: str
    ) -> None:
        self._units, self._holders, self._device = units, [*holders], device
        for holder in self._holders:
            holder.await_updates()
        for unit in units:
            unit.await_update()
        self._saved = _at_offsets(_storages(units, self._holders, device))
        self.freed_bytes = sum(each.count for each in self._saved)
        self._copies = self._save(where, path)
        self._refusals: list[RemovableHandle] = []

    def _save(self, where: str, path: str) -> Copies:
        """Return copies of all storages, which nothing on the device uses any more."""
        copies: Copies
        copies = HostCopies(self.freed_bytes, self._device) if where == "host" else DiskCopies(self.freed_bytes, path)
        for each in self._saved:
            copies.save(each.offset, each.data())
        streams.synchronize_device(self._device)  # an error of the device is raised while all states are there
        return copies

    def free(self) -> None:
        """Free the device's memory; whatever would read the states raises from now on, until `restore`."""
        for unit in self._units:
            unit.is_parked = True
        for module in (as_module(module) for unit in self._units for module in unit.modules):
            self._refusals += [
                before_forward(module, _refuse, prepend=True),  # before FSDP2's, whose state must not change
                module.register_state_dict_pre_hook(_refuse),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(_refuse),  # type: ignore[no-untyped-call]
            ]
        for holder in self._holders:
            holder.forget_addresses()
        self._resize_to_nothing(self._saved)

    def restore(self) -> None:
        """Bring all states back to the device, also if `free` was interrupted; if that fails, all of them stay parked.

        Raises:
            MemoryError: The device has too little memory.
            DiskError: The file cannot be read, or is not what was written.
        """
        restored: list[_Saved] = []
        try:
            for each in self._saved:
                restored.append(each)
                each.storage.resize_(each.count)
                self._copies.load(each.offset, each.data())
            streams.synchronize_device(self._device)
        except torch.OutOfMemoryError as error:
            self._resize_to_nothing(restored)
            raise MemoryError(
                f"unpark(): the device has no room for {format_bytes(self.freed_bytes)} of parked states: free what "
                "took it meanwhile, and call unpark() again"
            ) from error
        except BaseException:  # KeyboardInterrupt too
            self._resize_to_nothing(restored)
            raise
        for handle in self._refusals:
            handle.remove()
        for unit in self._units:
            unit.is_parked = False

    def _resize_to_nothing(self, some: Iterable[_Saved]) -> None:
        for each in some:
            each.storage.resize_(0)
        if (module := streams.device_module(self._device)) is not None:
            module.empty_cache()  # for other processes
        give_back_freed_memory()


@dataclass(frozen=True)
class _Saved:
    """A storage of `count` bytes, and its offset among all that are saved."""

    storage: torch.UntypedStorage
    count: int
    offset: int

    def data(self) -> torch.Tensor:
        """Return the storage's bytes, uint8 [count]."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


def _at_offsets(storages: Iterable[torch.UntypedStorage]) -> list[_Saved]:
    found, offset = [], 0
    for storage in storages:
        found.append(_Saved(storage, storage.nbytes(), offset))
        offset += storage.nbytes()
    return found


def _storages(
    units: Iterable[Unit], holders: Iterable[StateHolder], device: torch.device
) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of all states on the device once, but those that torch cannot free, as NumPy uses them too."""
    seen: set[int] = set()
    for tensor in _tensors(units, holders):
        storage = tensor.untyped_storage()
        if storage.device.type == device.type and storage.nbytes() and storage.resizable():
            if storage.data_ptr() not in seen:
                yield storage
            seen.add(storage.data_ptr())


def _tensors(units: Iterable[Unit], holders: Iterable[StateHolder]) -> Iterator[torch.Tensor]:
    for unit in units:
        for param in unit.params.values():
            if (memory := memory_of(param)) is None:
                yield local_of(param)
            elif memory.is_on_device:
                yield memory.flat
        for origin in unit.origin.values():  # of no optimizer yet, or of one that no longer exists
            yield from (value for value in vars(origin).values() if isinstance(value, torch.Tensor))
    for holder in holders:
        yield from holder.device_tensors()


def _refuse(*_: Any) -> None:
    raise RuntimeError(PARKED)


class HostCopies:
    """Copies in host memory, page-locked beside a GPU, in chunks that no allocator rounds up.

    Ranks of a host do not wait for each other. Each takes a chunk only while there is one for all of them, so a rank
    that comes late is not refused what the others left for it.

    Args:
        needed_bytes: Size of all copies.
        device: Device of what is copied.

    Raises:
        MemoryError: The host has too little memory, or refuses it; `save` raises it too.
    """

    def __init__(self, needed_bytes: int, device: torch.device) -> None:
        self._needed_bytes, self._device = needed_bytes, device
        self._chunks: list[torch.Tensor] = []
        self._require(needed_bytes)

    def save(self, offset: int, data: torch.Tensor) -> None:
        """Implement `Copies.save`."""
        for chunk, piece in self._pieces(offset, data):
            chunk.copy_(piece, non_blocking=True)

    def load(self, offset: int, data: torch.Tensor) -> None:
        """Implement `Copies.load`."""
        for chunk, piece in self._pieces(offset, data):
            piece.copy_(chunk, non_blocking=True)

    def _pieces(self, offset: int, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parts of chunks with the parts of `data` that belong there; the first use of a chunk allocates it."""
        done = 0
        while done < len(data):
            index, begin = divmod(offset + done, CHUNK_BYTES)
            if index == len(self._chunks):
                self._chunks.append(self._chunk(min(CHUNK_BYTES, self._needed_bytes - index * CHUNK_BYTES)))
            count = min(CHUNK_BYTES - begin, len(data) - done)
            yield self._chunks[index][begin : begin + count], data[done : done + count]
            done += count

    def _chunk(self, size: int) -> torch.Tensor:
        self._require(size * local_ranks())
        try:
            return streams.pin_memory(torch.empty(size, dtype=torch.uint8), self._device)
        except RuntimeError as error:
            raise MemoryError(f"{self._needs()}, which the system refuses: {INSTEAD}") from error

    def _require(self, count: int) -> None:
        if count > (available := host_available_bytes()):
            raise MemoryError(f"{self._needs()}; {format_bytes(available)} are available now: {INSTEAD}")

    def _needs(self) -> str:
        return f"park(where='host') needs {format_bytes(self._needed_bytes)} of host memory on each rank"


class DiskCopies:
    """Copies in an unnamed file, whose space is reserved before the first is written."""

    def __init__(self, needed_bytes: int, path: str) -> None:
        self._file = InitSpillFile(path, needed_bytes, "parked states")
        self._spilled: dict[int, SpilledTensor] = {}

    def save(self, offset: int, data: torch.Tensor) -> None:
        """Implement `Copies.save`; the copy has ended on return."""
        # A copy on the CPU too: torch cannot free memory any more that NumPy has seen.
        self._spilled[offset] = self._file.keep(f"storage {len(self._spilled)}", data.to("cpu", copy=True))

    def load(self, offset: int, data: torch.Tensor) -> None:
        """Implement `Copies.load`."""
        data.copy_(self._spilled[offset].get())

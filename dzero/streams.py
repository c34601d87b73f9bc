"""Streams and events of a device; no other file creates, records, or waits for them.

    call             effect
    wait_event       the current stream waits for an event; the host continues
    wait_stream      the current stream waits for all work enqueued on another stream so far; the host continues
    synchronize      the host waits for an event
    record_stream    the allocator reuses a tensor's memory only after the current stream has reached this point

A CPU has no streams. There, functions that return a stream or an event return None. None is accepted in place of any
stream or event, as a wait for work that has already ended. Tests simulate streams on a CPU by replacing
`device_module`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch

Stream = Any
"""`torch.Stream` of a device, or None. Typed as Any: in some releases, torch.cuda.Stream is not a subclass of it."""
Event = Any
"""`torch.Event`, or None."""


def device_module(device: torch.device) -> Any | None:
    """Return the torch module with the streams of `device`, such as torch.cuda, or None if it has no streams."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device.type)


def exist(device: torch.device) -> bool:
    """Return whether work on `device` is enqueued on streams, so that it may still be running when a call returns."""
    return device_module(device) is not None


def new_stream(device: torch.device) -> Stream:
    """Return a new stream, which runs concurrently with all others."""
    module = device_module(device)
    return None if module is None else module.Stream(device=device)


def current_stream(device: torch.device) -> Stream:
    """Return the current stream of this thread."""
    module = device_module(device)
    return None if module is None else module.current_stream(device)


def use_stream(stream: Stream, device: torch.device) -> AbstractContextManager[Any]:
    """Make `stream` the current stream of this thread within the context."""
    module = device_module(device)
    return nullcontext() if module is None or stream is None else module.stream(stream)


def this_device(device: torch.device) -> torch.device:
    """Return `device` with an index, which by default is that of this thread's current device."""
    module, index = device_module(device), cast("int | None", device.index)
    return device if module is None or index is not None else torch.device(device.type, module.current_device())


def set_device(device: torch.device) -> None:
    """Make `device`, which must have an index, this thread's current device.

    A thread otherwise uses the first device, and allocates memory there.
    """
    module = device_module(device)
    if module is not None:
        module.set_device(device)


def record_event(device: torch.device, *, sleeps: bool = False) -> Event:
    """Record and return an event after all work that was enqueued on the current stream so far.

    Args:
        device: Device of the stream.
        sleeps: Whether the host sleeps while it synchronizes with the event, which leaves its core to other threads.
            By default it spins.
    """
    module = device_module(device)
    if module is None:
        return None
    event = module.Event(blocking=sleeps)
    event.record(module.current_stream(device))
    return event


def wait_event(event: Event, device: torch.device) -> None:
    """Make the current stream wait for `event`."""
    module = device_module(device)
    if module is not None and event is not None:
        module.current_stream(device).wait_event(event)


def wait_stream(stream: Stream, device: torch.device) -> None:
    """Make the current stream wait for all work that was enqueued on `stream` so far."""
    module = device_module(device)
    if module is not None and stream is not None:
        module.current_stream(device).wait_stream(stream)


def synchronize(event: Event, holding: Iterable[torch.Tensor] = ()) -> None:
    """Block the host until the device has reached `event`.

    Args:
        event: Event to wait for.
        holding: Tensors that the caller must keep alive until then.
    """
    del holding  # documents the lifetime at the call site; tests replace this function and check it
    if event is not None:
        event.synchronize()


def pin_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor`, which is on the host, in page-locked memory, so that copies to `device` need not block.

    torch's allocator of page-locked memory reuses it only after the copies from it have ended.
    """
    return tensor if device_module(device) is None else tensor.pin_memory()


def is_over(event: Event) -> bool:
    """Return whether the device has reached `event`; any thread may call this."""
    return event is None or bool(event.query())


def synchronize_device(device: torch.device) -> None:
    """Block the host until all streams of `device` have finished."""
    module = device_module(device)
    if module is not None:
        module.synchronize(device)


def record_stream(tensor: torch.Tensor) -> None:
    """Delay the reuse of the memory of `tensor`, once it is freed, until the current stream has reached this point.

    This is needed if a tensor is used on another stream than the one that it was allocated on, and is freed without a
    wait between the two.
    """
    module = device_module(tensor.device)
    if module is not None:
        tensor.record_stream(module.current_stream(tensor.device))


class Loan(NamedTuple):
    """Tensor that was allocated on stream `home`, and the event after its use on another stream."""

    tensor: torch.Tensor
    event: Event
    home: Stream


class Loans:
    """Tensors that are kept alive until the stream they were allocated on has waited for their use on another stream.

    If such a tensor were freed earlier, the next tensor of the allocating stream could take its memory and overwrite
    it while it is read. Like FSDP2 for its own buffers, `make` inserts the wait into the allocating stream, so that
    memory is reused at a known point. With `record_stream`, memory would be reused once the host finds that its use has
    ended, so a host that runs ahead would allocate new memory each time. `make` does not wait for the last loan, whose
    use overlaps with the next tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._home: Stream = None
        self._loans: deque[Loan] = deque()

    def make(self) -> None:
        """Wait for, and release, all loans but the last; call this before an allocation on the current stream."""
        if not exist(self._device):
            return
        self._home = current_stream(self._device)
        while len(self._loans) > 1 and self._loans[0].home == self._home:
            wait_event(self._loans.popleft().event, self._device)

    def clear(self) -> None:
        """Take back all loans: the current stream, which their own streams wait for first, waits for the readers."""
        for loan in self._loans:
            wait_event(loan.event, self._device)
        self._loans.clear()

    def lend(self, tensor: torch.Tensor) -> None:
        """Hold a tensor, which was allocated after the last `make`, until the current stream has used it."""
        if exist(self._device):
            self._loans.append(Loan(tensor, record_event(self._device), self._home))

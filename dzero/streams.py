"""Streams and events of a device: the only file that makes, records, or waits for them.

    call                 who waits, and for what
    wait_event           a stream waits for an event; the host goes on
    wait_stream          a stream waits for all that another was given so far; the host goes on
    synchronize          the host waits for an event
    record_stream        the allocator waits: a tensor's memory is given away only when a stream has come this far

A CPU has no streams: what is asked for then is None, and None may be passed wherever a stream or an event is taken, as
a wait for what has ended already. Tests let a CPU have simulated streams by replacing `device_module`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch

Stream = Any
"""`torch.Stream` of a device, or None. The classes of torch.cuda are not those of torch.Stream in every release."""
Event = Any
"""`torch.Event`, or None."""


def device_module(device: torch.device) -> Any | None:
    """Return the module of torch that has a device's streams (torch.cuda), or None for a device without streams."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device.type)


def exist(device: torch.device) -> bool:
    """Return whether work on `device` is enqueued on streams, so that it may still run when a call returns."""
    return device_module(device) is not None


def new_stream(device: torch.device) -> Stream:
    """Make a stream, which runs beside all others."""
    module = device_module(device)
    return None if module is None else module.Stream(device=device)


def current_stream(device: torch.device) -> Stream:
    """Return the stream on which this thread enqueues work now."""
    module = device_module(device)
    return None if module is None else module.current_stream(device)


def use_stream(stream: Stream, device: torch.device) -> AbstractContextManager[Any]:
    """Enqueue what this thread does inside on `stream`."""
    module = device_module(device)
    return nullcontext() if module is None or stream is None else module.stream(stream)


def this_device(device: torch.device) -> torch.device:
    """Return `device` with its number: where it has none, that of the device that this thread uses."""
    module, index = device_module(device), cast("int | None", device.index)
    return device if module is None or index is not None else torch.device(device.type, module.current_device())


def set_device(device: torch.device) -> None:
    """Let this thread use `device`, which has a number. Else it would use the first, and take memory there."""
    module = device_module(device)
    if module is not None:
        module.set_device(device)


def record_event(device: torch.device, *, sleeps: bool = False) -> Event:
    """Return an event behind all that the current stream was given so far.

    sleeps: whether a host that synchronizes with it sleeps meanwhile, and leaves its core to others; else it spins.
    """
    module = device_module(device)
    if module is None:
        return None
    event = module.Event(blocking=sleeps)
    event.record(module.current_stream(device))
    return event


def wait_event(event: Event, device: torch.device) -> None:
    """Let the current stream wait for `event`."""
    module = device_module(device)
    if module is not None and event is not None:
        module.current_stream(device).wait_event(event)


def wait_stream(stream: Stream, device: torch.device) -> None:
    """Let the current stream wait for what `stream` was given so far."""
    module = device_module(device)
    if module is not None and stream is not None:
        module.current_stream(device).wait_stream(stream)


def synchronize(event: Event, holding: Iterable[torch.Tensor] = ()) -> None:
    """Return when the device has come to `event`. `holding` is what the caller keeps from being freed until then."""
    del holding  # named for the reader, and for tests that leave it out
    if event is not None:
        event.synchronize()


def pin_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor`, from the host, in page-locked memory, so that a copy to `device` need not block.

    Its memory is given to others only when the copies from it are over: torch's allocator of it sees to that.
    """
    return tensor if device_module(device) is None else tensor.pin_memory()


def is_over(event: Event) -> bool:
    """Return whether the device has come to `event`. From any thread."""
    return event is None or bool(event.query())


def synchronize_device(device: torch.device) -> None:
    """Return when all streams of `device` have come to their ends."""
    module = device_module(device)
    if module is not None:
        module.synchronize(device)


def record_stream(tensor: torch.Tensor) -> None:
    """Keep the memory of `tensor`, once it is freed, from others until the current stream has come this far.

    Needed where a tensor is used on another stream than the one that was current when it was made, and freed without
    a wait between the two.
    """
    module = device_module(tensor.device)
    if module is not None:
        tensor.record_stream(module.current_stream(tensor.device))


class Loan(NamedTuple):
    """A tensor made on stream `home`, and the event on another stream behind what reads it there."""

    tensor: torch.Tensor
    event: Event
    home: Stream


class Loans:
    """Tensors that are held until the stream they were made on has waited for those who read them on another.

    Freed before, their memory would go to the next tensor of that stream, which may be written while they are read. As
    FSDP2 does with its own buffers, that stream is made to wait, so that it is known when memory comes back;
    `record_stream` leaves that to when the host looks, and a host that runs ahead takes new memory each time. The last
    loan is not waited for: what reads it runs beside what is made next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._home: Stream = None
        self._loans: deque[Loan] = deque()

    def make(self) -> None:
        """Take back what is due, before a tensor is made on the current stream."""
        if not exist(self._device):
            return
        self._home = current_stream(self._device)
        while len(self._loans) > 1 and self._loans[0].home == self._home:
            wait_event(self._loans.popleft().event, self._device)

    def clear(self) -> None:
        """Drop all loans, where the current stream, for which their home waits first, has waited for those who read."""
        self._loans.clear()

    def lend(self, tensor: torch.Tensor) -> None:
        """Hold a tensor, made after the last call of `make`, that the current stream was given work on."""
        if exist(self._device):
            self._loans.append(Loan(tensor, record_event(self._device), self._home))

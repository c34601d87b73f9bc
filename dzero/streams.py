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

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

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


def synchronize(event: Event) -> None:
    """Return when the device has come to `event`."""
    if event is not None:
        event.synchronize()


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

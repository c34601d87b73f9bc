"""Warm process: imports the run's modules, and forks processes at the launcher's request.

`launch/warm_process.py` is the launcher's side, and says why forks are safe.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from dzero.errors import RunError
from dzero.launch.warm_process import PASSED_ON, Fork, ForkExit, ForkMessage, found, no_more_processes

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
SHOWN_BYTES = 4096


@dataclass
class _Child:
    """A fork that is running; `ended` is a descriptor that becomes readable when it has ended."""

    request: Fork
    pid: int
    ended: int
    says: Connection | None
    output: int | None


def serve(channel_fd: int, launcher_pid: int) -> NoReturn:
    """Run the warm process: import what the first message names, then fork until the launcher closes the channel."""
    _follow_in_death(launcher_pid)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    _set_name("dzero warm")
    sys.argv = ["dzero"]
    channel = Connection(channel_fd)
    children: dict[int, _Child] = {}
    try:
        for module in channel.recv():
            import_module(module)
    except EOFError:  # the launcher is gone
        os._exit(0)
    except BaseException:
        channel.send(f"the run's modules cannot be imported\n{traceback.format_exc()}")
        os._exit(1)
    gc.collect()
    gc.freeze()  # garbage collection in a fork then does not write to shared pages
    while True:
        try:
            _serve_one(channel, children)
        except (EOFError, OSError):  # the launcher is gone
            os._exit(0)  # the kernel then kills the forks


def _serve_one(channel: Connection, children: dict[int, _Child]) -> None:
    """Wait for a request, or for a message or the end of a fork, and handle it."""
    says = {child.says: child for child in children.values() if child.says is not None}
    ended = {child.ended: child for child in children.values()}
    ready = wait([channel, *says, *ended])
    for each in ready:
        if each in says:
            _pass_on(channel, says[each])
    for each in ready:
        if each in ended:
            child = children.pop(ended[each].request.number)
            while child.says is not None and child.says.poll(0):
                _pass_on(channel, child)  # its last messages
            if child.says is not None:  # a child of the fork may still hold the other end
                child.says.close()
            os.close(child.ended)
            code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
            channel.send(ForkExit(child.request.number, code, _output_of(child)))
    if channel in ready:
        request = channel.recv()
        if isinstance(request, Fork):
            try:
                children[request.number] = _fork(channel, request, children)
            except OSError as error:  # out of processes, descriptors or memory
                channel.send(no_more_processes(error))
                os._exit(1)
            channel.send((request.number, children[request.number].pid))
        elif request.number in children:
            os.kill(children[request.number].pid, request.signal)


def _pass_on(channel: Connection, child: _Child) -> None:
    assert child.says is not None
    try:
        value = child.says.recv()
    except (EOFError, OSError):
        child.says.close()
        child.says = None
    else:
        channel.send(ForkMessage(child.request.number, value))


def _output_of(child: _Child) -> str:
    if child.output is None:
        return ""
    size = os.fstat(child.output).st_size
    data = os.pread(child.output, SHOWN_BYTES, max(0, size - SHOWN_BYTES))
    os.close(child.output)
    return data.decode(errors="replace")


def _fork(channel: Connection, request: Fork, others: Mapping[int, _Child]) -> _Child:
    receiving, sending = Pipe(duplex=False)
    output = os.memfd_create(request.name) if request.silent else None
    warm_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        channel.close()
        receiving.close()
        for other in others.values():
            if other.says is not None:
                other.says.close()
        _run(request, sending, output, warm_pid)
    sending.close()
    return _Child(request, pid, os.pidfd_open(pid), receiving, output)


def _run(request: Fork, sending: Connection, output: int | None, warm_pid: int) -> NoReturn:
    """Run a fork's function and exit, with code 1 and a printed traceback after an exception."""
    code = 1
    try:
        _follow_in_death(warm_pid)
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        _set_name(request.name)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        os.environ.update(request.env)
        try:
            found(request.function)(*request.args, sending.send)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        gc.collect()  # what the interpreter would release at its end, such as directories of scratch space
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed by its reader, or missing
                stream.flush()
        os._exit(code)


def _follow_in_death(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; exit if the parent has died already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15])


def answer(function: str, args: tuple[Any, ...], say: Callable[[Any], None]) -> None:
    """Call the function `module:function` and send (False, its result), or (True, the message of its RunError)."""
    try:
        result = found(function)(*args)
    except RunError as error:
        say((True, str(error)))
    else:
        say((False, result))

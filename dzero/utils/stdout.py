"""Standard output and standard error that outlast their readers.

A pipe whose reader has left (`| head -1`), a full disk, a closed terminal: none of them may end a training run. After
`outlast_readers`, what cannot be written to either stream is dropped, and standard error says so once.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TextIO


class LastingFile(io.FileIO):
    """A file descriptor of an output stream; bytes that it does not take are dropped.

    Args:
        descriptor: Stays open when this object is closed.
        lost: Called once, with the error of the first write that failed.
    """

    def __init__(self, descriptor: int, lost: Callable[[OSError], None]) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._lost: Callable[[OSError], None] | None = lost

    def write(self, data: Any, /) -> int:
        """Write `data` and return the bytes that were taken or dropped; wait where the descriptor would not block."""
        try:
            while (taken := super().write(data)) is None:  # it would block
                select.select([], [self.fileno()], [])
        except OSError as error:
            lost, self._lost = self._lost, None
            if lost is not None:
                lost(error)
            return len(memoryview(data).cast("B"))
        return taken


def outlast_readers() -> None:
    """Make `sys.stdout` and `sys.stderr` of this process drop what they cannot write. May be called again.

    Streams that are no file descriptors (captured by a test or a notebook) stay as they are.
    """
    sys.stderr = _lasting(sys.stderr, 2, lambda _: None)
    sys.stdout = _lasting(sys.stdout, 1, partial(_say_stdout_is_lost, sys.stderr))


def _lasting(stream: TextIO | None, descriptor: int, lost: Callable[[OSError], None]) -> Any:
    if stream is None:  # closed before the start
        return _nowhere(descriptor)
    try:
        found = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return stream
    if isinstance(getattr(getattr(stream, "buffer", None), "raw", None), LastingFile):
        return stream
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(LastingFile(found, lost)),
        encoding=stream.encoding,
        errors="backslashreplace",  # a terminal without UTF-8 is no reason to end a run either
        line_buffering=True,
        write_through=descriptor == 2,
    )


def _nowhere(descriptor: int) -> TextIO:
    """Return a stream whose text is dropped; `descriptor` becomes it, so that no other file is opened as it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(nowhere, descriptor)
    os.set_inheritable(nowhere, nowhere == descriptor)  # processes that are started write there as well
    return os.fdopen(nowhere, "w", encoding="utf-8", closefd=False)


def _say_stdout_is_lost(stderr: TextIO, error: OSError) -> None:
    reason = error.strerror or type(error).__name__
    print(f"standard output takes no more ({reason}): what it does not take is lost, the work goes on", file=stderr)

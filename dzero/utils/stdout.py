"""Standard output and standard error that continue without their readers.

A pipe whose reader has exited (`| head -1`), a full disk, or a closed terminal must not end a training run. After
`outlast_readers`, text that cannot be written to either stream is dropped, and standard error reports this once.
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
    """File descriptor of an output stream that drops bytes which cannot be written.

    The descriptor stays open when this object is closed. `lost` is called with the error of the first failed write.
    """

    def __init__(self, descriptor: int, lost: Callable[[OSError], None]) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._lost: Callable[[OSError], None] | None = lost

    def write(self, data: Any, /) -> int:
        """Write `data` and return the number of bytes written or dropped; wait if the descriptor would block."""
        try:
            while (taken := super().write(data)) is None:  # writing would block
                select.select([], [self.fileno()], [])
        except OSError as error:
            lost, self._lost = self._lost, None
            if lost is not None:
                lost(error)
            return len(memoryview(data).cast("B"))
        return taken


def outlast_readers() -> None:
    """Make `sys.stdout` and `sys.stderr` of this process drop text that they cannot write; may be called again.

    Streams without a file descriptor (captured by a test or a notebook) are left unchanged.
    """
    sys.stderr = _lasting(sys.stderr, 2, lambda _: None)
    sys.stdout = _lasting(sys.stdout, 1, partial(_say_stdout_is_lost, sys.stderr))


def _lasting(stream: TextIO | None, descriptor: int, lost: Callable[[OSError], None]) -> Any:
    if stream is None:  # closed before this process started
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
        errors="backslashreplace",  # a terminal without UTF-8 must not end a run either
        line_buffering=True,
        write_through=descriptor == 2,
    )


def _nowhere(descriptor: int) -> TextIO:
    """Return a stream that drops text; reserve `descriptor` for it, so that no other file gets that number."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(nowhere, descriptor)
    os.set_inheritable(nowhere, nowhere == descriptor)  # child processes inherit it
    return os.fdopen(nowhere, "w", encoding="utf-8", closefd=False)


def _say_stdout_is_lost(stderr: TextIO, error: OSError) -> None:
    reason = error.strerror or type(error).__name__
    print(f"standard output takes no more ({reason}): what it does not take is lost, the work goes on", file=stderr)

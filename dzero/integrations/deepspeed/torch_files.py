"""Process that reads the files that `torch.save` writes, which are pickles.

    torch_reader.py                                      this process (`main`)
    opens the file, following no link           -->      torch.load(weights_only=True), mapped where possible
    keeps plain values, and shapes of tensors   <--      JSON: values by key, and a list of tensors
    asks for a box of a tensor                  -->      sends its bytes

torch itself refuses a file that names any class or function but those of tensors. Of the classes that DeepSpeed and
NumPy put beside tensors, `INERT` has the names; a class that does nothing stands in for all of them. Processor time and
memory of the process are limited, so that a file that would take either for ever ends it. Nothing but JSON and
the bytes of tensors comes back.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dzero.checkpoint.format import NAMES
from dzero.errors import in_short

INERT = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
)
SECONDS, BYTES_PER_SECOND = 30, 50_000_000
"""Processor time for a file, and what it may take more for its bytes."""
MEMORY_BYTES = 2 << 30
"""Memory for a file besides three times its own size."""
MOST_VALUES, MOST_PLAIN_BYTES = 5_000_000, 256 << 20
"""Plain values of a file, and their bytes as JSON; few bytes of a pickle can stand for any number."""
ZIP = b"PK\x03\x04"
SAYS = re.compile(r"Unsupported (?:global|class|function)\W+(?:GLOBAL )?([\w.]+)|GLOBAL ([\w.]+)")


class Inert:
    """Stand-in for a class that does nothing and keeps the plain values of its state."""

    state: Any = None

    def __new__(cls, *_: object) -> Inert:
        """Create one from any arguments, and keep none of them."""
        return super().__new__(cls)

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        """Keep the state as it is."""
        self.state = state


class _Contents:
    """Plain values and tensors of an opened file of `file_bytes`."""

    def __init__(self, value: Any, file_bytes: int) -> None:
        self._file_bytes, self._values = file_bytes, 0
        self.tensors: list[Tensor] = []
        self.told: list[tuple[list[str], str, list[int]]] = []
        self.plain = self._plain(value, [])

    def _plain(self, value: Any, keys: list[str]) -> Any:
        """Return the plain values in `value` as JSON; tensors go to the list, those of one number to the values too."""
        self._values += 1
        if self._values > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} plain values")
        if isinstance(value, Tensor):
            self._add(value, keys)
            return value.item() if value.numel() == 1 and not value.is_complex() else None
        if isinstance(value, Inert):
            return self._plain(value.state, keys)
        if isinstance(value, dict):
            return {str(key): self._plain(each, [*keys, str(key)]) for key, each in value.items()}
        if isinstance(value, list | tuple | set):
            return [self._plain(each, [*keys, str(number)]) for number, each in enumerate(value)]
        return value if value is None or isinstance(value, bool | int | float | str) else None

    def _add(self, tensor: Tensor, keys: list[str]) -> None:
        name = ": ".join(keys) or "its tensor"
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ValueError(f"{name} is no plain tensor: {type(tensor).__name__}, {tensor.layout}, {tensor.device}")
        if tensor.numel() * tensor.element_size() > self._file_bytes:
            raise ValueError(f"{name} is {list(tensor.shape)}, more than a file of {self._file_bytes} bytes can hold")
        self.told.append((keys, NAMES.get(tensor.dtype, str(tensor.dtype)), [*tensor.shape]))
        self.tensors.append(tensor.detach())


def _read(fd: int, file_bytes: int) -> _Contents:
    """Load a file, which runs nothing that it names; mapped into memory if it is of the format that allows it."""
    path = f"/proc/self/fd/{fd}"
    mapped = os.pread(fd, len(ZIP), 0) == ZIP
    return _Contents(torch.load(path, map_location="cpu", weights_only=True, mmap=mapped), file_bytes)


def _why(error: Exception) -> str:
    """Return what is wrong with a file, in a line."""
    if (found := SAYS.search(str(error))) is not None:
        named = found[1] or found[2]
        return f"it names {named}, and only tensors and plain values are read: nothing of it was run"
    # torch's own message advises to load the file without the check.
    _, found_error, detail = str(error).partition("WeightsUnpickler error: ")
    why = " ".join(detail.partition("\n")[0].split()) if found_error else in_short(error)
    if isinstance(error, EOFError) or not why:  # torch says nothing of it
        why = "it ends within its pickle"
    return f"no file of tensors that torch.save wrote whole ({why})"


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _opened(connection: Connection, file_bytes: int) -> tuple[_Contents | None, bytes]:
    """Open the file whose descriptor comes next; return its contents, and the reply."""
    fd = recv_handle(connection)
    try:
        contents = _read(fd, file_bytes)
        reply = json.dumps({"plain": contents.plain, "tensors": contents.told}).encode()
        if len(reply) > MOST_PLAIN_BYTES:
            raise ValueError(f"{len(reply)} bytes of plain values")
        return contents, reply
    except Exception as error:  # of a damaged file torch may raise anything
        return None, json.dumps({"error": _why(error)}).encode()
    finally:
        os.close(fd)


def main() -> None:
    """Answer requests on the socket whose number is the only argument, until its other end is closed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    torch.serialization.add_safe_globals([(Inert, name) for name in INERT])
    torch.set_num_threads(1)
    connection, contents = Connection(int(sys.argv[1])), None
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with suppress(EOFError, ConnectionError):
        while True:
            request = json.loads(connection.recv_bytes())
            if "open" in request:
                file_bytes, contents = request["open"], None
                _limit(resource.RLIMIT_AS, mapped_bytes + MEMORY_BYTES + 3 * file_bytes)
                seconds = SECONDS + file_bytes // BYTES_PER_SECOND
                _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)
                contents, reply = _opened(connection, file_bytes)
                connection.send_bytes(reply)
            elif contents is not None:
                box = tuple(slice(o, o + n) for o, n in zip(request["offset"], request["size"], strict=True))
                part = contents.tensors[request["tensor"]][box].contiguous()
                connection.send_bytes(b"{}")
                connection.send_bytes(part.view(-1).view(torch.uint8).numpy().data)


if __name__ == "__main__":
    main()

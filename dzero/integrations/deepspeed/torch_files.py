"""Reader of the files that `torch.save` writes, which are pickles, in a process of its own.

    this process                                         the other one (`main`)
    opens the file, following no link           -->      torch.load(weights_only=True), mapped where possible
    keeps plain values, and shapes of tensors   <--      JSON: values by key, and a list of tensors
    asks for a box of a tensor                  -->      sends its bytes

torch itself refuses a file that names any class or function but those of tensors. Of the classes that DeepSpeed and
NumPy put beside tensors, `INERT` has the names; a class that does nothing stands in for all of them. Processor time and
memory of the other process are limited, so that a file that would take either for ever ends it. Nothing but JSON and
the bytes of tensors comes back.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dzero.checkpoint.format import DTYPES, NAMES
from dzero.checkpoint.store import Directory
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


class TorchFileError(ValueError):
    """A file that cannot be read; nothing that it names was run."""


@dataclass(frozen=True)
class TorchTensor:
    """A tensor in a file, of which any box can be read; see `models.tensor_views.Readable`."""

    file: TorchFile
    number: int
    keys: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[str, ...]:
        """Its key in the file, or the name of the file."""
        return (self.keys[-1] if self.keys else str(self.file.path),)

    @property
    def where(self) -> str:
        """File and keys, for messages."""
        return ": ".join([str(self.file.path), *self.keys])

    def __call__(self) -> Tensor:
        """Read the whole tensor, on the CPU."""
        return self.read((0,) * len(self.shape), self.shape)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, as a CPU tensor."""
        return self.file.read(self, offset, size)


class TorchFile:
    """A file: its plain values by key, and its tensors by their keys; a file that is one tensor has it under ()."""

    def __init__(self, files: TorchFiles, path: Path) -> None:
        self._files, self.path = files, path
        self.plain, told = files.contents(self)
        self.tensors: dict[tuple[str, ...], TorchTensor] = {}
        for number, (keys, dtype, shape) in enumerate(told):
            if dtype not in DTYPES:
                raise TorchFileError(f"{self.path}: {': '.join(keys)} is {dtype}; known are {', '.join(DTYPES)}")
            self.tensors[tuple(keys)] = TorchTensor(self, number, tuple(keys), DTYPES[dtype], tuple(shape))

    def open(self) -> int:
        """Return a descriptor of the file; neither it nor its folder is a link."""
        with Directory(self.path.parent) as folder:
            return folder.open(self.path.name, os.O_RDONLY)

    def read(self, tensor: TorchTensor, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read a box of one of the tensors."""
        out = torch.empty(tuple(size), dtype=tensor.dtype)
        if out.numel():
            self._files.fill(self, tensor.number, offset, out)
        return out


class TorchFiles:
    """Process that reads files; a context manager, which ends it."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        )
        theirs.close()
        self._opened: TorchFile | None = None

    def __enter__(self) -> TorchFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.kill()  # there is nothing that it has to finish
        self._process.wait()

    def contents(self, file: TorchFile) -> tuple[Any, list[tuple[list[str], str, list[int]]]]:
        """Open `file` in the other process; return its plain values, and keys, dtype and shape of its tensors."""
        self._opened = None
        fd = file.open()
        try:
            reply = self._ask(file, {"open": os.fstat(fd).st_size}, fd)
        finally:
            os.close(fd)
        self._opened = file
        return reply["plain"], reply["tensors"]

    def fill(self, file: TorchFile, number: int, offset: Sequence[int], out: Tensor) -> None:
        """Fill `out` with a box of a tensor."""
        if self._opened is not file:
            self.contents(file)
        self._ask(file, {"tensor": number, "offset": [*offset], "size": [*out.shape]})
        wanted = out.view(-1).view(torch.uint8).numpy()
        try:
            got = self._connection.recv_bytes_into(wanted.data)
        except (EOFError, OSError):
            self._ended(file)
        if got != wanted.size:
            raise TorchFileError(f"{file.path}: it changed while it was read")

    def _ask(self, file: TorchFile, request: dict[str, Any], fd: int | None = None) -> dict[str, Any]:
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            if fd is not None:
                send_handle(self._connection, fd, self._process.pid)
            reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            self._ended(file)
        if "error" in reply:
            raise TorchFileError(f"{file.path}: {reply['error']}")
        return reply

    def _ended(self, file: TorchFile) -> NoReturn:
        code = self._process.wait()
        why = "it took too much processor time" if code == -signal.SIGXCPU else f"exit status {code}"
        raise TorchFileError(f"{file.path}: the process that reads it has ended ({why}): it is damaged or too large")


# What follows runs in the other process.


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

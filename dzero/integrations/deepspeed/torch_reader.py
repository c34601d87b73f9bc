"""Tensors and plain values of files that `torch.save` writes, as another process reads them (torch_files.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from dzero.checkpoint.format import DTYPES
from dzero.checkpoint.store import Directory
from dzero.integrations.deepspeed import torch_files


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
            [sys.executable, "-P", "-m", torch_files.__name__, str(theirs.fileno())],
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

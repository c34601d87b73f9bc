"""The worker's side of the pool: what travels, and the loop that runs it (`pool.py` has the whole picture)."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import os
import pickle
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from functools import _lru_cache_wrapper, cache, reduce
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but torch leaves it out of __all__
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from dzero.utils.torch_internals import gather_under_short_names
from dzero.zero.watched_tensor import WatchedTensor

GROUP_TIMEOUT = timedelta(seconds=60)
IDLE, RELEASE = b"idle", b"release"
gc.unfreeze()  # the warm server's objects, which would not be found
CACHES = [
    each
    for each in gc.get_objects()
    if type(each) is _lru_cache_wrapper and str(each.__module__).startswith("torch.distributed.tensor")
]
"""DTensor's, of which many know meshes."""


class Call(NamedTuple):
    """`module.qualname(rank, ranks, *args)` on one rank, in group number `run` of the store at `port`."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    rank: int
    ranks: int
    run: int
    port: int


class Outcome(NamedTuple):
    """What came of a call. `at_s`: the machine's monotonic clock, so failures of several ranks have an order."""

    at_s: float
    result: Any = None
    error: str | None = None


def serve() -> None:
    """A worker's life: run calls that come by stdin, a socket, until it closes."""
    pipe = Connection(os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it kills us
    faulthandler.enable()  # a crash tells where each thread was
    gather_under_short_names()  # as plain torch, the reference, gathers DTensors too
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gc.freeze()  # what was imported, now or by a run, is never garbage: the collection after each run stays cheap
    imported = len(sys.modules)
    try:
        while True:
            pipe.send_bytes(IDLE)
            message = pipe.recv_bytes()
            try:
                pipe.send_bytes(outcome_of(message))
                pipe.recv_bytes()  # the release
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
                forget_meshes()
                for _ in range(3):  # a finalizer may hand on what it was called for
                    if gc.collect() == 0:
                        break
                if len(sys.modules) > imported:
                    gc.freeze()
                    imported = len(sys.modules)
    except (EOFError, OSError):  # the parent closed the pipe, or is gone
        return


def forget_meshes() -> None:
    """Empty what DTensor caches by mesh: an equal mesh of the next run would find this run's groups there, and a group
    that is kept keeps gloo's threads, which wake up a hundred times a second."""
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    for each in CACHES:
        each.cache_clear()


@cache
def connected(port: int) -> TCPStore:
    """One connection for all runs: for each, torch asks the name server twice, which may take seconds."""
    return TCPStore("127.0.0.1", port, is_master=False)


def outcome_of(message: bytes) -> bytes:
    """Run the call in a message; its pickled outcome, whatever happens."""
    try:
        sys.path[:], payload = pickle.loads(message)  # noqa: S301 (our own parent's bytes)
        call: Call = pickle.loads(payload)  # noqa: S301
        store = PrefixStore(f"run{call.run}", connected(call.port))
        dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.ranks, timeout=GROUP_TIMEOUT)
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0)
        fn = reduce(getattr, call.qualname.split("."), importlib.import_module(call.module))
        return dumps(Outcome(result=fn(call.rank, call.ranks, *call.args), at_s=time.monotonic()))  # type: ignore[operator]
    except BaseException:
        return dumps(Outcome(error=traceback.format_exc(), at_s=time.monotonic()))


def dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class Pickler(pickle.Pickler):
    """Writes plain tensors as (bytes, dtype, shape); refuses subclasses, whose meaning would not survive."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if isinstance(value, WatchedTensor):  # a shard of one rank is what full_tensor() gives
            value = value.seen()
        if type(value) not in (Tensor, nn.Parameter):
            name = type(value).__name__
            raise TypeError(f"{name} does not travel between processes: send to_local() or full_tensor()")
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return rebuild, (raw, value.dtype, tuple(value.shape), type(value) is nn.Parameter, value.requires_grad)


def rebuild(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], parameter: bool, trains: bool) -> Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    tensor = flat.view(shape)
    return nn.Parameter(tensor, requires_grad=trains) if parameter else tensor

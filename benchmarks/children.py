"""Child processes, one per rank of a process group on loopback, that answer what their parent asks.

parent                         rank r
Children(ranks, main, *args)   main(pipe, *args, rank): sends once when it is ready
ask(request)                   receives it, sends an answer; an exception as the answer is raised in the parent
tell(request)                  receives it, answers nothing
close()                        is ended if it has not ended by itself
"""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT = timedelta(minutes=30)
END_S = 10


class Children:
    """The parent's end. `first`: what each rank sent when it was ready."""

    def __init__(self, ranks: int, main: Callable[..., None], *args: Any) -> None:
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=main, args=(theirs, *args, rank), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self.first = self._receive()
        except BaseException:
            self.close()
            raise

    def ask(self, request: Any) -> list[Any]:
        """Send the same to all ranks; their answers in the order of ranks."""
        self.tell(request)
        return self._receive()

    def tell(self, request: Any) -> None:
        """Send the same to all ranks."""
        for pipe in self._pipes:
            pipe.send(request)

    def close(self) -> None:
        """Wait a moment for the processes, then end them."""
        for process in self._processes:
            process.join(timeout=END_S)
            process.kill()

    def _receive(self) -> list[Any]:
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers


@contextmanager
def process_group(rank: int, ranks: int, rendezvous: str) -> Iterator[None]:
    """A gloo group for this child; `rendezvous`: a file that does not exist yet, the same for all ranks."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()

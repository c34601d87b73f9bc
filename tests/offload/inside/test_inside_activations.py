"""What waits for backward off the device, by itself: what is fetched is what was saved, and only what must moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_loops import unequal

from dzero import DiskConfig
from dzero.offload import activation_pool
from dzero.offload.activation_pool import ActivationPool
from dzero.offload.activations import ActivationOffload
from dzero.offload.disk import DiskStore
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.memory_pool import HostMemoryPool
from dzero.offload.schedule import OffloadSchedule


class Root(nn.Module):
    """x [rows, 64] + shift, through its blocks: `checkpointed(x, table)`; `beside`: each on the same x."""

    def __init__(self, beside: bool = False) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(64))
        self.beside = beside
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.saved: list[Tensor] = []
        self.after: Callable[[int], object] = lambda _: None

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.shift
        out = torch.zeros_like(x)
        for index, block in enumerate(self.blocks):
            self.saved.append(x)
            y = block(x, table)
            self.after(index)
            out, x = (out + y, x) if self.beside else (y, y)
        return out


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return checkpoint(lambda x, table: (x * self.gain * table).tanh(), x, table, use_reentrant=False)  # type: ignore[no-any-return]


def watched(root: Root, disk: Path | None = None) -> tuple[ActivationOffload, ScheduleExecutor]:
    """disk: there, behind two slots of host memory."""
    executor = ScheduleExecutor(OffloadSchedule(), HostMemoryPool(0), torch.device("cpu"))
    store = None if disk is None else DiskStore(DiskConfig(paths=[str(disk)]), {})
    moving = ActivationOffload(ActivationPool(executor, pin=False, store=store), "cpu")
    moving.attach([*root.blocks])
    return moving, executor


X, TABLE = torch.linspace(-1, 1, 64 * 64).view(64, 64), torch.linspace(1, 2, 64 * 64).view(64, 64)


def grads(root: Root, x: Tensor = X, *, retain: bool = False) -> dict[str, Tensor]:
    loss = root(x, TABLE[: len(x)]).sum()
    found: dict[str, Tensor] = {}
    for turn in range(2 if retain else 1):
        root.zero_grad()
        loss.backward(retain_graph=retain and turn == 0)
        found |= {f"{turn} {name}": p.grad.clone() for name, p in root.named_parameters() if p.grad is not None}
    return found


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_a_second_backward_over_the_same_graph_brings_them_again(tmp_path: Path, beside: bool, on_disk: bool) -> None:
    """Of blocks beside each other there is one copy, which stays on the device as the tables do."""
    root = Root(beside)
    want = grads(root, retain=True)
    moving, executor = watched(root, tmp_path if on_disk else None)
    root.after = lambda _: executor.drain()  # all but the newest have left before backward
    assert unequal(grads(root, retain=True), want) == []
    use = executor.take_use()
    assert use["FETCH" if not beside else "EVICT"].moved_bytes == (1 if beside else 2 * 3) * X.nbytes
    assert ("LOAD activation" in use) == (on_disk and not beside)
    assert len(moving.pool.free) == len(moving.pool.seat_bytes)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("latest_first", [False, True])
def test_forwards_that_precede_their_backwards_keep_their_own(
    tmp_path: Path, latest_first: bool, on_disk: bool
) -> None:
    """Pipelines run several forwards, of batches of several sizes, and then the backwards in either order."""
    root, rows = Root(), (64, 32, 48)

    def run() -> dict[str, Tensor]:
        losses = [root(-X[:count] * count, TABLE[:count]).sum() for count in rows]
        found: dict[str, Tensor] = {}
        for turn in range(3):
            root.zero_grad()
            losses.pop(-1 if latest_first else 0).backward()
            found |= {f"{turn} {name}": p.grad.clone() for name, p in root.named_parameters() if p.grad is not None}
        return found

    want = run()
    moving, executor = watched(root, tmp_path if on_disk else None)
    assert unequal(run(), want) == []
    assert unequal(run(), want) == []
    assert ("LOAD activation" in executor.take_use()) == on_disk
    assert len(moving.pool.free) == len(moving.pool.seat_bytes) == 12


def test_slots_grow_with_the_batch_and_small_inputs_stay() -> None:
    root = Root()
    moving, executor = watched(root)
    for rows, slots_bytes in ((32, 32 * 64 * 4), (64, 64 * 64 * 4), (16, 64 * 64 * 4)):
        grads(root, X[:rows])
        assert moving.pool.host_bytes == executor.schedule.host_bytes == 4 * slots_bytes
    executor.drain()
    executor.take_use()
    grads(root, X[:15])  # 15 * 64 * 4 is less than LEAST_BYTES
    assert executor.take_use() == {}


def test_what_is_changed_in_place_while_it_leaves_makes_backward_raise_and_later_does_not_matter() -> None:
    for late, index, at in ((False, 0, 0), (False, 0, 2), (False, 3, 3), (True, 0, 2)):
        root = Root()
        want = grads(root)
        root.saved.clear()
        _, executor = watched(root)
        if not late:
            executor.before = lambda key: time.sleep(0.1)

        def change(block: int, root: Root, executor: ScheduleExecutor, late: bool, index: int, at: int) -> None:
            if late:
                executor.drain()  # the next save then sees that it has left
            if block == at:
                with torch.no_grad():
                    root.saved[index].add_(1.0)

        root.after = partial(change, root=root, executor=executor, late=late, index=index, at=at)
        with nullcontext() if late else pytest.raises(RuntimeError, match="at version 1, expected version 0; change a"):
            assert unequal(grads(root), want) == []


def test_what_stays_is_checked_as_autograd_does() -> None:
    """A table, and an input that is too small to move."""
    for rows, index in ((64, None), (15, 1)):
        root, table = Root(), TABLE[:rows].clone()
        watched(root)
        loss = root(X[:rows], table).sum()
        with torch.no_grad():
            (table if index is None else root.saved[index]).add_(1.0)
        with pytest.raises(RuntimeError, match=r"at version 1[,;] expected version 0"):
            loss.backward()


def test_too_little_host_memory_is_told_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root()
    moving, _ = watched(root)
    monkeypatch.setattr(activation_pool, "host_available_bytes", lambda: X.nbytes - 1)
    with pytest.raises(MemoryError, match=r"are available\. Take smaller microbatches \(train\.microbatch_sequences\)"):
        grads(root)
    assert moving.pool.host_bytes == 0

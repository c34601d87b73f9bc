"""Ranks that wait for others which cannot come are told so, in a loop of one's own as under `train.py`."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch.distributed import TCPStore

from dzero import streams
from dzero.comm import watchdog as watching
from dzero.comm.collective_log import Collective, CollectiveLog
from dzero.comm.watchdog import Watchdog
from dzero.launch import worker

TIMEOUT_S = 3.0
CROWDED_S = 15.0
"""What a crowded machine may take longer; tests/stress/cut_links.py measures without."""
CPU = torch.device("cpu")


class Event:
    """An event that the device has come to, or does not come to."""

    def __init__(self, is_over: bool) -> None:
        self._is_over = is_over

    def record(self, stream: object) -> None:
        """Nothing comes behind it."""

    def query(self) -> bool:
        return self._is_over


def stand(rank: int, ranks: int) -> str:
    """Rank 0's device waits in a collective that rank 1 never begins; return what rank 0's thread said."""
    module = mock.Mock(Event=lambda blocking: Event(is_over=rank != 0))
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    told: list[str] = []
    with (
        mock.patch.object(streams, "device_module", return_value=module),
        mock.patch.object(threading, "excepthook", lambda args: told.append(str(args.exc_value))),
        Watchdog(timedelta(seconds=TIMEOUT_S)) as watch,
    ):
        collective_log = CollectiveLog()
        collective_log.device = CPU
        watch.follow(collective_log)
        with collective_log.within(
            Collective.of("reduce_scatter", "layers.0", "shard", 64, torch.float32), dist.group.WORLD
        ):
            pass
        if rank == 0:
            with collective_log.within(
                Collective.of("all_gather", "layers.1", "shard", 64, torch.float32), dist.group.WORLD
            ):
                pass
            until_s = time.monotonic() + 20 * TIMEOUT_S
            while not told and time.monotonic() < until_s:
                time.sleep(0.05)
            store.set("rank 0 has told", "")
        else:
            while not store.check(["rank 0 has told"]):  # a wait would hold the connection that the beats need
                time.sleep(0.05)
    return told[0] if told else ""


def test_a_collective_that_the_device_waits_in_is_told_at_the_timeout(pool: Pool) -> None:
    said, _ = pool.run(stand, 2)
    assert "rank 0 got no answer in #2 all_gather of layers.1 over shard [64 x float32]" in said
    assert f"within launch.timeout_s={TIMEOUT_S:g}" in said
    assert "rank 1 (pid" in said
    assert "is behind" in said
    assert "rank 1: #1 reduce_scatter of layers.0" in said


def held_through_beats(rank: int, ranks: int) -> list[bool]:
    """Whether what a call had lives on, of the call that began the watchdog, and of one that saw several beats."""

    class Large:
        pass

    def call() -> weakref.ref[Large]:
        large = Large()
        watching.begin()
        time.sleep(2.5 * watching.BEAT_S)
        return weakref.ref(large)

    gc.collect()
    gc.disable()
    try:
        return [call()() is not None for _ in range(2)]
    finally:
        gc.enable()


def test_what_a_call_had_is_freed_when_it_returns(pool: Pool) -> None:
    assert pool.run(held_through_beats, 2) == [[False, False]] * 2


def test_memory_of_cuda_grows_in_place_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in worker.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    worker.choose_allocator()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    for name in worker.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    worker.choose_allocator()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


SCRIPT = """
import threading, time
from dzero.errors import RunError
from dzero.launch.worker import reported

def tell():
    raise RunError("rank 1 is behind")

with reported(lambda error: print("told:", error)):
    threading.Thread(target=tell).start()
    time.sleep(60)
"""


def test_what_a_thread_tells_ends_the_worker() -> None:
    began_s = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == "told: rank 1 is behind\n"
    assert time.monotonic() - began_s < 50


OWN = """
import os, pathlib, subprocess, sys, threading, time
from datetime import timedelta
import dzero
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

timeout_s = float(sys.argv[1])
dist.init_process_group("gloo", **({"timeout": timedelta(seconds=timeout_s)} if timeout_s else {}))
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8))
config = dzero.ZeroConfig(stage=3, units=lambda module: isinstance(module, nn.Linear))
sharded = dzero.shard(model, config, precision="fp32")
optim = dzero.AdamW(sharded)

def step():
    sharded.model(torch.ones(2, 8)).sum().backward()
    optim.step()
    optim.zero_grad()

step()
print("stalls", time.time(), flush=True)
THEN
step()
print("goes on", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
ENDLESS = {
    "waits in a barrier": "if rank == 1: dist.barrier()",
    "skips a module": "if rank == 1: model[1](model[0](torch.ones(2, 8)))[:, :8].sum().backward()",
    "saves alone": """
checkpointer = dzero.Checkpointer(dzero.CheckpointConfig(folder="saved", every=1), sharded, optim)
if rank == 1: checkpointer.save(1, {})
""",
    "gathers a weight": "if rank == 1: model[0].weight.full_tensor()",
    "waits for what it began": """
work = dist.all_reduce(torch.ones(1), async_op=True) if rank == 1 else None
if rank == 1: work.wait()
""",
    "trains in a thread": """
def train():
    step()
    dist.barrier()
if rank == 1:
    threading.Thread(target=train).start()
    time.sleep(1000)
else:
    step()
""",
    "trained in a thread": """
(thread := threading.Thread(target=step)).start()
thread.join()
if rank == 1: dist.barrier()
""",
    "exits": "if rank == 1: sys.exit(3)",
    "raises beside a barrier": """
if rank == 1: raise ValueError('of my own')
dist.barrier()
""",
    "raises": "if rank == 1: raise ValueError('of my own')",
    "keeps the interpreter lock": """
import ctypes
if rank == 1: ctypes.PyDLL(None).sleep(1000)
""",
    "is killed": "if rank == 1: os.kill(os.getpid(), 9)",
    "computes": "if rank == 1: time.sleep(1000)",
}
"""What a rank does that leaves the other alone."""
LONG = {
    "comes late, many times": """
for _ in range(22):
    if rank == 1: time.sleep(3)
    dist.all_reduce(torch.ones(1))
""",
    "sends what it pickles for long": """
import copyreg
class Slow: pass
def reduced(slow):
    time.sleep(20)
    return Slow, ()
copyreg.pickle(Slow, reduced)
dist.broadcast_object_list([Slow() if rank == 1 else None], src=1)
""",
    "gives its weights to an engine": """
GROUP = '''
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world
def group_of_two(store, number):
    store = dist.PrefixStore("engine", store)
    group, _ = _new_process_group_helper(2, number, [], "gloo", store, group_name="engine", timeout=timedelta(hours=1))
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group
'''
ENGINE = GROUP + '''
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = group_of_two(dist.TCPStore("127.0.0.1", int(sys.argv[1])), 1)
time.sleep(130)
dist.broadcast(torch.ones(4), group=group, group_src=0)
'''
exec(GROUP)
if rank == 1:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(store.port)])
    dist.broadcast(torch.ones(4), group=group_of_two(store, 0), group_src=0)
    assert engine.wait() == 0
""",
    "serves data from a thread": """
feed = dist.new_group()
def serve():
    time.sleep(130)
    dist.send(torch.ones(4), 0, group=feed)
if rank == 1:
    threading.Thread(target=serve).start()
else:
    dist.recv(torch.ones(4), 1, group=feed)
""",
    "computes in its stage": """
class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)
def loss(stage, x, targets):
    time.sleep(65)
    return functional.mse_loss(stage(x), targets)
mesh = dzero.make_mesh("cpu", pp=2)
plan = dzero.PipelinePlan(first=("enter",), last=("leave",), width=8)
parallel_model = dzero.parallelize(Parts(), mesh, dzero.ParallelConfig(pipeline_plan=plan))
of_stages = dzero.shard(parallel_model, stage=1, precision="fp32", microbatches=2)
dzero.AdamW(of_stages)
pipeline = dzero.Pipeline(
    parallel_model.stages, mesh.get_group("pp"), of_stages.ledger, schedule="1f1b", microbatches=2,
    hidden=dzero.HiddenStates((4, 8), torch.float32), device=torch.device("cpu"), hooks=of_stages,
    run=lambda stage, x: stage(x), loss=loss,
)
pipeline.step(torch.ones(2, 4, 8), torch.ones(2, 4, 8), lambda loss: loss / 2)
""",
}
"""What takes long, and ends."""
SAYS = {
    "waits in a barrier": r"\n  rank 1: #\d+ .*; now waits in barrier at own\.py:\d+ \(<module>\)\n",
    "skips a module": r"got no answer in #\d+ .* for \d+ s: (the ranks have diverged|rank \d .* is (behind|in #))",
    "saves alone": r"\n  rank 1: #\d+ .*; now waits in an agreement on saved\n",
    "gathers a weight": r"\n  rank 1: #\d+ .*; now waits in wait_tensor at own\.py:\d+ \(<module>\)\n",
    "waits for what it began": r"\n  rank 1: #\d+ .*; now waits in wait at own\.py:\d+ \(<module>\)\n",
    "trains in a thread": r"\n  rank 1: #\d+ .*; now waits in barrier at own\.py:\d+ \(train\)\n",
    "trained in a thread": r"\n  rank 1: #\d+ .*; now waits in barrier at own\.py:\d+ \(<module>\)\n",
    "exits": r"rank 0 got no answer in #\d+ all_gather of .*: rank 1 \(pid .*\) has left, without an error",
    "raises beside a barrier": r"dzero: rank 0 got no answer .*: rank 1 \(.*\) ended with ValueError: of my own",
    "raises": r"rank 0 got no answer in #\d+ all_gather of .*: rank 1 \(pid .*\) ended with ValueError: of my own",
    "keeps the interpreter lock": r"got no answer in #\d+ .* for \d+ s: rank 1 \(pid .*\) gives no sign of life",
    "is killed": r"rank 0 got no answer in #\d+ all_gather of .*: rank 1 \(pid .*\) gives no sign of life",
}


@contextmanager
def own_loop(
    folder: Path, kind: str, timeout_s: float
) -> Iterator[tuple[Callable[[], str], list[subprocess.Popen[bytes]]]]:
    """Two ranks of a loop, one of which leaves the other alone; give what both have written, and their processes."""
    (folder / "own.py").write_text(OWN.replace("THEN", (ENDLESS | LONG)[kind]))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "log.txt").open("ab") as log:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(folder / "own.py"), str(timeout_s)],
                cwd=folder,
                env=os.environ | group | agent | {"RANK": str(rank)},
                stdout=log,
                stderr=log,
            )
            for rank in range(2)
        ]
    try:
        yield (folder / "log.txt").read_text, ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def until(found: Callable[[], bool], seconds: float = 120.0) -> float:
    """Wait for something; return how long it took."""
    began_s = time.monotonic()
    while not found():
        assert time.monotonic() < began_s + seconds
        time.sleep(0.02)
    return time.monotonic() - began_s


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    "kind",
    [
        "waits in a barrier",
        "skips a module",
        "saves alone",
        "gathers a weight",
        "waits for what it began",
        "trains in a thread",
        "trained in a thread",
        "keeps the interpreter lock",
    ],
)
def test_a_loop_of_ones_own_that_stalls_says_within_ten_seconds_who_waits_where(kind: str, tmp_path: Path) -> None:
    """Although the process group has torch's own timeout of half an hour."""
    with own_loop(tmp_path, kind, 0) as (log, ranks):
        until(lambda: log().count("stalls") == 2)
        took_s = until(lambda: re.search(SAYS[kind], log()) is not None)
        print(f"told after {took_s:.1f} s")
        assert took_s < 10 + CROWDED_S, log()
        assert all(rank.poll() is None for rank in ranks)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("kind", ["is killed", "raises", "exits", "raises beside a barrier"])
def test_a_loop_of_ones_own_names_the_rank_that_left_it(kind: str, tmp_path: Path) -> None:
    with own_loop(tmp_path, kind, 0) as (log, ranks):
        until(lambda: log().count("stalls") == 2)
        assert until(lambda: ranks[0].poll() is not None) < 10 + CROWDED_S
        assert re.search(SAYS[kind], log()), log()


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["waits in a barrier", "skips a module", "gathers a weight", "waits for what it began", "computes"]
)
def test_a_loop_of_ones_own_that_stalls_ends_within_the_timeout_of_its_group(kind: str, tmp_path: Path) -> None:
    with own_loop(tmp_path, kind, 10) as (log, ranks):
        until(lambda: log().count("stalls") == 2)
        waiting = ranks[:1] if kind == "computes" else ranks
        assert until(lambda: all(rank.poll() is not None for rank in waiting)) < 10 + 5 + CROWDED_S, log()
        # torch's own barrier may have ended its rank a moment earlier
        assert re.search(r"within the process group's timeout of 10 s|rank 1 \(pid .*\) ended with", log()), log()


@pytest.mark.full
@pytest.mark.parametrize("kind", LONG)
def test_what_takes_long_is_neither_taken_for_a_stall_nor_ended(kind: str, tmp_path: Path) -> None:
    """The ranks that wait are told of what computes for over `BUSY_S`; no rank is ended, even beyond `LIMIT`."""
    with own_loop(tmp_path, kind, 0) as (log, ranks):
        until(lambda: all(rank.poll() is not None for rank in ranks), 300)
        assert [rank.returncode for rank in ranks] == [0, 0], log()
        assert log().count("goes on") == 2
        told = re.findall(r"got no answer in .* for (\d+) s: (.*)", log())
        all_wait = kind == "serves data from a thread"  # of the rank that serves, in its main thread
        assert all(int(seconds) >= (watching.SLOW_S if all_wait else watching.BUSY_S) for seconds, _ in told), told
        if kind == "computes in its stage":
            assert told
            assert all(re.fullmatch(r"rank 1 \(pid .*\) waits for no other rank", why) for _, why in told), told


@pytest.mark.full
def test_ranks_that_compute_for_long_are_left_alone(tmp_path: Path) -> None:
    """A rank that evaluates or saves while others wait is named after a minute, and nothing ends."""
    with own_loop(tmp_path, "computes", 0) as (log, ranks):
        until(lambda: log().count("stalls") == 2)
        time.sleep(watching.BUSY_S - 10)
        assert "got no answer" not in log()
        until(lambda: re.search(r"for \d+ s: rank 1 \(pid .*\) is behind", log()) is not None, 30)
        assert re.search(r"rank 1: .*; now is in own\.py:\d+ \(<module>\)", log()), log()
        assert all(rank.poll() is None for rank in ranks)


class Waits:
    """Something with a method in C that is called `wait`, and does not return before `lock` is released."""

    def __init__(self, lock: threading.Lock) -> None:
        self.wait = lock.acquire


@pytest.mark.parametrize(("line", "found"), [("begun().wait()", "wait"), ("service.wait()", "")])
def test_only_what_may_be_torchs_counts_as_waiting_for_ranks(line: str, found: str) -> None:
    """Where a variable has another object, as of a service, it is no wait for ranks."""
    (lock := threading.Lock()).acquire()
    code, service = compile(line, "own.py", "exec"), Waits(lock)
    thread = threading.Thread(target=exec, args=(code, {"begun": lambda: service, "service": service}), daemon=True)
    thread.start()
    frame = None
    while frame is None or frame.f_code is not code:
        frame = sys._current_frames().get(thread.ident or 0)
    until(lambda: watching.called_by(frame) == found, 10)
    lock.release()

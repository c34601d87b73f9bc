"""Who does things one after the other, and who touched which bytes of memory that a caching allocator hands out.

An agent is a stream, the communication stream of a process group, or a thread of the host. It numbers what it does, and
its clock says of every agent up to which number that agent's doings are over before its own next one begins. A wait
joins clocks; nothing else orders two agents. Memory of a device is

    born     on the stream that is current; may be a block that a tensor freed before on that stream, whichever its size
    touched  every access is held against those before it that touch the same bytes
    freed    may be handed out again on the stream that it was born on: at once, after what that stream was given so
             far. Whoever touched it on another stream may not have come to it yet, unless
                 that stream waited for it, or will have before the next owner touches it
                 the thread that frees knows it (it waited on the host, hence the memory came back after)
                 `record_stream` told the allocator to wait

Host memory (a pool of page-locked memory, what threads of the host make) is handed out by the schedule, which is not
modelled: its users wait for each other, or race.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

Clock = dict["Agent", int]


@dataclass(eq=False)
class Agent:
    """One that does things in order, `name` for people. `clock[self]` counts what it did, or was given to do."""

    name: str
    clock: Clock = field(default_factory=dict)

    def tick(self) -> int:
        """Do one thing more; return its number."""
        self.clock[self] = count = self.clock.get(self, 0) + 1
        return count

    def join(self, other: Clock) -> None:
        """Wait for all that `other` says to be done."""
        for agent, count in other.items():
            if self.clock.get(agent, 0) < count:
                self.clock[agent] = count

    def knows(self, other: Clock) -> bool:
        return all(self.clock.get(agent, 0) >= count for agent, count in other.items())

    def now(self) -> Clock:
        """Return what has to be done before whoever waits for this moment goes on."""
        return dict(self.clock)


@dataclass(frozen=True)
class Access:
    """Bytes [start, end) of memory, read or written by the `count`-th doing of `agent`.

    what: the operation; where: the lines that called it. owner: whose memory it was, where that has been freed since.
    """

    agent: Agent
    count: int
    start: int
    end: int
    is_write: bool
    what: str
    where: str
    owner: str = ""

    def is_over(self, clock: Clock) -> bool:
        """Return whether this ended before anything that begins at `clock`."""
        return clock.get(self.agent, 0) >= self.count

    def meets(self, other: Access) -> bool:
        """Return whether both touch a byte, and one of them writes."""
        return (self.is_write or other.is_write) and self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        how = "writes" if self.is_write else "reads"
        return f"{self.agent.name} {how} ({self.what}) at {self.where}"


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes that no chain of waits orders. `memory`: whose it is now."""

    earlier: Access
    later: Access
    memory: str

    def __str__(self) -> str:
        before = f", which was {self.earlier.owner} before" if self.earlier.owner else ""
        return f"{self.earlier}\n    and, without a wait in between, {self.later}\n    in {self.memory}{before}"


class Space(Enum):
    """Where memory lies: which decides who touches it, and what a copy waits for."""

    DEVICE = "the device"
    PINNED = "page-locked host memory"
    HOST = "pageable host memory"


@dataclass(eq=False)
class Block:
    """Memory [start, end). history: of accesses, those that a later one may still race with.

    stream: where it was born. recorded: streams that the allocator waits for before it hands it out again. let_go: what
    threads knew when they dropped references to it: it is freed by who drops the last one.
    """

    start: int
    end: int
    space: Space
    name: str
    stream: Agent | None = None
    history: list[Access] = field(default_factory=list)
    recorded: set[Agent] = field(default_factory=set)
    let_go: Clock = field(default_factory=dict)


class Memory:
    """All memory that was seen. found: called with every race."""

    def __init__(self, found: Callable[[Race], None]) -> None:
        self._found = found
        self._blocks: dict[int, Block] = {}
        self._pools: list[Block] = []
        self._freed: dict[Agent, list[Access]] = {}
        self._dead: deque[tuple[Block, Clock]] = deque()

    def add_pool(self, start: int, count: int) -> None:
        """Know `count` bytes from `start` on as page-locked host memory."""
        self._pools.append(Block(start, start + count, Space.PINNED, "a memory pool"))

    def block_of(self, tensor: torch.Tensor, clock: Callable[[], Clock]) -> Block | None:
        """Return the block that a tensor lies in, None where it has no bytes; clock: of the thread that frees it."""
        storage = tensor.untyped_storage()
        start, count = storage.data_ptr(), storage.nbytes()
        if not count:
            return None
        for memory_pool in self._pools:
            if memory_pool.start <= start < memory_pool.end:
                return memory_pool
        self.bury()
        if start not in self._blocks:
            self._know(storage, Block(start, start + count, Space.DEVICE, "memory from before"), clock)
        return self._blocks[start]

    def give_back(self, start: int, end: int, access: Access, clock: Clock) -> None:
        """Note that page-locked memory is given back: whatever touched it must be over."""
        for memory_pool in self._pools:
            if memory_pool.start <= start < memory_pool.end:
                self.touch(memory_pool, replace(access, start=start, end=end), clock)

    def bear(
        self, storage: torch.UntypedStorage, space: Space, stream: Agent, name: str, clock: Callable[[], Clock]
    ) -> None:
        """Know new memory, which `stream` may have been handed from a tensor that was freed."""
        start, count = storage.data_ptr(), storage.nbytes()
        if not count:
            return
        self.bury()
        block = Block(start, start + count, space, name)
        if space is Space.DEVICE:
            block.stream = stream
            # What was not over when it was freed, and still is not: whoever touches the new memory has to wait for it.
            waiting = [each for each in self._freed.get(stream, []) if not each.is_over(stream.clock)]
            self._freed[stream] = waiting
            block.history = [replace(each, start=block.start, end=block.end) for each in waiting]
            count = stream.clock.get(stream, 0)
            block.history.append(
                Access(stream, count, block.start, block.end, True, "allocated", name, "what it freed")
            )
        self._know(storage, block, clock)

    def _know(self, storage: torch.UntypedStorage, block: Block, clock: Callable[[], Clock]) -> None:
        if (known := self._blocks.get(block.start)) is not None:
            self._blocks.pop(known.start)
        self._blocks[block.start] = block
        weakref.finalize(storage, self._die, block, clock).atexit = False

    def _die(self, block: Block, clock: Callable[[], Clock]) -> None:
        """Called in any thread, in the middle of anything: noted, and worked on when memory is looked at next."""
        known = Agent("who frees")
        for each in (clock(), block.let_go, {stream: stream.clock.get(stream, 0) for stream in block.recorded}):
            known.join(each)
        self._dead.append((block, known.clock))

    def free(self, storage: torch.UntypedStorage, clock: Callable[[], Clock]) -> None:
        """Take memory back that a storage gives up while it lives on (`resize_(0)`)."""
        if storage.nbytes() and (block := self._blocks.get(storage.data_ptr())) is not None:
            self._die(block, clock)
            self.bury()

    def bury(self) -> None:
        """Hand what was freed back to its stream."""
        while self._dead:
            block, known = self._dead.popleft()
            if self._blocks.get(block.start) is not block:
                continue
            del self._blocks[block.start]
            if (stream := block.stream) is None:
                continue
            waiting = self._freed.setdefault(stream, [])
            for each in block.history:
                if each.agent is not stream and not each.is_over(known) and not each.owner:
                    waiting.append(replace(each, owner=block.name))

    def touch(self, block: Block, access: Access, clock: Clock) -> None:
        """Hold an access against those before it, and remember it."""
        kept = []
        for each in block.history:
            over = each.is_over(clock)
            if not over and each.agent is not access.agent and each.meets(access):
                self._found(Race(each, access, block.name))
            covered = access.start <= each.start and each.end <= access.end
            if not (covered and (access.is_write or not each.is_write) and (over or each.agent is access.agent)):
                kept.append(each)
        block.history = [*kept, access]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes [start, end) that a strided tensor lies in; of one with gaps, the gaps too."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()

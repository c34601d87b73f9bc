"""Who does things one after the other, and what each of them knows to be done: vector clocks.

An agent is a stream, the communication stream of a process group, or a thread of the host. It numbers what it does, and
its clock says of every agent up to which number that agent's doings are over before its own next one begins. A wait
joins clocks; nothing else orders two agents.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
        """Return whether all that `other` says to be done is known to be."""
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

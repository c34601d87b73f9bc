"""What a rank of a pipeline adds to a plan: several microbatches are under way at once, and ranks wait for each other.

device    what every microbatch between its forward and its backward keeps, and room for all that comes in
seconds   (ranks - 1) / microbatches of a step more: the first waits for the last, and the last for the first
pp        the hidden states of every microbatch, and their gradients
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from dzero.comm.ledger import Traffic
from dzero.estimate.memory import MemoryMoment, StepMemory
from dzero.estimate.microbatch_costs import FORWARD, MicrobatchCosts

NOTHING = Traffic()


@dataclass(frozen=True)
class InFlight:
    """`ahead`: forwards before the first backward. room_bytes: for hidden states and gradients that come in. names: of
    parameters of all parts; shared: of tied ones at both ends. `sent`: along pp in a step."""

    ahead: int = 1
    room_bytes: int = 0
    names: int = 0
    shared: Collection[str] = ()
    sent: Traffic = NOTHING

    def held(self, memory: StepMemory, costs: MicrobatchCosts) -> StepMemory:
        """`memory` of one microbatch, with what the others keep beside it."""
        forward = [span.saved_bytes for span in costs.spans if span.direction == FORWARD]
        more = (self.ahead - 1) * forward[-1] + self.room_bytes if forward else 0
        if not more:
            return memory
        moments = tuple(MemoryMoment(each.when, {**each.kinds, "in flight": more}) for each in memory.device)
        return replace(memory, device=moments)


ALONE = InFlight()
"""Of a run without a pipeline."""

"""Cost of pipeline parallelism for a rank: several microbatches are in flight, and pipeline ranks wait for each other.

device    saved activations of every microbatch between its forward and backward, and receive buffers
seconds   (ranks - 1) / microbatches more per step, the pipeline bubble
pp        hidden states of every microbatch, and their gradients
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
    """Microbatches in flight on a rank of a pipeline.

    Attributes:
        ahead: Forwards before the first backward.
        room_bytes: Bytes of receive buffers for hidden states and gradients.
        names: Number of parameters of all pipeline stages.
        shared: Names of tied parameters at both ends of the pipeline.
        sent: Traffic along pp per step.
    """

    ahead: int = 1
    room_bytes: int = 0
    names: int = 0
    shared: Collection[str] = ()
    sent: Traffic = NOTHING

    def held(self, memory: StepMemory, costs: MicrobatchCosts) -> StepMemory:
        """Add the activations of the other microbatches to the `memory` of one microbatch."""
        forward = [span.saved_bytes for span in costs.spans if span.direction == FORWARD]
        more = (self.ahead - 1) * forward[-1] + self.room_bytes if forward else 0
        if not more:
            return memory
        moments = tuple(MemoryMoment(each.when, {**each.kinds, "in flight": more}) for each in memory.device)
        return replace(memory, device=moments)


ALONE = InFlight()
"""A run without a pipeline."""

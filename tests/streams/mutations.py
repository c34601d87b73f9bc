"""For every wait, record and held reference of dzero/, the scenario that notices its absence: the mutation table."""

from __future__ import annotations

CAUGHT = {
    "comm/collectives.py ReduceGrads.allocate: self._loans.make": "one rank",
    "comm/collectives.py _Works.wait: work.wait": "stage 1, M=1",
    "comm/context_exchange.py ContextExchange._move: work.wait": "context parallel",
    "comm/exchange.py Exact._average: work.wait": "stage 1, M=1",
    "comm/exchange.py Exact.all_reduce: work.wait": "host, stage 0",
    "data/ahead.py BatchesAhead._copied: streams.record_event": "context parallel",
    "data/ahead.py BatchesAhead._copied: streams.wait_stream": "several microbatches",
    "data/ahead.py BatchesAhead.next: streams.wait_event": "context parallel",
    "offload/activations.py Activations._use: streams.record_stream": "activations of two streams",
    "offload/attach.py Offload.await_updates: self.swap.drain": "checkpoints beside training",
    "offload/attach.py Offload.follow_brought: self.swap.follow": "half of it on the host",
    "offload/attach.py Offload.read_grads: self.swap.wait": "gradients read before steps",
    "offload/attach.py Offload.synchronize: self.swap.drain": "host, step",
    "offload/incoming.py Incoming.bring: self._swap.follow": "host all, step",
    "offload/incoming.py Incoming.bring: streams.record_stream": "gathered ahead by hand",
    "offload/staging.py Staging.visit: visited.result": "everything off the device",
    "offload/staging.py _all: done.result": "everything off the device",
    "offload/swap.py Swap._run: future.result": "half of it on the host",
    "offload/swap.py Swap._wait: until.result": "host, not finite",
    "offload/swap.py Swap.add: self._users[name].result": "activations of two streams",
    "offload/swap.py Swap.drain: self.wait": "host, step",
    "offload/swap.py Swap.follow: enqueued.result": "activations of two streams",
    "offload/swap.py Swap.follow: streams.wait_event": "activations of two streams",
    "offload/swap.py _Lane.copy: streams.record_event": "half of it on the host",
    "offload/swap.py _Lane.copy: streams.synchronize (hold)": "half of it on the host",
    "offload/swap.py _Lane.copy: streams.synchronize (wait)": "half of it on the host",
    "offload/swap.py _Lane.copy: streams.wait_event": "half of it on the host",
    "offload/swap.py _Lane.ready: streams.record_event": "half of it on the host",
    "offload/waiting_room.py WaitingRoom.follow: self._swap.follow": "activations of two streams",
    "offload/waiting_room.py _whole: move(piece, buffer).result": "activations on disk",
    "optim/adamw.py _in_turn: wait": "states over all, host",
    "optim/handed_on.py take_over: offload.swap.drain": "another optimizer",
    "optim/matrices.py MatrixUpdates._swap: work.wait": "muon",
    "optim/offloaded_grads.py OffloadedGrads.put_sums: addition.result": "host, one rank, M=2",
    "optim/parts.py AcrossParts._add_both: work.wait": "pipeline",
    "optim/staging.py Staging._follow_stream: streams.record_stream": "columns of a step",
    "optim/staging.py Staging._follow_stream: streams.wait_stream": "columns of a step",
    "optim/staging.py _enqueue_copy: streams.record_event": "columns of a step",
    "optim/staging.py Staging.send: streams.synchronize": "columns of a step",
    "optim/unit_grads.py UnitGrads.receive: self._sharded.loans.lend (hold)": "one rank",
    "optim/unit_grads.py UnitGrads.receive: self._sharded.loans.lend (record)": "one rank",
    "zero/unit.py Unit.arrive: wait": "host, not finite",
}
"""Call: scenario."""

ORDERS_NOTHING = {
    "comm/trail.py Trail.enqueued: streams.record_event": "asked whether the device has come to it (watch.py)",
    "comm/exchange.py Native.reduce_scatter: work.wait": (
        "gloo's: on a device with streams the call runs on the current one and gives no work"
    ),
    "offload/activations.py Activation.leave: self.left.result": (
        "raises what failed: the lane holds the source until its copy has ended"
    ),
    "offload/disk_speed.py _speed: move('sample', data).result": "one move of a sample after another, by one thread",
    "offload/disk_speed.py _speed: store.write('sample', data).result": "of a sample that nobody else knows",
    "offload/pinned.py _touch: done.result": "raises what failed: the end of the pool waits for its threads",
    "offload/swap.py Swap.follow: self.wait": "of a device without streams, and of what was never started",
    "offload/swap.py Swap.move: self._leaving.popleft().result": "bounds the memory of what leaves at a time",
    "optim/unit_grads.py UnitGrads.drain: self._swap.drain": (
        "lets go of a dropped optimizer; whoever reads its states waits besides (handed_on.py)"
    ),
}
"""Call: why its absence changes no order."""

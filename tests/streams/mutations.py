"""For every wait, record and held reference of dzero/, the scenario that notices its absence: the mutation table."""

from __future__ import annotations

CAUGHT = {
    "comm/collectives.py ReduceGrads.allocate: self._loans.make": "one rank",
    "comm/collectives.py _Works.wait: work.wait": "stage 1, M=1",
    "comm/context_exchange.py ContextExchange._move: work.wait": "context parallel",
    "comm/reduction.py Exact._average: work.wait": "stage 1, M=1",
    "comm/reduction.py Exact.all_reduce: work.wait": "host, stage 0",
    "data/prefetch.py BatchesAhead._copied: streams.record_event": "context parallel",
    "data/prefetch.py BatchesAhead._copied: streams.wait_stream": "several microbatches",
    "data/prefetch.py BatchesAhead.next: streams.wait_event": "context parallel",
    "offload/activations.py Activations._use: streams.record_stream": "activations of two streams",
    "offload/manager.py Offload.await_updates: self.swap.drain": "checkpoints beside training",
    "offload/manager.py Offload.follow_brought: self.swap.follow": "half of it on the host",
    "offload/manager.py Offload.read_grads: self.swap.wait": "gradients read before steps",
    "offload/manager.py Offload.synchronize: self.swap.drain": "host, step",
    "offload/param_prefetch.py Incoming.bring: self._swap.follow": "host all, step",
    "offload/param_prefetch.py Incoming.bring: streams.record_stream": "gathered ahead by hand",
    "offload/disk_staging.py Staging.visit: visited.result": "everything off the device",
    "offload/disk_staging.py _all: done.result": "everything off the device",
    "offload/executor.py Swap._run: future.result": "half of it on the host",
    "offload/executor.py Swap._wait: until.result": "host, not finite",
    "offload/executor.py Swap.add: self._users[name].result": "activations of two streams",
    "offload/executor.py Swap.drain: self.wait": "host, step",
    "offload/executor.py Swap.follow: enqueued.result": "activations of two streams",
    "offload/executor.py Swap.follow: streams.wait_event": "activations of two streams",
    "offload/executor.py _Lane.copy: streams.record_event": "half of it on the host",
    "offload/executor.py _Lane.copy: streams.synchronize (hold)": "half of it on the host",
    "offload/executor.py _Lane.copy: streams.synchronize (wait)": "half of it on the host",
    "offload/executor.py _Lane.copy: streams.wait_event": "half of it on the host",
    "offload/executor.py _Lane.ready: streams.record_event": "half of it on the host",
    "offload/activation_pool.py WaitingRoom.follow: self._swap.follow": "activations of two streams",
    "offload/activation_pool.py _whole: move(piece, buffer).result": "activations on disk",
    "optim/adamw.py _in_turn: wait": "states over all, host",
    "optim/master_handover.py take_over: offload.swap.drain": "another optimizer",
    "optim/matrix_gather.py MatrixUpdates._swap: work.wait": "muon",
    "optim/offloaded_grads.py OffloadedGrads.put_sums: addition.result": "host, one rank, M=2",
    "optim/pipeline_grads.py AcrossParts._add_both: work.wait": "pipeline",
    "optim/column_upload.py Staging._follow_stream: streams.record_stream": "columns of a step",
    "optim/column_upload.py Staging._follow_stream: streams.wait_stream": "columns of a step",
    "optim/column_upload.py _enqueue_copy: streams.record_event": "columns of a step",
    "optim/column_upload.py Staging.send: streams.synchronize": "columns of a step",
    "optim/grad_accumulation.py UnitGrads.receive: self._sharded.loans.lend (hold)": "one rank",
    "optim/grad_accumulation.py UnitGrads.receive: self._sharded.loans.lend (record)": "one rank",
    "zero/unit.py Unit.arrive: wait": "host, not finite",
}
"""Call: scenario."""

ORDERS_NOTHING = {
    "comm/collective_log.py Trail.enqueued: streams.record_event": "asked whether the device has come to it (watch.py)",
    "comm/reduction.py Native.reduce_scatter: work.wait": (
        "gloo's: on a device with streams the call runs on the current one and gives no work"
    ),
    "offload/activations.py Activation.leave: self.left.result": (
        "raises what failed: the lane holds the source until its copy has ended"
    ),
    "offload/disk_speed.py _speed: move('sample', data).result": "one move of a sample after another, by one thread",
    "offload/disk_speed.py _speed: store.write('sample', data).result": "of a sample that nobody else knows",
    "offload/memory_pool.py _touch: done.result": "raises what failed: the end of the pool waits for its threads",
    "offload/executor.py Swap.follow: self.wait": "of a device without streams, and of what was never started",
    "offload/executor.py Swap.move: self._leaving.popleft().result": "bounds the memory of what leaves at a time",
    "optim/grad_accumulation.py UnitGrads.drain: self._swap.drain": (
        "lets go of a dropped optimizer; whoever reads its states waits besides (handed_on.py)"
    ),
}
"""Call: why its absence changes no order."""

"""For every wait, record and held reference of dzero/, the scenario that notices its absence: the mutation table."""

from __future__ import annotations

CAUGHT = {
    "comm/collectives.py ReduceGrads.allocate: self._loans.make": "one rank",
    "comm/collectives.py _Works.wait: work.wait": "stage 1, M=1",
    "comm/context_exchange.py ContextExchange._move: work.wait": "context parallel",
    "comm/hop_sum.py HopSum.average: work.wait": "two hops",
    "comm/hop_sum.py HopSum._over_groups: work.wait": "two hops",
    "comm/messages.py Chained.wait: work.wait": "two hops",
    "comm/reduction.py ExactReduction._average: work.wait": "stage 1, M=1",
    "comm/reduction.py ExactReduction.all_reduce: work.wait": "host, stage 0",
    "zero/unit.py Unit.before_read: self.wait_for_update": "parameters read between steps",
    "zero/unit.py Unit.before_write: owner.synchronize": "parameters edited between steps",
    "zero/unit.py Unit.await_update: self.wait_for_update": "host parameters read between steps",
    "zero/offloaded_param.py OffDeviceTensor.await_update: hooks.await_update": "host parameters read between steps",
    "zero/sharder.py Sharder._switch: unit.wait_for_update": "host, one rank, M=2",
    "optim/grad_accumulation.py UnitGrads._add_held: streams.record_stream": "penalty",
    "optim/grad_accumulation.py UnitGrads._hide: streams.record_stream": "penalty, M=2",
    "optim/grad_accumulation.py UnitGrads._keep_replica_shards: self._sharded.loans.lend (hold)": (
        "states over all, M=2, native"
    ),
    "optim/grad_accumulation.py UnitGrads._keep_replica_shards: self._sharded.loans.lend (record)": (
        "states over all, M=2, native"
    ),
    "optim/grad_accumulation.py UnitGrads.before_read: streams.wait_event": "penalty before",
    "optim/grad_accumulation.py UnitGrads.receive: streams.record_event": "penalty before",
    "data/prefetch.py BatchPrefetcher._copied: streams.record_event": "context parallel",
    "data/prefetch.py BatchPrefetcher._copied: streams.wait_stream": "several microbatches",
    "data/prefetch.py BatchPrefetcher.next: streams.wait_event": "context parallel",
    "offload/activations.py ActivationOffload._use: streams.record_stream": "activations of two streams",
    "offload/manager.py OffloadManager.await_updates: self.executor.drain": "checkpoints beside training",
    "offload/manager.py OffloadManager.wait_for_fetched: self.executor.stream_wait": "half of it on the host",
    "offload/manager.py OffloadManager.read_grads: self.executor.wait": "gradients read before steps",
    "offload/param_prefetch.py ParamPrefetch.fetch: self._executor.stream_wait": "host all, step",
    "offload/param_prefetch.py ParamPrefetch.fetch: streams.record_stream": "gathered ahead by hand",
    "offload/disk_staging.py DiskStaging.visit: visited.result": "everything off the device",
    "offload/disk_staging.py _all: done.result": "everything off the device",
    "offload/executor.py ScheduleExecutor._run: future.result": "half of it on the host",
    "offload/executor.py ScheduleExecutor._wait: until.result": "host, not finite",
    "offload/executor.py ScheduleExecutor.add: self._users[name].result": "activations of two streams",
    "offload/executor.py ScheduleExecutor.drain: self.wait": "host, step",
    "offload/executor.py ScheduleExecutor.stream_wait: enqueued.result": "activations of two streams",
    "offload/executor.py ScheduleExecutor.stream_wait: streams.wait_event": "activations of two streams",
    "offload/lane.py Lane.copy: streams.record_event": "half of it on the host",
    "offload/lane.py Lane.copy: streams.synchronize (hold)": "half of it on the host",
    "offload/lane.py Lane.copy: streams.synchronize (wait)": "half of it on the host",
    "offload/lane.py Lane.copy: streams.wait_event": "half of it on the host",
    "offload/lane.py Lane.ready: streams.record_event": "half of it on the host",
    "offload/activation_pool.py ActivationPool.stream_wait: self._executor.stream_wait": "activations of two streams",
    "offload/activation_pool.py _whole: move(piece, buffer).result": "activations on disk",
    "optim/adamw.py _in_turn: wait": "states over all, host",
    "optim/master_handover.py take_over: offload.executor.drain": "another optimizer",
    "optim/unsharded_updates.py _wait_for: work.wait": "muon",
    "optim/offloaded_grads.py OffloadedGrads.put_sums: addition.result": "host, one rank, M=2",
    "optim/pipeline_grads.py PipelineGrads._add_both: work.wait": "pipeline",
    "optim/column_upload.py ColumnUpload._follow_stream: streams.record_stream": "columns of a step",
    "optim/column_upload.py ColumnUpload._follow_stream: streams.wait_stream": "columns of a step",
    "optim/column_upload.py _enqueue_copy: streams.record_event": "columns of a step",
    "optim/column_upload.py ColumnUpload.send: streams.synchronize": "columns of a step",
    "optim/grad_accumulation.py UnitGrads.receive: self._sharded.loans.lend (hold)": "one rank",
    "optim/grad_accumulation.py UnitGrads.receive: self._sharded.loans.lend (record)": "one rank",
    "zero/unit.py Unit.wait_for_update: wait": "host, not finite",
}
"""Call: scenario."""

A_PROCESS = "a process that has no tensors ends"
PARKED = "an error of the device is raised while there are two copies; streams wait for each other besides"
ORDERS_NOTHING = {
    "data/template_process.py TemplateProcess._ended: self._process.wait": A_PROCESS,
    "data/template_process.py _end: process.wait": A_PROCESS,
    "comm/watchdog.py Watchdog._run: self._over.wait": "the time between two heartbeats",
    "comm/collective_log.py CollectiveLog.enqueued: streams.record_event": "the watchdog asks whether it has passed",
    "comm/reduction.py NativeReduction.reduce_scatter: work.wait": "gloo's: where there are streams it gives no work",
    "offload/activations.py OffloadedActivation.leave: self.left.result": "raises what failed: a lane holds the source",
    "offload/disk_speed.py _speed: move('sample', data).result": "one move of a sample after another, by one thread",
    "offload/disk_speed.py _speed: store.write('sample', data).result": "of a sample that nobody else knows",
    "optim/grad_decision.py Gradients.clear: self._sharded.loans.clear": "for a backward that raised",
    "offload/memory_pool.py _touch: done.result": "raises what failed: the end of the pool waits for its threads",
    "offload/executor.py ScheduleExecutor.stream_wait: self.wait": "without streams, and of what was never started",
    "optim/grad_accumulation.py UnitGrads.drain: self._executor.drain": "who reads states waits in master_handover.py",
    "trainer/metrics.py MetricsRecorder.share: streams.record_event": "the host reads the decision later, which waits",
    "trainer/metrics.py MetricsRecorder.share: streams.synchronize": "as the event that it waits for",
    "zero/parking.py Parking._save: streams.synchronize_device": PARKED,
    "zero/parking.py Parking.restore: streams.synchronize_device": PARKED,
}
"""Call: why its absence changes no order."""

UNSEEN = {
    "offload/manager.py OffloadManager.come_to_rest: self.synchronize",
    "offload/manager.py OffloadManager.end_step: self.synchronize",
    "offload/manager.py OffloadManager.update: self._outgoing.await_update",
    "offload/param_prefetch.py ParamPrefetch.__init__: unit.await_update",
    "offload/param_prefetch.py ParamPrefetch.fetch: unit.wait_for_update",
    "offload/param_writeback.py ParamWriteback._outdate: self._units[unit].await_update",
    "optim/adamw.py AdamW._share: unit.wait_for_update",
    "optim/adamw.py AdamW.synchronize: super().synchronize",
    "optim/master_handover.py take_over: unit.wait_for_update",
    "optim/torch_optimizer.py TorchOptimizer._update: self.synchronize",
    "optim/torch_optimizer.py TorchOptimizer.synchronize: super().synchronize",
    "trainer/trainer.py Trainer.run: self.optim.synchronize",
    "zero/offloaded_param.py OffDeviceShard.read: self.memory.await_update",
    "zero/offloaded_param.py _on_host: tensor.memory.await_update",
    "zero/offloaded_state_dicts.py hook_state_dicts: unit.await_update",
    "zero/parking.py Parking.__init__: unit.await_update",
    "zero/unit.py Unit._hold: self.await_update",
    "zero/unit.py Unit.fetch: self.wait_for_update",
}
"""Calls of waits that are listed above by themselves, whose absence no scenario shows: another call waits there too, or
no scenario comes by. A new one belongs here only until a scenario is found."""

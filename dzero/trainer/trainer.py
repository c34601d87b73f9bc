"""Training loop: build, step, evaluate, report.

A step has these phases: forward and backward of the microbatches; the ranks share their losses and stop requests; the
optimizer makes one decision for all ranks and updates or skips; the learning rate changes; the step is recorded.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import record_function

from dzero.comm.collectives import gather_json
from dzero.comm.watchdog import Watchdog
from dzero.config import RunConfig, as_yaml
from dzero.data.chats import ChatCorpus
from dzero.data.corpus import load
from dzero.data.mixed_sequences import stream_over
from dzero.data.mixture import MixedCorpus
from dzero.data.prefetch import BatchPrefetcher
from dzero.errors import RunError, user_errors
from dzero.hardware import dtype_of, format_count, slow_products
from dzero.launch.signals import EXIT_SAVED, StopRequest
from dzero.models.build import count
from dzero.monitor.memory import MemoryMeter
from dzero.monitor.out_of_memory import explained
from dzero.monitor.profile import Profiler
from dzero.monitor.records import RunSummary
from dzero.monitor.sinks import Monitor
from dzero.optim.build import build_optimizer
from dzero.plan.plan_run import log_plan
from dzero.plan.run_layout import check_ranks
from dzero.trainer.answers import answer, answers_of
from dzero.trainer.build import BuiltModel
from dzero.trainer.checkpointing import Progress, RunCheckpoints
from dzero.trainer.export import check_export, export, is_exported
from dzero.trainer.held_out import Evaluation, HeldOut, HeldOutRecord
from dzero.trainer.isolation import check_isolation
from dzero.trainer.metrics import MetricsRecorder, SharedLoss
from dzero.utils.stdout import outlast_readers
from dzero.utils.terminal import from_here
from dzero.zero.dtensors import local_of


class TrainingStopped(RunError):
    """Error that ends a run that cannot continue; the message says why and what to change."""


def train(config: RunConfig, run_folder: Path, device: torch.device) -> None:
    """Run one worker of a run, inside the process group; all ranks use rank 0's `run_folder`."""
    outlast_readers()
    with Watchdog(config.launch.timeout) as watch:
        # torchrun may start ranks in other folders or at other times, so all take that of rank 0.
        world = dist.group.WORLD
        assert world is not None
        folder = Path(gather_json(str(run_folder.absolute()), world)[0])
        with user_errors():
            trainer = Trainer(config, folder, device)
        watch.started()
        if trainer.is_done:
            trainer.close()
        else:
            recorder = trainer.recorder
            held, planned = recorder.memory_by_kind, lambda: recorder.planned_bytes
            with explained(folder, dist.get_rank(), device, held, planned):
                trainer.run()


class Trainer:
    """State of one worker's run."""

    def __init__(self, config: RunConfig, run_folder: Path, device: torch.device) -> None:
        self.device, self.run_folder = device, run_folder
        self.rank, world = dist.get_rank(), dist.get_world_size()
        check_ranks(config, world)
        memory = MemoryMeter(device)
        length, multiple = config.train.sequence_tokens, config.token_multiple
        self.corpus = load(config.data, config.model_folder, length)
        train = self.corpus.train_sequences(length, multiple)
        readers = config.mesh.readers(config.mesh.data_ranks(world))
        self.config = config = replace(config, train=config.train.over(len(train), readers))
        self.built = built = BuiltModel(config, device, self.corpus.vocab_size)
        self.sharded, self.microbatches = built.sharded, built.microbatches
        self.sharded.ledger.collective_log.check = config.launch.check_collectives
        self.optim = build_optimizer(self.sharded, config.optim, config.scaler)
        self.schedule = LambdaLR(self.optim, config.schedule.factor(config.train.steps))
        slices = {
            "microbatch_sequences": config.train.microbatch_sequences,
            "rank": built.reader,
            "ranks": built.readers,
        }
        self.stream = stream_over(train, seed=config.train.seed, shuffle=config.data.shuffle, **slices)
        check_isolation(built, train.read(np.zeros(config.train.microbatch_sequences, np.int64)))
        self.batches = BatchPrefetcher(self.stream, device)
        self.evaluation = Evaluation(config, self.corpus, built, multiple, slices)
        self.held_out = HeldOutRecord()
        progress = Progress(self.schedule, self.stream, self.held_out)
        self.saves = RunCheckpoints(config, self.sharded, self.optim, progress, device, built.base)
        self.done_steps = self.saves.resume()
        if not self.is_done:
            check_export(config, self.sharded.model, run_folder)
        self.recorder = MetricsRecorder(config, built, self.optim, memory, device, self.done_steps)
        self.profiler = Profiler(
            config.profile, run_folder, rank=self.rank, device=device, run_steps=config.train.steps
        )

    @property
    def is_done(self) -> bool:
        """Whether no step is left when the run starts: all were made, or the run that it resumes ended by patience."""
        return self.done_steps >= self.config.train.steps or self._out_of_patience

    @property
    def _out_of_patience(self) -> bool:
        patience = self.config.train.patience
        return patience is not None and self.held_out.worse >= patience

    def close(self) -> None:
        """Report that no step is left to train, as for a finished run that is started again; release everything.

        The model is exported if the run asks for it, because the finished run may have died before its export. A folder
        that exists is left as it is.
        """
        self.sharded.forget_masters()
        config, made = self.config, self.done_steps
        why = f"train.steps={config.train.steps}"
        if made < config.train.steps:
            why = f"and no lower held-out loss came in train.patience={config.train.patience} evaluations"
        lines = [*self.saves.notes, f"nothing is left to train: {made} steps were made, {why}"]
        with self.saves:
            if config.export.at_end and is_exported(config, self.run_folder):
                lines.append(
                    f"not exported again: {from_here(self.run_folder / config.export.folder)} is there already"
                )
            elif config.export.at_end:
                lines += self._export(made)
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def run(self) -> RunSummary:
        """Train to the last step, evaluate on the way, and return the summary, which only differs in traffic by rank.

        If a signal asks to stop, exit with `EXIT_SAVED` if the last step is saved, else with 1.
        """
        config, steps = self.config, self.config.train.steps
        self.sharded.forget_masters()
        monitor = Monitor(
            config.monitor, self.run_folder, rank=self.rank, total_steps=steps, resolved_config=as_yaml(config)
        )
        deadline_s = config.checkpoint.deadline_s if config.checkpoint.every is not None else None
        with monitor, self.profiler, self.saves, StopRequest(deadline_s) as stop:
            float8 = self.sharded.float8
            slow = slow_products(dtype_of(config.precision.param), self.device.type)
            products = [] if float8 is None else [float8.line()]
            products += [slow] if slow else []
            for line in [self._describe_run(), *products, *self.optim.describe(), *self.saves.notes]:
                monitor.note(self.done_steps, line)
            self.recorder.memory.reset()
            held_out = None
            for step in range(self.done_steps + 1, steps + 1):
                shared = self.step(step, monitor, stop=stop.asked is not None)
                self.profiler.step()
                due = step == steps or step % config.train.evaluate_every_steps == 0
                if due and (step == steps or not shared.stop):
                    held_out = self._evaluate(step, monitor)
                ends = self._out_of_patience
                saved = self.saves.after(step, monitor, stop=shared.stop or ends)
                if shared.stop and step < steps:
                    self._stop(step, monitor, stop, saved=saved)
                if saved:
                    stop.saved()  # the last step is saved, so later signals need no reaction
                if ends:
                    worse = f"no lower held-out loss in {config.train.patience} evaluations: the run ends here"
                    monitor.note(step, worse)
                    break
            self.optim.synchronize()  # raises errors of the last update
            summary = self.recorder.summarise(held_out)
            if config.export.at_end:
                for line in self._export(step):
                    monitor.note(step, line)
            monitor.summary(summary)
        return summary

    def _export(self, step: int) -> list[str]:
        """Export the model of the last `step`, or load and export the best; return lines for the user."""
        best = [self.saves.load_best(step)] if self.config.export.which == "best" else []
        return [*best, f"exported to {from_here(export(self.config, self.sharded, self.run_folder))}"]

    def step(self, step: int, monitor: Monitor, *, stop: bool = False) -> SharedLoss:
        """Make one optimizer step, numbered from 1; `stop` means that this rank was asked to stop after it."""
        self.recorder.meter.begin()
        first = step == self.done_steps + 1
        with self.built.counted() if first else nullcontext():
            loss = self._microbatches()
        read_shared = self.recorder.share(loss, stop=stop)
        self.recorder.before_update()
        self.optim.refuse_step(lambda: self._nonfinite_loss(step, read_shared().nonfinite_rank))
        self.optim.step()
        shared = read_shared()
        self.schedule.step()
        self._after_update(step, monitor)
        monitor.step(self.recorder.end_step(step, shared.loss))
        if first:
            self._plan(step, monitor)  # not before the first step, so that a restarted run trains as early as possible
        return shared

    def _microbatches(self) -> torch.Tensor:
        """Run forward and backward of the step's microbatches; return their mean loss on this rank, fp32 scalar.

        The mean over all ranks is the mean over the tokens of the step that count. Every rank knows their number before
        the step, because the stream knows it of all ranks' sequences.
        """
        counted = self.stream.counted(self.microbatches)
        self.recorder.count(counted, self.stream.use(self.microbatches))
        share = counted / self.built.parts
        if self.built.pipeline is not None:
            batches = [self.batches.next() for _ in range(self.microbatches)]
            return self.built.pipelined(batches, share, self.optim.scale_loss)
        total = torch.zeros((), device=self.device)
        for index in range(self.microbatches):
            with self.sharded.microbatch(is_last=index == self.microbatches - 1), self.built.losses():
                loss = self.built.loss(self.batches.next(), share) / self.microbatches
                with record_function("backward"):
                    self.optim.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
                total += local_of(loss.detach())
        return total

    def _nonfinite_loss(self, step: int, nonfinite_rank: int | None) -> str:
        """Return a description of the loss of rank `nonfinite_rank`, or an empty string; raise if train.on_nan=stop.

        A non-finite loss can have finite gradients, which would otherwise be applied.
        """
        if nonfinite_rank is None:
            return ""
        whose = f"the loss of rank {nonfinite_rank}"
        if self.config.train.on_nan == "stop":
            raise TrainingStopped(
                f"step {step}: {whose} is not finite, and train.on_nan=stop. The step was not made; train.on_nan=skip "
                "leaves such steps out. Lower optim.lr, or look at the data"
            )
        return whose

    def _stop(self, step: int, monitor: Monitor, stop: StopRequest, *, saved: bool) -> None:
        """Exit after all ranks reached this step, and the run is saved or its failure was reported."""
        name = stop.asked.name if stop.asked is not None else "a signal to another rank"
        if not saved:
            monitor.note(step, f"{name}: stopped after step {step}, which is NOT SAVED")
            sys.exit(1)
        stop.saved()
        monitor.note(step, f"{name}: stopped after step {step}, which is saved; resume=auto goes on from here")
        sys.exit(EXIT_SAVED)

    def _after_update(self, step: int, monitor: Monitor) -> None:
        decision = self.optim.last_decision
        assert decision is not None
        self.built.balance.step(made=decision.finite)
        if decision.finite:
            return
        where = ", ".join(decision.nonfinite_params[:3]) + (", ..." if len(decision.nonfinite_params) > 3 else "")
        monitor.note(step, f"skipped, not finite: {where}")
        if self.optim.consecutive_skips > self.config.train.max_skipped_steps:
            raise TrainingStopped(
                f"{self.optim.consecutive_skips} steps in a row had non-finite gradients, last in {where}; "
                f"train.max_skipped_steps={self.config.train.max_skipped_steps} allows no more. Lower optim.lr or "
                "scaler.init, take precision=bf16, or look at the data"
            )

    @torch.no_grad()
    def _evaluate(self, step: int, monitor: Monitor) -> HeldOut | None:
        """Report and return the held-out loss; None if nothing is held out.

        The model then answers some held-out conversations.
        """
        if not self.evaluation:
            return None
        self.sharded.train(False)
        found = self.evaluation(self.recorder.sum_over_ranks)
        said, answers = list[str](), answers_of(self.config)
        if answers and isinstance(self.corpus, ChatCorpus | MixedCorpus):
            said = answer(self.sharded.model, self.corpus, answers, self.config.train.answer_tokens, self.device)
        self.sharded.train(True)
        self.sharded.reshard()
        self.sharded.ledger.take()  # discard the traffic of evaluation
        self.held_out.add(step, found.loss)
        monitor.held_out(step, found.loss, found.by_source)
        for line in said:
            monitor.note(step, line)
        return found

    def _plan(self, step: int, monitor: Monitor) -> None:
        """Write this run's plan to TensorBoard."""
        if monitor.board is not None and self.config.monitor.plan:
            ranks, vocab_size = self.sharded.layout.ranks, self.corpus.vocab_size
            with self.recorder.memory.aside():
                told = log_plan(monitor.board, step, self.config, ranks, self.device.type, vocab_size)
            self.recorder.planned_bytes, lacks = told
            if lacks:
                monitor.note(step, lacks)

    def _describe_run(self) -> str:
        layout, mesh = self.sharded.layout, self.config.mesh
        axes = f"{layout.replicate} replicate x {layout.shard} shard" + (f" x {mesh.tp} tp" if mesh.tp > 1 else "")
        axes += f" x {mesh.pp} pp, {mesh.pp_schedule}" if mesh.pp > 1 else ""
        axes += f", {mesh.cp} to a sequence" if mesh.cp > 1 else ""
        axes += f", {mesh.ep} to the experts" if mesh.ep > 1 else ""
        here = " of the first rank" if mesh.pp > 1 else ""
        adapters = sum(param.numel() for param in self.sharded.model.parameters() if param.requires_grad)
        trained = f", {format_count(adapters)} of them trained," if self.config.adapter.kind != "none" else ""
        return (
            f"{format_count(count(self.sharded.model))} parameters{here}{trained} in {len(self.sharded.units)} units, "
            f"stage {layout.stage} on {dist.get_world_size()} {self.device.type} ranks ({axes}), "
            f"{self.config.precision.param}; "
            f"{self.corpus.summary}; run folder {from_here(self.run_folder)}"
        )

"""Small faults planted in the core, each of which the default suite must catch.

    python tests/stress/mutations.py               each fault in a copy of the tree: the test beside it must fail
    python tests/stress/mutations.py --find        the whole default suite on each fault; which tests fail first
    python tests/stress/mutations.py NAME ...      these faults alone, with either

The tests beside the faults pass on the tree as it is, which is checked first. A fault whose text is not in the tree any
more is an error: plant it where the idea has gone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", "*.egg-info", "__pycache__", ".*_cache", "outputs", "site")
AT_MOST_S = 1800


class Fault(NamedTuple):
    """`before`, which a file of dzero/ has once, becomes `after`; `caught_by` is a test of the default suite."""

    file: str
    before: str
    after: str
    caught_by: str


FAULTS = {
    "the norm lacks the last rank's sums": Fault(
        "optim/grad_norm.py",
        "return in_rank_order(found[:, 1:]), self._any_edited(found[:, 0])",
        "return in_rank_order(found[:-1, 1:]), self._any_edited(found[:, 0])",
        "tests/test_recorded.py::test_a_run_has_the_bits_of_the_oracle",
    ),
    "the norm lacks the last chunk of a large gradient": Fault(
        "optim/cpu_kernels.py",
        "for begin in range(0, whole.size, CHUNK_ELEMS):",
        "for begin in range(0, max(1, whole.size - CHUNK_ELEMS), CHUNK_ELEMS):",
        "tests/optim/inside/test_inside_adamw.py::test_sums_of_squares_have_the_bits_of_the_order_of_the_contract",
    ),
    "copies along tp count in the norm once each": Fault(
        "optim/grad_norm.py",
        "counts_once = ~torch.tensor(cut) & sums.isfinite().all(0)",
        "counts_once = torch.zeros(len(cut), dtype=torch.bool)",
        "tests/parallel/test_cut_training.py::test_a_cut_model_trains_as_in_one_process",
    ),
    "tied weights of a pipeline count in the norm at both ends": Fault(
        "optim/pipeline_grads.py",
        "[stages.has_first or name not in stages.shared for name in owned]",
        "[True for name in owned]",
        "tests/parallel/test_cut_runs.py::test_a_run_goes_on_over_other_axes_and_back",
    ),
    "a gather does not wait for the update": Fault(
        "zero/unit.py",
        "        if wait is not None:\n            wait()\n\n    def fetch",
        "        if wait is not None:\n            pass\n\n    def fetch",
        "tests/offload/test_overlap.py::test_delayed_is_the_one_step_stale_reference_to_the_bit",
    ),
    "a fetched copy stays after an update": Fault(
        "offload/param_prefetch.py",
        "        self._ahead.pop(unit, None)\n        self._encoded.discard(unit)",
        "        self._encoded.discard(unit)",
        "tests/offload/test_offload_parity.py::test_states_elsewhere_give_the_bits_of_the_device",
    ),
    "a fetched shard is not kept for the stream that reads it": Fault(
        "offload/param_prefetch.py",
        "            streams.record_stream(tensor)  # another stream may have been current at its allocation",
        "            pass",
        "tests/streams/inside/test_scenarios.py::test_the_table_names_every_wait_once",
    ),
    "an action does not wait for those that use its slots": Fault(
        "offload/executor.py",
        "earlier = [self._users[slot] for slot in action.slots if slot in self._users]",
        "earlier = [self._users[slot] for slot in action.slots[:1] if slot in self._users]",
        "tests/offload/test_overlap.py::test_delayed_is_the_one_step_stale_reference_to_the_bit",
    ),
    "a mean is rounded twice": Fault(
        "comm/host_sum.py",
        "                mean = total[i] * scale\n",
        "                mean = from_bf16(to_bf16(total[i])) * scale\n",
        "tests/comm/inside/test_inside_sums.py::test_exact_is_the_rank_ordered_fp32_average_in_pieces_of_any_size",
    ),
    "ranks are not added in rank order": Fault(
        "comm/host_sum.py",
        "payload = (mine if r == rank else incoming[r])[start : start + size]",
        "payload = (mine if ranks - 1 - r == rank else incoming[ranks - 1 - r])[start : start + size]",
        "tests/comm/inside/test_inside_sums.py::test_exact_is_the_rank_ordered_fp32_average_in_pieces_of_any_size",
    ),
    "the divisor is off at several microbatches": Fault(
        "trainer/trainer.py",
        "loss = self.built.loss(self.batches.next(), share) / self.microbatches",
        "loss = self.built.loss(self.batches.next(), share) / max(1, self.microbatches - 1)",
        "tests/trainer/test_finetune.py::test_a_step_is_that_of_transformers_however_split",
    ),
    "the divisor of fp32 sums is that of one rank less": Fault(
        "comm/reduction.py",
        "output.copy_(total.mul_(1.0 / self.ranks))",
        "output.copy_(total.mul_(1.0 / max(1, self.ranks - 1)))",
        "tests/comm/inside/test_inside_sums.py::test_exact_is_the_rank_ordered_fp32_average_in_pieces_of_any_size",
    ),
    "the second moment is not loaded": Fault(
        "optim/param_state.py",
        "                self.flat(key).copy_(moments[key])\n",
        "                self.flat(key).copy_(moments[self.kept[0]])\n",
        "tests/checkpoint/test_any_to_any.py::test_masters_moments_and_counts_go_from_layout_to_layout_exactly",
    ),
    "the number of updates is not loaded": Fault(
        "optim/adamw.py",
        '            stored.tensors["step"].fill_(each.scalars["step"])\n',
        "",
        "tests/checkpoint/test_any_to_any.py::test_masters_moments_and_counts_go_from_layout_to_layout_exactly",
    ),
    "what the replicas send back is not counted": Fault(
        "comm/collectives.py",
        "sent = sent_bytes(legs_of_sum(wire, owned, exchange.hops)) + (exchange.ranks - 1) * owned * back.itemsize",
        "sent = sent_bytes(legs_of_sum(wire, owned, exchange.hops))",
        "tests/zero/test_traffic.py::test_a_step_moves_what_the_table_says",
    ),
    "a step that overflows is taken": Fault(
        "optim/grad_decision.py",
        "finite = bool(torch.isfinite(totals).all())",
        "finite = True",
        "tests/optim/test_overflow.py::test_a_step_with_a_gradient_that_is_not_finite_is_skipped_by_all",
    ),
    "the loss scale grows one step late": Fault(
        "optim/loss_scaler.py",
        "if self._good_steps >= config.growth_interval:",
        "if self._good_steps > config.growth_interval:",
        "tests/optim/test_overflow.py::test_the_scale_of_fp16_moves_as_configured",
    ),
    "gradients are clipped before they are unscaled": Fault(
        "optim/grad_decision.py",
        "norm = math.sqrt(sum(totals.abs().tolist())) / scale",
        "norm = math.sqrt(sum(totals.abs().tolist()))",
        "tests/test_recorded.py::test_a_run_has_the_bits_of_the_oracle",
    ),
    "the bias of the second moment is that of the step before": Fault(
        "optim/adamw_math.py",
        "1 / (1 - beta2**step) ** 0.5,",
        "1 / (1 - beta2 ** max(1, step - 1)) ** 0.5,",
        "tests/test_recorded.py::test_a_run_has_the_bits_of_the_oracle",
    ),
    "a tie is rounded down": Fault(
        "optim/cpu_kernels.py",
        "work[i] = np.uint16((bits + np.uint32(0x8000)) >> np.uint32(16))",
        "work[i] = np.uint16((bits + np.uint32(0x7FFF)) >> np.uint32(16))",
        "tests/optim/inside/test_inside_adamw.py::test_a_master_halfway_between_two_bf16_values_goes_up_and_stays_whole",
    ),
    "an update in delay begins a step late": Fault(
        "offload/param_writeback.py",
        'offload.mode == "delayed" and updates >= offload.delay_warmup_steps',
        'offload.mode == "delayed" and updates > offload.delay_warmup_steps',
        "tests/offload/test_overlap.py::test_delayed_is_the_one_step_stale_reference_to_the_bit",
    ),
    "an early update is not rolled back": Fault(
        "offload/undo.py",
        "            update.is_undone = True\n            self._staging.drop(unit)",
        "            self._exchanged ^= {unit}",
        "tests/offload/test_overlap.py::test_a_second_backward_is_refused_and_leaves_the_states_as_they_were",
    ),
    "a replica's part of the states begins a row early": Fault(
        "zero/replica_shards.py",
        "return slice(first * shape.row_elems, (first + count) * shape.row_elems)",
        "return slice(max(0, first - 1) * shape.row_elems, max(0, first + count - 1) * shape.row_elems)",
        "tests/zero/test_replica_shards.py::test_parts_of_states_give_the_bits_of_whole_shards_of_them",
    ),
    "the scale of a block of 8-bit moments is its neighbour's": Fault(
        "checkpoint/load_unit.py",
        "by = shift // BLOCK_ELEMS",
        "by = max(0, shift // BLOCK_ELEMS - 1)",
        "tests/checkpoint/test_any_to_any.py::test_blocks_of_8_bits_that_align_are_the_same_and_others_near",
    ),
    "a gradient that no rank reached is updated with zeros": Fault(
        "optim/grad_decision.py",
        "is_reached = (totals.signbit() | (totals != 0)).tolist()",
        "is_reached = [True] * len(totals)",
        "tests/zero/test_unused.py::test_what_no_rank_reached_stays_and_what_one_reached_moves",
    ),
    "a checkpoint counts before all of its parts are there": Fault(
        "checkpoint/saver.py",
        "manifest = Manifest(VERSION, step, tuple(seals), state",
        "manifest = Manifest(VERSION, step, (seals[0],) * len(seals), state",
        "tests/checkpoint/test_any_to_any.py::test_masters_moments_and_counts_go_from_layout_to_layout_exactly",
    ),
    "every epoch has the order of the first": Fault(
        "data/order.py",
        "keys = np.random.SeedSequence(seed, spawn_key=(epoch,))",
        "keys = np.random.SeedSequence(seed, spawn_key=(0,))",
        "tests/data/inside/test_inside_stream.py::test_the_order_looks_random",
    ),
    "weight decay on norms and biases": Fault(
        "optim/build.py",
        '{"params": vectors, "weight_decay": 0.0}',
        '{"params": vectors, "weight_decay": weight_decay}',
        "tests/trainer/test_finetune.py::test_a_step_is_that_of_transformers_however_split",
    ),
    "a late reduction is of this replica alone": Fault(
        "optim/grad_accumulation.py",
        "        elif self._unit.average is not None:\n            self._unit.average(buffer)\n        for",
        "        for",
        "tests/habits/test_models_and_loops.py::test_a_model_and_a_loop_that_meet_give_what_torch_gives",
    ),
}


def plant(fault: Fault, tree: Path) -> None:
    path = tree / "dzero" / fault.file
    text = path.read_text()
    assert text.count(fault.before) == 1, f"{fault.file} has {text.count(fault.before)} times: {fault.before}"
    path.write_text(text.replace(fault.before, fault.after))


def run(tree: Path, words: Sequence[str]) -> tuple[int, str]:
    """pytest in a tree; its exit code and what it printed."""
    env = os.environ | {"PYTHONPATH": str(tree)}
    line = [sys.executable, "-m", "pytest", *words]
    ended = subprocess.run(line, cwd=tree, env=env, capture_output=True, text=True, timeout=AT_MOST_S, check=False)
    return ended.returncode, ended.stdout


def main() -> None:
    names = [word for word in sys.argv[1:] if not word.startswith("-")] or [*FAULTS]
    find, missed = "--find" in sys.argv, list[str]()
    at_once = ["-n", "2", "--dist", "loadfile"]
    with TemporaryDirectory() as folder:
        clean, tree = Path(folder, "clean"), Path(folder, "tree")
        shutil.copytree(ROOT, clean, ignore=LEFT_OUT)
        if not find:
            code, told = run(clean, [*at_once, *{FAULTS[name].caught_by for name in names}])
            assert code == 0, f"without a fault fails:\n{told[-3000:]}"
        for name in names:
            began_s = time.monotonic()
            shutil.copytree(clean, tree)
            plant(FAULTS[name], tree)
            code, told = run(tree, [*at_once, "-x"] if find else ["-x", FAULTS[name].caught_by])
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
            print(
                f"{'caught' if code == 1 else 'MISSED'} in {time.monotonic() - began_s:.0f} s: {name}",
                *failed[:3],
                sep="\n    ",
                flush=True,
            )
            if code != 1:
                missed.append(name)
            shutil.rmtree(tree)
    sys.exit(f"not caught: {missed}" if missed else 0)


if __name__ == "__main__":
    main()

"""Small faults planted in the core, each of which the default suite must catch.

    python tests/stress/mutations.py               each fault in a copy of the tree: the test beside it must fail
    python tests/stress/mutations.py --find        the whole default suite on each fault; which tests fail first
    python tests/stress/mutations.py NAME ...      these faults alone, with either

Every test beside a fault passes on the tree as it is, which is checked first. A fault whose text is not in the tree any
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
LEFT_OUT = shutil.ignore_patterns(".git", "*.egg-info", ".*_cache", "outputs", "site")
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
        "",
    ),
    "the norm lacks the last chunk of a large gradient": Fault(
        "optim/cpu_kernels.py",
        "for begin in range(0, whole.size, CHUNK_ELEMS):",
        "for begin in range(0, max(1, whole.size - CHUNK_ELEMS), CHUNK_ELEMS):",
        "",
    ),
    "copies along tp count in the norm once each": Fault(
        "optim/grad_norm.py",
        "counts_once = ~torch.tensor(cut) & sums.isfinite().all(0)",
        "counts_once = torch.zeros(len(cut), dtype=torch.bool)",
        "",
    ),
    "tied weights of a pipeline count in the norm at both ends": Fault(
        "optim/pipeline_grads.py",
        "[stages.has_first or name not in stages.shared for name in owned]",
        "[True for name in owned]",
        "",
    ),
    "a gather does not wait for the update": Fault(
        "zero/unit.py",
        "        if wait is not None:\n            wait()\n\n    def fetch",
        "        if wait is not None:\n            pass\n\n    def fetch",
        "",
    ),
    "a fetch does not wait for the update": Fault(
        "offload/param_prefetch.py",
        "        name = unit.shape.name\n        unit.wait_for_update()\n        self._start(name)",
        "        name = unit.shape.name\n        self._start(name)",
        "",
    ),
    "a fetched copy stays after an update": Fault(
        "offload/param_prefetch.py",
        "        self._ahead.pop(unit, None)\n        self._encoded.discard(unit)",
        "        self._encoded.discard(unit)",
        "",
    ),
    "a fetched shard is not kept for the stream that reads it": Fault(
        "offload/param_prefetch.py",
        "            streams.record_stream(tensor)  # another stream may have been current at its allocation",
        "            pass",
        "",
    ),
    "an action does not wait for those that use its slots": Fault(
        "offload/executor.py",
        "earlier = [self._users[slot] for slot in action.slots if slot in self._users]",
        "earlier = [self._users[slot] for slot in action.slots[:1] if slot in self._users]",
        "",
    ),
    "a mean is rounded twice": Fault(
        "comm/host_sum.py",
        "                mean = total[i] * scale\n",
        "                mean = from_bf16(to_bf16(total[i])) * scale\n",
        "",
    ),
    "ranks are not added in rank order": Fault(
        "comm/host_sum.py",
        "payload = (mine if r == rank else incoming[r])[start : start + size]",
        "payload = (mine if ranks - 1 - r == rank else incoming[ranks - 1 - r])[start : start + size]",
        "",
    ),
    "the divisor is off at several microbatches": Fault(
        "trainer/trainer.py",
        "loss = self.built.loss(self.batches.next(), share) / self.microbatches",
        "loss = self.built.loss(self.batches.next(), share) / max(1, self.microbatches - 1)",
        "",
    ),
    "the divisor of fp32 sums is that of one rank less": Fault(
        "comm/reduction.py",
        "output.copy_(total.mul_(1.0 / self.ranks))",
        "output.copy_(total.mul_(1.0 / max(1, self.ranks - 1)))",
        "",
    ),
    "the second moment is not loaded": Fault(
        "optim/param_state.py",
        "                self.flat(key).copy_(moments[key])\n",
        "                self.flat(key).copy_(moments[self.kept[0]])\n",
        "",
    ),
    "the number of updates is not loaded": Fault(
        "optim/adamw.py",
        '            stored.tensors["step"].fill_(each.scalars["step"])\n',
        "",
        "",
    ),
    "what the replicas send back is not counted": Fault(
        "comm/collectives.py",
        "sent = sent_bytes(legs_of_sum(wire, owned, exchange.hops)) + (exchange.ranks - 1) * owned * back.itemsize",
        "sent = sent_bytes(legs_of_sum(wire, owned, exchange.hops))",
        "",
    ),
    "a step that overflows is taken": Fault(
        "optim/grad_decision.py",
        "finite = bool(torch.isfinite(totals).all())",
        "finite = True",
        "",
    ),
    "the loss scale grows one step late": Fault(
        "optim/loss_scaler.py",
        "if self._good_steps >= config.growth_interval:",
        "if self._good_steps > config.growth_interval:",
        "",
    ),
    "gradients are clipped before they are unscaled": Fault(
        "optim/grad_decision.py",
        "norm = math.sqrt(sum(totals.abs().tolist())) / scale",
        "norm = math.sqrt(sum(totals.abs().tolist()))",
        "",
    ),
    "the bias of the second moment is that of the step before": Fault(
        "optim/adamw_math.py",
        "1 / (1 - beta2**step) ** 0.5,",
        "1 / (1 - beta2 ** max(1, step - 1)) ** 0.5,",
        "",
    ),
    "a tie is rounded down": Fault(
        "optim/cpu_kernels.py",
        "work[i] = np.uint16((bits + np.uint32(0x8000)) >> np.uint32(16))",
        "work[i] = np.uint16((bits + np.uint32(0x7FFF)) >> np.uint32(16))",
        "",
    ),
    "an update in delay begins a step late": Fault(
        "offload/param_writeback.py",
        'offload.mode == "delayed" and updates >= offload.delay_warmup_steps',
        'offload.mode == "delayed" and updates > offload.delay_warmup_steps',
        "",
    ),
    "an early update is not rolled back": Fault(
        "offload/undo.py",
        "            update.is_undone = True\n            self._staging.drop(unit)",
        "            self._exchanged ^= {unit}",
        "",
    ),
    "padding of the next parameter is taken for a gradient": Fault(
        "zero/replica_shards.py",
        "return slice(first * shape.row_elems, (first + count) * shape.row_elems)",
        "return slice(first * shape.row_elems, (first + -(-rows // copy[1])) * shape.row_elems)",
        "",
    ),
    "the scale of a block of 8-bit moments is its neighbour's": Fault(
        "checkpoint/load_unit.py",
        "by = shift // BLOCK_ELEMS",
        "by = max(0, shift // BLOCK_ELEMS - 1)",
        "",
    ),
    "a gradient that no rank reached is updated with zeros": Fault(
        "optim/grad_decision.py",
        "is_reached = (totals.signbit() | (totals != 0)).tolist()",
        "is_reached = [True] * len(totals)",
        "",
    ),
    "a checkpoint counts before all of its parts are there": Fault(
        "checkpoint/saver.py",
        "manifest = Manifest(VERSION, step, tuple(seals), state",
        "manifest = Manifest(VERSION, step, (seals[0],) * len(seals), state",
        "",
    ),
    "every epoch has the order of the first": Fault(
        "data/order.py",
        "keys = np.random.SeedSequence(seed, spawn_key=(epoch,))",
        "keys = np.random.SeedSequence(seed, spawn_key=(0,))",
        "",
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
    find = "--find" in sys.argv
    missed = []
    with TemporaryDirectory() as folder:
        clean = Path(folder, "clean")
        shutil.copytree(ROOT, clean, ignore=LEFT_OUT)
        for name in names:
            tree, began_s = Path(folder, "tree"), time.monotonic()
            shutil.copytree(clean, tree)
            plant(FAULTS[name], tree)
            words = ["-n", "2", "--dist", "loadfile", "-x"] if find else [FAULTS[name].caught_by]
            if not find:
                code, told = run(clean, words)
                assert code == 0, f"{words} fails without a fault:\n{told[-3000:]}"
            code, told = run(tree, words)
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

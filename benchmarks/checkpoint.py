"""What does a save cost a run, how fast are saves and loads against the disk and torch's dcp, and how soon does a
resumed run make its first step?

    python benchmarks/checkpoint.py --path DIR --rounds 9
    python benchmarks/checkpoint.py --smoke

    side            what is timed, 2 ranks, llamas with bf16 parameters, fp32 masters and moments at stage 3
    train           `--every` steps of the 21 M model
    saving          the same, with a save before the first of them; `stall`: until save() returns
    save, load      of `--model`: Checkpointer.save and finish, synchronised, read back, verified; Checkpointer.resume
    save_unchecked  without reading back (checkpoint.verify=false)
    dcp_save        dcp.save of the same model and optimizer, which checks nothing; dcp_load
    raw_write       the floor: as many bytes into a file that is there already, by the disk tier's store without sums;
    raw_read        and back
    raw_new         as many bytes into a new file, synchronised: what any file that lasts costs

Goals: stall at most 5 % of a step's time times the steps between saves; save and load at least 80 % of raw; restart to
the first step, of the default model, at most 10 s. What was written is dropped from the page cache before it is read.
`save` moves every byte twice, so its floor is raw_write + raw_read.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from infinity_rounds import Found, Series, Setting, Turn, measure
from report import append_row, table, write_table
from sides import ADAM
from stats import ratio_of_medians
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from workload import Batches, Workload, loss_of

from dzero import AdamW, ZeroConfig, shard
from dzero.checkpoint.checkpointer import Checkpointer
from dzero.checkpoint.config import CheckpointConfig
from dzero.checkpoint.io_buffers import BLOCK_BYTES
from dzero.checkpoint.store import CheckpointStore
from dzero.checkpoint.writer import THREADS
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama
from dzero.offload.direct_io import Direction, make_direct, transfer, whole_pages
from dzero.offload.disk import DiskStore
from dzero.offload.memory_pool import HostMemoryPool
from dzero.zero.offload_config import DiskConfig

RANKS, STALL, OF_RAW, RESTART_S = 2, 0.05, 0.8, 10.0
ROOT = Path(__file__).parent.parent


class Run:
    """A sharded llama, its optimizer and its checkpoints, verified and not."""

    def __init__(self, setting: Setting, model: str, name: str) -> None:
        workload = Workload(model=model, samples=setting.samples, tokens=setting.tokens)
        shape = LlamaShape(vocab_size=256, hidden_size=64, layers=2, heads=2, kv_heads=2, ffn_size=128)
        torch.manual_seed(0)
        self.sharded = shard(Llama(shape) if setting.small else workload.build(), ZeroConfig(stage=3))
        self.optim = AdamW(self.sharded, **ADAM, threads=setting.threads)
        self.folder = Path(setting.path) / name
        self.saves = {
            verify: Checkpointer(
                CheckpointConfig(every=1, keep=99, folder=str(self.folder / f"ours_{verify}"), verify=verify),
                self.sharded,
                self.optim,
            )
            for verify in (True, False)
        }
        self._batches, self._steps, self._done = Batches(workload), setting.steps, 0

    def train(self, *, saving: bool) -> Found:
        """`steps` steps, and a save that goes on beside them."""
        dist.barrier()
        start = time.perf_counter()
        found: Found = {"stall_s": 0.0}
        if saving:
            self.saves[True].save(self._done, {})
            found["stall_s"] = time.perf_counter() - start
        for _ in range(self._steps):
            loss_of(self.sharded.model, self._batches.get(self._done, dist.get_rank())).backward()  # type: ignore[no-untyped-call]
            self.optim.step()
            self._done += 1
        found["seconds"] = time.perf_counter() - start
        self.saves[True].finish()
        self._remove_old(verify=True)
        return found

    def save(self, *, verify: bool) -> Found:
        """Until it is whole; what was saved before is removed off the clock."""
        dist.barrier()
        start = time.perf_counter()
        self.saves[verify].save(self._done, {})
        name = self.saves[verify].finish()
        seconds = time.perf_counter() - start
        written = self.folder / f"ours_{verify}" / str(name) / f"rank_{dist.get_rank():05d}.safetensors"
        forget(written)
        self._remove_old(verify=verify)
        return {"seconds": seconds, "bytes": written.stat().st_size}

    def _remove_old(self, *, verify: bool) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shelf = CheckpointStore(self.folder / f"ours_{verify}")
            for name in shelf.names()[:-1]:
                shelf.remove(name)
        dist.barrier()

    def load(self) -> Found:
        """From where `save` wrote."""
        dist.barrier()
        start = time.perf_counter()
        self.saves[True].resume("auto")
        return {"seconds": time.perf_counter() - start, "bytes": own_bytes(self.folder / "ours_True")}

    def dcp_save(self) -> Found:
        """As torch saves: the files are synchronised, their folder is not."""
        folder = self.folder / "dcp"
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        start = time.perf_counter()
        model, optim = get_state_dict(self.sharded.model, self.optim)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
        seconds = time.perf_counter() - start
        for path in folder.glob("*.distcp"):
            forget(path)
        dist.barrier()
        return {
            "seconds": seconds,
            "bytes": sum(p.stat().st_size for p in folder.glob(f"__{dist.get_rank()}_*.distcp")),
        }

    def dcp_load(self) -> Found:
        """The way back."""
        dist.barrier()
        start = time.perf_counter()
        model, optim = get_state_dict(self.sharded.model, self.optim)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=self.folder / "dcp")
        set_state_dict(self.sharded.model, self.optim, model_state_dict=model, optim_state_dict=optim)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "bytes": self._dcp_bytes()}

    def _dcp_bytes(self) -> int:
        files = (self.folder / "dcp").glob(f"__{dist.get_rank()}_*.distcp")
        return sum(path.stat().st_size for path in files)


class Raw:
    """As many bytes as a rank saves."""

    def __init__(self, setting: Setting, count: int) -> None:
        config = DiskConfig(paths=[setting.path], block_bytes=16 << 20, threads=4, checksum=False)
        self._folder = Path(setting.path)
        self._store = DiskStore(config, {"all": count}, rank=dist.get_rank())
        self._buffer = HostMemoryPool(count + 4096).lease(count, "all").view(torch.uint8, count)
        self._store.write("all", self._buffer).result()

    def turn(self, way: Callable[[DiskStore], Callable[..., object]]) -> Found:
        """All of it."""
        dist.barrier()
        start = time.perf_counter()
        way(self._store)("all", self._buffer).result()  # type: ignore[attr-defined]
        return {"seconds": time.perf_counter() - start, "bytes": self._buffer.numel()}

    def new(self) -> Found:
        """Into a new file, as a save must: room reserved, blocks by `THREADS` threads, synchronised."""
        path, data = self._folder / f"new_{dist.get_rank()}", self._buffer.numpy()
        path.unlink(missing_ok=True)
        dist.barrier()
        start = time.perf_counter()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.posix_fallocate(fd, 0, whole_pages(data.size))
        make_direct(fd)
        with ThreadPoolExecutor(THREADS) as pool:
            for end in [
                pool.submit(transfer, Direction.WRITE, fd, at, data[at : at + BLOCK_BYTES])
                for at in range(0, data.size, BLOCK_BYTES)
            ]:
                end.result()
        os.fsync(fd)
        seconds = time.perf_counter() - start
        os.close(fd)
        return {"seconds": seconds, "bytes": data.size}


def own_bytes(shelf: Path) -> int:
    """Of this rank's file in the only checkpoint there."""
    (path,) = shelf.glob(f"step_*/rank_{dist.get_rank():05d}.safetensors")
    return path.stat().st_size


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def training(setting: Setting) -> dict[str, Turn]:
    """With and without saves beside it."""
    run = Run(setting, "21m", "training")
    return {"train": partial(run.train, saving=False), "saving": partial(run.train, saving=True)}


def files(model: str, setting: Setting) -> dict[str, Turn]:
    """All that is written and read, of one model."""
    run = Run(setting, model, "files")
    first = run.save(verify=True)
    run.dcp_save()
    raw = Raw(setting, int(first["bytes"]))
    return {
        "save": partial(run.save, verify=True),
        "save_unchecked": partial(run.save, verify=False),
        "load": run.load,
        "dcp_save": run.dcp_save,
        "dcp_load": run.dcp_load,
        "raw_write": partial(raw.turn, lambda store: store.write),
        "raw_read": partial(raw.turn, lambda store: store.read),
        "raw_new": raw.new,
    }


def restart_s(folder: Path) -> float:
    """Seconds from the start of `python train.py resume=auto` until its first step is told."""
    line = [sys.executable, str(ROOT / "train.py"), "zero.stage=3", "checkpoint.every=4", "monitor.log_every_steps=1"]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    subprocess.run([*line, "train.steps=8"], cwd=folder, env=env, check=True, capture_output=True)
    start, seconds = time.perf_counter(), 0.0
    again = [*line, "train.steps=12", "resume=auto"]
    with subprocess.Popen(again, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for told in process.stdout:
            if not seconds and re.match(r"step=9 loss=", told):
                seconds = time.perf_counter() - start
    assert seconds, "it did not resume"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the disk")
    parser.add_argument("--model", default="118m", help="bench_*.yaml of conf/model, of what is saved and loaded")
    parser.add_argument("--every", type=int, default=20, help="steps between saves")
    parser.add_argument("--samples", type=int, default=1, help="of a rank's step")
    parser.add_argument("--tokens", type=int, default=256, help="of a sample")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="tiny; nothing is written")
    options = parser.parse_args()
    if options.smoke:
        vars(options).update({"every": 2, "tokens": 32, "rounds": 2})
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        setting = Setting(
            path=folder,
            threads=RANKS,
            block_bytes=16 << 20,
            io_threads=4,
            tokens=options.tokens,
            samples=options.samples,
            steps=options.every,
            small=options.smoke,
        )
        groups = {"training": training, "files": partial(files, options.model)}
        series, _ = measure(groups, setting, RANKS, options.rounds)
        restarts = [restart_s(Path(tempfile.mkdtemp(dir=folder))) for _ in range(1 if options.smoke else 3)]
    text = report(series, restarts, options)
    if options.smoke:
        print(text)
    else:
        write_table("checkpoint", text)


def report(series: Series, restarts: list[float], options: argparse.Namespace) -> str:
    """Row and table."""
    seconds = {side: found["seconds"] for side, found in series.items()}
    write, read = (median(seconds[side]) for side in ("raw_write", "raw_read"))
    floors = {"save": write + read, "save_unchecked": write, "raw_new": write, "load": read}
    rows = []
    for side, found in series.items():
        took_s, moved = median(found["seconds"]), found.get("bytes", [0])[0]
        moved_at = [f"{moved / 1e6:.0f}", f"{moved / took_s / 1e9:.2f}"] if moved else ["", ""]
        rows.append([side, f"{took_s * 1e3:.0f}", *moved_at, f"{floors[side] / took_s:.2f}" if side in floors else ""])
    stall = median(series["saving"]["stall_s"]) / median(seconds["train"])
    slower = ratio_of_medians(seconds["saving"], seconds["train"])
    lines = [
        f"stall / ({options.every} steps) = {stall:.3f}, goal at most {STALL}; with the save going on beside them they "
        f"take {slower} of their time.",
        f"dcp's time over dzero's: saving {ratio_of_medians(seconds['dcp_save'], seconds['save'])}, "
        f"loading {ratio_of_medians(seconds['dcp_load'], seconds['load'])}.",
        f"Restart to the first step, the default model: {median(restarts):.1f} s, goal at most {RESTART_S:.0f}.",
    ]
    if not options.smoke:
        config = {key: value for key, value in vars(options).items() if key not in ("path", "smoke")}
        row = {"config": config, "sides": series, "restart_s": restarts, "stall": stall, "slower": asdict(slower)}
        append_row("checkpoint", row)
    title = f"Training: 21 M parameters; files: {options.model}; {RANKS} ranks, stage 3, {options.rounds} rounds"
    header = ["side", "ms", "MB", "GB/s", f"floor / it (goal {OF_RAW})"]
    return "\n".join([title, "", table(header, rows), *(f"{line}\n" for line in lines)])


if __name__ == "__main__":
    main()

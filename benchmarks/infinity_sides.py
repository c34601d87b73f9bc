"""What infinity.py compares, as its child processes run it.

group       sides                                              one turn
update      disk, host; transfer, load, spill; matmul          one step of a net of equal units, batch 1
deepspeed   deepspeed                                          the same
large       whole, tiles, host; transfer                       the same, of a net whose first unit is larger
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from infinity_rounds import Found, LeftOutError, Series, Setting, Turn
from sides import ADAM
from torch import nn

from dzero import AdamW, ZeroConfig, shard
from dzero.offload.direct_io import Direction
from dzero.offload.disk import DiskStore
from dzero.offload.memory_pool import HostMemoryPool, aligned
from dzero.parallel.tiling.tile import tile

WIDTH = 2048
UNDER_WAY = 2
MATMUL_ELEMS = 1024
DEEPSPEED_AIO = {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1, "overlap_events": True}
"""Its defaults: larger blocks, deeper queues and more threads were not clearly faster."""


def net(setting: Setting) -> nn.Module:
    """Equal Linears, as wide as they are narrow by turns; the same values in every process."""
    torch.manual_seed(0)
    narrow, wide = WIDTH, setting.elems // WIDTH
    sizes = [(narrow, wide) if index % 2 == 0 else (wide, narrow) for index in range(setting.units)]
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))


class Summed(nn.Module):
    """A Linear with `times` times the outputs, which are added up in as many groups."""

    def __init__(self, times: int, elems: int) -> None:
        super().__init__()
        self.times, self.large = times, nn.Linear(WIDTH, times * elems // WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = self.large(x).unflatten(-1, (self.times, -1)).sum(-2)
        return summed


def large_net(setting: Setting, tiles: int) -> nn.Module:
    """`net` with a first unit of `setting.large` times the parameters of another, whole or in tiles."""
    first, *others = net(setting)
    del first
    large = Summed(setting.large, setting.elems)
    tile(large.large, tiles)
    return nn.Sequential(large, *others)


class Step:
    """The net with its states somewhere; update_s: from optimizer.step() until optimizer.synchronize()."""

    def __init__(
        self,
        setting: Setting,
        tier: str,
        made: Callable[[], nn.Module] | None = None,
        unit_bytes: int | None = None,
        prefetch_units: int = 2,
    ) -> None:
        zero, offload = ZeroConfig(stage=2, unit_bytes=unit_bytes), setting.offload(tier)
        offload = offload and replace(offload, prefetch_units=prefetch_units)
        self._sharded = shard(net(setting) if made is None else made(), zero, offload=offload)
        self.optim = AdamW(self._sharded, **ADAM, threads=setting.threads)
        leases = self.optim.offload.executor.leases
        self._turn_bytes = sum(lease.data.nbytes for name, lease in leases.items() if "turn" in name)

    def __call__(self) -> Found:
        dist.barrier()
        began = time.perf_counter()
        self._sharded.model(torch.ones(1, WIDTH)).float().sum().backward()
        self.optim.synchronize()  # the gradients have arrived
        self.optim.offload.take_use()
        dist.barrier()
        start = time.perf_counter()
        self.optim.step()
        self.optim.synchronize()
        end = time.perf_counter()
        found: Found = {"update_s": end - start, "step_s": end - began, "turn_bytes": self._turn_bytes}
        for lane, use in self.optim.offload.take_use().items():
            found |= {f"{lane} busy_s": use.busy_s, f"{lane} bytes": use.moved_bytes}
        return found


class Transfers:
    """The store alone: pieces of `sizes` in and others out, unit after unit, at most `UNDER_WAY` units each way."""

    def __init__(self, setting: Setting, units: list[list[int]]) -> None:
        named = {f"{way} {u} {p}": s for way in Direction for u, unit in enumerate(units) for p, s in enumerate(unit)}
        self._units, self._store = units, DiskStore(setting.disk, named, rank=dist.get_rank())
        count = sum(aligned(max(unit[p] for unit in units)) for p in range(len(units[0])))
        pool = HostMemoryPool(count * UNDER_WAY * len(Direction))
        self._buffers = {
            (way, turn, p): pool.lease(max(unit[p] for unit in units), f"{way} {turn} {p}").data
            for way in Direction
            for turn in range(UNDER_WAY)
            for p in range(len(units[0]))
        }
        pool.settle()
        for way in Direction:  # what is read must have been written
            self._lane(way, Direction.WRITE)

    @classmethod
    def like(cls, optim: AdamW, setting: Setting) -> Transfers:
        """Of the pieces of states that `optim` keeps on disk, unit by unit."""
        places = optim.offload.buffer_layout
        sizes = places.piece_bytes()
        units = [[sizes[pair.disk] for pair in places.pairs("states", unit.name)] for unit in places.units]
        return cls(setting, [unit for unit in units if unit])

    def turn(self, *ways: Direction) -> Found:
        """All units in these ways at once."""
        dist.barrier()
        start = time.perf_counter()
        with ThreadPoolExecutor(len(ways)) as pool:
            for done in [pool.submit(self._lane, way, way) for way in ways]:
                done.result()
        return {"update_s": time.perf_counter() - start, "bytes": len(ways) * sum(map(sum, self._units))}

    def _lane(self, of: Direction, way: Direction) -> None:
        move = self._store.write if way is Direction.WRITE else self._store.read
        under_way: deque[list[Future[None]]] = deque()
        for unit, sizes in enumerate(self._units):
            if len(under_way) == UNDER_WAY:
                _end(under_way.popleft())
            buffers = [self._buffers[of, unit % UNDER_WAY, p][:size] for p, size in enumerate(sizes)]
            under_way.append([move(f"{of} {unit} {p}", buffer) for p, buffer in enumerate(buffers)])
        for futures in under_way:
            _end(futures)


def _end(futures: list[Future[None]]) -> None:
    for future in futures:
        future.result()


def update_sides(setting: Setting) -> dict[str, Turn]:
    """dzero's, and what bounds it."""
    disk, host = Step(setting, "disk"), Step(setting, "host")
    alone = Transfers.like(disk.optim, setting)
    square = torch.ones(MATMUL_ELEMS, MATMUL_ELEMS, dtype=torch.bfloat16)

    def matmul() -> Found:
        start = time.perf_counter()
        square @ square
        return {"flops": 2 * MATMUL_ELEMS**3 * dist.get_world_size() / (time.perf_counter() - start)}

    return {
        "disk": disk,
        "host": host,
        "transfer": lambda: alone.turn(Direction.READ, Direction.WRITE),
        "load": lambda: alone.turn(Direction.READ),
        "spill": lambda: alone.turn(Direction.WRITE),
        "matmul": matmul,
    }


def large_sides(setting: Setting) -> dict[str, Turn]:
    """dzero's with the large unit whole and in tiles, and what bounds it."""
    whole, tiles, host = (
        Step(setting, tier, partial(large_net, setting, count))
        for tier, count in (("disk", 1), ("disk", setting.large), ("host", setting.large))
    )
    alone = Transfers.like(tiles.optim, setting)
    return {"whole": whole, "tiles": tiles, "host": host, "transfer": partial(alone.turn, *Direction)}


def deepspeed_sides(setting: Setting) -> dict[str, Turn]:
    """ZeRO-3 with its optimizer states on NVMe, read and written ahead, one sub-group per unit."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed  # type: ignore[import-untyped]
        from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-untyped]

        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise LeftOutError("its AsyncIO extension needs libaio and its headers (apt-get install libaio-dev)")
        AsyncIOBuilder().load(verbose=False)
    except (ImportError, OSError, RuntimeError) as error:
        raise LeftOutError(f"{type(error).__name__}: {error}") from error
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    nvme = {"device": "nvme", "nvme_path": setting.path, "pin_memory": True, "buffer_count": 16}
    nvme |= {"pipeline_read": True, "pipeline_write": True, "fast_init": False}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": nvme, "sub_group_size": setting.elems},
        "aio": DEEPSPEED_AIO,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "steps_per_print": 1 << 40,
    }
    model = net(setting)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def turn() -> Found:
        began = time.perf_counter()
        engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().sum())
        start = time.perf_counter()
        engine.step()
        end = time.perf_counter()
        return {"update_s": end - start, "step_s": end - began}

    return {"deepspeed": turn}


def bandwidth(series: Series) -> float:
    """Bytes per second of the store alone, both ways together."""
    return float(series["transfer"]["bytes"][0] / median(series["transfer"]["update_s"]))

"""The parts of a start, one after the other in one process of one rank: prints wall and processor seconds as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

laps: dict[str, dict[str, float]] = {}
clock_s = time.perf_counter(), time.process_time()


def lap(name: str) -> None:
    """Note what passed since the last one."""
    global clock_s
    now = time.perf_counter(), time.process_time()
    laps[name] = {"wall_s": now[0] - clock_s[0], "cpu_s": now[1] - clock_s[1]}
    clock_s = now


def main() -> None:
    from dzero import config, overrides

    lap("launcher: import Hydra and the settings' types")
    config.register()
    run = overrides.composed([*sys.argv[1:], "launch.workers=1"], config.CONF)
    lap("launcher: compose and check the settings")
    import torch  # noqa: F401

    lap("warm process: import torch")
    from dzero.plan.preflight import prepare_run
    from dzero.trainer.trainer import Trainer

    lap("warm process: import the trainer")
    run, _ = prepare_run(run, sys.argv[1:])
    lap("check: does it fit this machine")
    ours = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(ours, MASTER_PORT="29517", GLOO_SOCKET_IFNAME="lo")
    from dzero.launch.worker import group
    from dzero.monitor.sinks import Monitor

    with tempfile.TemporaryDirectory() as folder, group(run.launch) as device:
        lap("worker: join the group")
        trainer = Trainer(run, Path(folder), device)
        lap("worker: read the data, build and shard the model")
        trainer.recorder.memory.reset()
        monitor = Monitor(run.monitor, Path(folder), rank=1, total_steps=20)
        trainer.step(1, monitor)
        lap("worker: the first step")
    print(json.dumps(laps))


if __name__ == "__main__":
    main()

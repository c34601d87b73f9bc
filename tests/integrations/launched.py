"""Scripts that users start in one process, by torchrun or by accelerate; on the way back, what they found.

found = launched("trl_runs.py", folder, "sft", by=torchrun(2))     in a test
as_script(main)                                                    in the script, whose `main(FOLDER, words)` finds it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
HANGS_S = 900.0


def torchrun(ranks: int) -> list[str]:
    """Without its own `python -u`, so that the ranks start warm."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python", sys.executable]


def accelerate(precision: str) -> list[str]:
    """Two ranks; `--cpu` would start one process."""
    ranks = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--main_process_port=0"]
    return ["-m", "accelerate.commands.launch", *ranks, f"--mixed_precision={precision}", "--dynamo_backend=no"]


def launched(script: str, folder: Path, *words: str, by: Sequence[str] = ()) -> Any:
    """What the script's first rank found."""
    from typed_commands import OTHERS  # where tests run, but not where scripts do

    folder.mkdir(exist_ok=True)
    line = [sys.executable, *by, str(HERE / script), str(folder), *words]
    kept = {key: value for key, value in os.environ.items() if key not in OTHERS}
    env = {**kept, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, (done.stdout[-300:], done.stderr[-4000:])
    return json.loads((folder / "results.json").read_text())


def as_script(main: Callable[[Path, list[str]], Any]) -> None:
    """Run a script's `main` on this rank, in a group of gloo where a launcher started several."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    found = main(folder, words)
    if is_first():
        (folder / "results.json").write_text(json.dumps(found))
    wait_for_all()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def whole(tensor: Any) -> Any:
    """All of a DTensor; any other tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

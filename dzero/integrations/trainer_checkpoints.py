"""Which checkpoint a run of Trainer goes on from, so that it saves over none.

Trainer writes `trainer_state.json` last, so a checkpoint without one was left by a process that died while it saved.
Trainer would load it, or save over it, as it does over checkpoints of another run.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import torch.distributed as dist

logger = logging.getLogger(__name__)
LAST_FILE = "trainer_state.json"


def checkpoint_to_resume(output: Path, resume: str | bool | None, *, saves: bool) -> str | None:
    """Return the checkpoint to go on from. All ranks call this.

    Args:
        output: Folder of the checkpoints.
        resume: A checkpoint, True for the last whole one in `output`, or None to begin anew.
        saves: Whether the run will save. What is left of interrupted saves then gets another name.

    Raises:
        ValueError: The checkpoint to go on from is not whole, or the run would save over later ones.
    """
    told: list[str | None] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            told[0] = _to_resume(output, resume, saves=saves)
        except (ValueError, OSError) as error:
            told[1] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise ValueError(told[1])
    return told[0]


def _to_resume(output: Path, resume: str | bool | None, *, saves: bool) -> str | None:
    every = {int(each.name.split("-")[1]): each for each in output.glob("checkpoint-*") if _is_checkpoint(each)}
    whole = {step: each for step, each in every.items() if (each / LAST_FILE).is_file()}
    if resume is True:
        if not whole:
            raise ValueError(f"resume_from_checkpoint=True: {output} has no whole checkpoint; begin without it")
        resume = str(whole[max(whole)])
    if resume and not (Path(resume) / LAST_FILE).is_file():
        told = "was not saved to its end" if Path(resume).is_dir() else "is not there"
        raise ValueError(
            f"resume_from_checkpoint={resume}: it {told}; whole checkpoints: {[*map(str, whole.values())]}"
        )
    begin = int(found[1]) if resume and (found := re.search(r"checkpoint-(\d+)/?$", str(resume))) else 0
    if not saves:
        return str(resume) if resume else None
    later = sorted(step for step in (whole if resume else every) if step > begin)
    if later:
        raise ValueError(
            f"{every[later[0]]} is there already, and the run would save over it: go on from it by "
            "resume_from_checkpoint, move it away, or choose another output_dir"
        )
    for step in every.keys() - whole.keys():
        aside = next(path for path in _names(output / f"interrupted-save-{step}") if not path.exists())
        os.replace(every[step], aside)
        logger.warning("%s was not saved to its end; it is now %s", every[step], aside)
    return str(resume) if resume else None


def _is_checkpoint(folder: Path) -> bool:
    return folder.is_dir() and re.fullmatch(r"checkpoint-\d+", folder.name) is not None


def _names(path: Path) -> list[Path]:
    return [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, 1000))]

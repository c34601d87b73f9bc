"""When a run saves, where, and what it starts from."""

from __future__ import annotations

from dataclasses import dataclass

from dzero.utils.ranges import MOST_BYTES, SECONDS, check, whole


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run saves, where, and what becomes of older checkpoints."""

    every: int | None = None
    """Steps between saves. null: no checkpoints."""
    keep: int = 2
    """Checkpoints that stay, of this run and of what it resumed from; older ones are removed, those of others never."""
    folder: str = "checkpoints"
    """Folder of the checkpoints, shared by all nodes; with --multirun inside each run's own output folder."""
    last: bool = True
    """Save after the last step too, where anything is saved."""
    staging_bytes: int = 1 << 30
    """Host memory per rank through which states go to the disk; a save holds the run up until they are in it."""
    verify: bool = True
    """Read a checkpoint back before it counts."""
    on_error: str = "stop"
    """A checkpoint cannot be written: `stop`, or `warn` and train on."""
    deadline_s: float = 60.0
    """Seconds from SIGTERM or SIGINT to the end of the save they ask for; later the run ends without it."""

    def __post_init__(self) -> None:
        staging = whole(1 << 20, MOST_BYTES)
        check("checkpoint", self, every=whole(), keep=whole(), staging_bytes=staging, deadline_s=SECONDS)
        if self.on_error not in ("stop", "warn"):
            raise ValueError(f"checkpoint.on_error={self.on_error!r}: choose stop or warn")
        if not self.folder:
            raise ValueError("checkpoint.folder is empty: name a folder")


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """The checkpoint that a run starts from. `resume=WORD` on the command line is short for `resume.source=WORD`."""

    source: str | None = None
    """A checkpoint's folder; `auto` for the latest in checkpoint.folder; null to start afresh."""
    strict: bool = False
    """Stop where the latest checkpoint is damaged or gone, instead of going on from the newest that is whole."""

    def __post_init__(self) -> None:
        if self.strict and self.source is None:
            raise ValueError("resume.strict=true has no effect without resume=auto or a checkpoint's folder; remove it")

"""When a run saves, where, and what it starts from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """`every`: steps between saves, None for none but at the end of a run that is stopped. `keep`: checkpoints, the
    newest. `folder`: of all of them, shared by all nodes.

    `last`: save after the last step too, where anything is saved. `staging_bytes`: host memory per rank through which
    states go to the disk; a save holds the run up until they are in it. `verify`: read a checkpoint back before it
    counts. `on_error`: stop, or warn and train on, when one cannot be written. `deadline_s`: from SIGTERM or SIGINT to
    the end of the save they ask for; later the run ends without it.
    """

    every: int | None = None
    keep: int = 2
    folder: str = "checkpoints"
    last: bool = True
    staging_bytes: int = 1 << 30
    verify: bool = True
    on_error: str = "stop"
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        for key in ("every", "keep"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"checkpoint.{key}={value}: must be a whole number ≥ 1")
        if self.staging_bytes < 1 << 20:
            raise ValueError(f"checkpoint.staging_bytes={self.staging_bytes}: must be ≥ 1048576, a MiB")
        if self.on_error not in ("stop", "warn"):
            raise ValueError(f"checkpoint.on_error={self.on_error!r}: choose stop or warn")
        if self.deadline_s <= 0:
            raise ValueError(f"checkpoint.deadline_s={self.deadline_s}: must be > 0 seconds")
        if not self.folder:
            raise ValueError("checkpoint.folder is empty: name a folder")

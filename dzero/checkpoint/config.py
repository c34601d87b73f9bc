"""Settings of checkpoints, and of the checkpoint that a run resumes from."""

from __future__ import annotations

from dataclasses import dataclass, field

from dzero.compatibility import check_compatible
from dzero.utils.ranges import MOST_BYTES, SECONDS, check, whole
from dzero.utils.rules import Settings

GROUP_SETTINGS: dict[str, str | None] = {
    **{f"optim.{key}": key for key in ("lr", "weight_decay", "betas", "eps")},
    **{f"optim.muon.{key}": key for key in ("lr", "momentum", "nesterov", "iterations", "scale")},
    "optim.options": None,
}
"""Settings of the update rule that a checkpoint holds, with their names in parameter groups; of options, all."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Settings of when and where a run saves checkpoints, and how many it keeps."""

    every: int | None = None
    """Steps between saves. null: no checkpoints."""
    keep: int = 2
    """Checkpoints to keep, of this run and those it resumed from. Older ones are removed, those of other runs never."""
    keep_best: bool = False
    """Keep the checkpoint of the lowest held-out loss besides. Each evaluation with a lower loss is followed by a
    save."""
    folder: str = "checkpoints"
    """Folder of the checkpoints, shared by all nodes. With --multirun it is inside each run's own output folder."""
    last: bool = True
    """Save after the last step too, if checkpoint.every is set."""
    staging_bytes: int = 1 << 30
    """Host memory per rank that buffers states on their way to disk. Training waits until all states are copied to
    it."""
    verify: bool = True
    """Read each checkpoint back before it counts as complete."""
    on_error: str = "stop"
    """Reaction to a checkpoint that cannot be written: `stop`, or `warn` and continue training."""
    deadline_s: float = 60.0
    """Seconds from SIGTERM or SIGINT within which the resulting save must end. After that the run ends without it."""

    def __post_init__(self) -> None:
        staging = whole(1 << 20, MOST_BYTES)
        check("checkpoint", self, every=whole(), keep=whole(), staging_bytes=staging, deadline_s=SECONDS)
        if self.on_error not in ("stop", "warn"):
            raise ValueError(f"checkpoint.on_error={self.on_error!r}: choose stop or warn")
        if not self.folder:
            raise ValueError("checkpoint.folder is empty: name a folder")


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """Checkpoint that a run starts from. `resume=WORD` on the command line is short for `resume.source=WORD`."""

    source: str | None = None
    """Folder of a checkpoint, `auto` for the latest in checkpoint.folder, or null to start from scratch."""
    strict: bool = False
    """Stop if the latest checkpoint is damaged or missing, instead of resuming from the newest intact one."""
    override: list[str] = field(default_factory=list)
    """Settings of the update rule that this run changes, such as [optim.lr]. Others must be those of the saved run."""

    def __post_init__(self) -> None:
        if unknown := [key for key in self.override if key not in GROUP_SETTINGS]:
            meant = [key for key in GROUP_SETTINGS if key.endswith(f".{unknown[0]}")]
            suggestion = f"; did you mean {' or '.join(meant)}?" if meant else ""
            raise ValueError(f"resume.override={unknown}: choose of {list(GROUP_SETTINGS)}{suggestion}")
        check_compatible(Settings.of(resume=self))


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Export of the trained model as a folder that transformers loads, with its tokenizer."""

    at_end: bool = False
    """Export after the last step."""
    which: str = "last"
    """Model to export: that of the last step, or with checkpoint.keep_best=true `best`, the checkpoint of the lowest
    held-out loss."""
    folder: str = "model"
    """Folder to create, inside the run's output folder unless it is absolute."""
    merge: bool = False
    """Write the whole model with the adapters merged into its weights. false: a folder of the adapters alone."""

    def __post_init__(self) -> None:
        if not self.folder:
            raise ValueError("export.folder is empty: name a folder")
        if self.which not in ("last", "best"):
            raise ValueError(f"export.which={self.which!r}: choose last or best")
        check_compatible(Settings.of(export=self))

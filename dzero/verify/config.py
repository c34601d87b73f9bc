"""What a verification is told: a run's settings, how many of its steps, and how its runs share their data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from dzero.config import RunConfig
from dzero.mesh_config import MeshConfig
from dzero.utils.ranges import check, whole


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """`steps`: how many are compared; of the run's own schedule, whose length stays train.steps."""

    steps: int = 5

    def __post_init__(self) -> None:
        check("verify", self, steps=whole())


@dataclass(frozen=True, kw_only=True)
class VerifyRun(RunConfig):
    """A run's configuration, and how it is verified."""

    verify: VerifyConfig = field(default_factory=VerifyConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify.steps > self.train.steps:
            raise ValueError(
                f"verify.steps={self.verify.steps} exceeds train.steps={self.train.steps}; lower it, or raise that"
            )


@dataclass(frozen=True, kw_only=True)
class AlikeMesh(MeshConfig):
    """Degrees of a run in which `alike` neighbours do the same: each reads, whole, what ranks of other axes share."""

    alike: int = 1

    @property
    def to_a_sequence(self) -> int:
        """As many more."""
        return super().to_a_sequence * self.alike


GROUPS = {
    "cut sequences": ("cp", "cp_attention"),
    "cut matrices": ("tp", "ep"),
    "a pipeline": ("pp", "pp_schedule", "pp_parts"),
}
"""Settings of a mesh by what they make of the model, in the order in which they are taken."""
WHY = {
    "cut sequences": "attention over parts of a sequence adds partial sums, and gradients are means over other tokens "
    "first",
    "cut matrices": "ranks that share matrices or experts add partial sums",
    "a pipeline": "ranks that read the same add their gradients otherwise",
}


def meshes_to(mesh: MeshConfig) -> list[tuple[str, MeshConfig]]:
    """Those between one whose ranks all have whole models and sequences and `mesh`, without copies of shards: what each
    has more than the one before, which is nothing of the first. All have as many ranks and sequences in a step."""
    default = MeshConfig()
    groups: dict[str, dict[str, Any]] = {"": {}}
    for name, keys in GROUPS.items():
        if more := {key: value for key in keys if (value := getattr(mesh, key)) != getattr(default, key)}:
            groups[name] = more
    found: list[tuple[str, MeshConfig]] = []
    taken: dict[str, Any] = {}
    for name, more in groups.items():
        taken |= more
        is_all = len(found) + 1 == len(groups)
        alike = mesh.inner // MeshConfig(**taken).inner
        found.append((name, replace(mesh, replicate=1) if is_all else AlikeMesh(**taken, alike=alike)))
    return found

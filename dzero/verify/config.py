"""Settings of a verification, and the meshes of its runs, which read the same data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from dzero.config import RunConfig
from dzero.mesh_config import MeshConfig
from dzero.utils.ranges import check, whole


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Settings of a verification.

    Attributes:
        steps: Number of steps to compare, at the start of the run's schedule, whose length stays train.steps.
    """

    steps: int = 5

    def __post_init__(self) -> None:
        check("verify", self, steps=whole())


@dataclass(frozen=True, kw_only=True)
class VerifyRun(RunConfig):
    """Configuration of a run, and settings of its verification."""

    verify: VerifyConfig = field(default_factory=VerifyConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify.steps > self.train.steps:
            raise ValueError(
                f"verify.steps={self.verify.steps} exceeds train.steps={self.train.steps}; lower it, or raise that"
            )


@dataclass(frozen=True, kw_only=True)
class AlikeMesh(MeshConfig):
    """Mesh in which `alike` neighboring data-parallel ranks do the same work.

    They stand in for ranks that share a sequence or the model in another mesh, so each of them reads the whole
    sequences that those ranks share.
    """

    alike: int = 1

    @property
    def to_a_sequence(self) -> int:
        """Number of neighboring data-parallel ranks that read the same sequences."""
        return super().to_a_sequence * self.alike


SEQUENCES_WHY = "attention over parts of a sequence adds partial sums, and gradients are means over other tokens first"
GROUPS = {
    "cut sequences": (("cp", "cp_attention"), SEQUENCES_WHY),
    "cut matrices": (("tp", "ep"), "ranks that share matrices or experts add partial sums"),
    "a pipeline": (
        ("pp", "pp_schedule", "pp_stages_per_rank"),
        "ranks that read the same add their gradients otherwise",
    ),
}
"""Settings of a mesh by their effect on the model, in the order in which the ladder adds them, and why bits differ."""


def meshes_to(mesh: MeshConfig) -> list[tuple[str, MeshConfig]]:
    """Return the meshes of the ladder up to `mesh`, without replicas, each with the key of GROUPS that it adds.

    In the first mesh, which adds none, every rank has the whole model and whole sequences. All meshes have equally many
    ranks and sequences per step.
    """
    default = MeshConfig()
    groups: dict[str, dict[str, Any]] = {"": {}}
    for name, (keys, _) in GROUPS.items():
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

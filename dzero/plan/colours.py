"""Colors of the kinds of state, the same in memory bars and in transfers.

blue      parameters: shards, unsharded parameters, new working copies; gathers and fetches
orange    gradients; reductions and evictions
green     masters; updates
violet    moments; loads and spills of states
grey      activations; compute
rose      collectives within a model that is cut over ranks
"""

from __future__ import annotations

from collections.abc import Mapping

INK, RED = "#22303c", "#c22f2f"
STATES: Mapping[str, str] = {
    "param": "#5f97d3",
    "frozen": "#7296b8",
    "unsharded": "#9cc3ea",
    "work": "#6fa8dc",
    "buffers": "#cfe2f3",
    "grad": "#f0a04b",
    "landing": "#f6c48f",
    "passing": "#f6c48f",
    "residual": "#f9e0c7",
    "master": "#6ab187",
    "moments": "#a68fce",
    "stage": "#c5b6e0",
    "undo": "#d8cfe8",
    "activations": "#b9c0c7",
    "fragmentation": "#e6e8ea",
}
WORK: Mapping[str, str] = {
    "forward": "#b9c0c7",
    "backward": "#7d8892",
    "exchange": "#cf8f9b",
    "all_gather": "#9cc3ea",
    "reduce_scatter": "#f0a04b",
    "all_reduce": "#d9822b",
    "evict": "#f6c48f",
    "fetch": "#5f97d3",
    "update": "#6ab187",
    "encode": "#b5d99c",
    "decide": "#56616b",
    "load": "#a68fce",
    "spill": "#c5b6e0",
}
OTHER = "#d9c9a3"
HOST = " (host)"


def colour_of(kind: str) -> str:
    """Return the color of a kind of memory of a tier."""
    return STATES.get(kind.removesuffix(HOST), OTHER)


def hatch_of(kind: str) -> str | None:
    """Return a hatch for a CPU's host tier, which is in the same memory as its device tier."""
    return "//" if kind.endswith(HOST) else None

"""One colour for each kind of state, wherever it lies or moves.

blue      param: shards, unsharded copies, new working copies; what gathers and fetches them
orange    grad: and what reduces and evicts them
green     master: and its update
violet    moments: and what loads and spills states
grey      activations: and the compute that makes them
rose      what the ranks of a model that is cut exchange within it
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
    "decide": "#56616b",
    "load": "#a68fce",
    "spill": "#c5b6e0",
}
OTHER = "#d9c9a3"
HOST = " (host)"


def colour_of(kind: str) -> str:
    """Of a kind of state, as a tier tells it."""
    return STATES.get(kind.removesuffix(HOST), OTHER)


def hatch_of(kind: str) -> str | None:
    """What a CPU's device has of the host tier, in the same memory, is hatched."""
    return "//" if kind.endswith(HOST) else None

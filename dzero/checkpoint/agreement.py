"""Ranks agree on short texts, over a gloo group of their own: it never waits for training, nor training for it."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from dzero.checkpoint.errors import CheckpointError

SAY_BYTES, WHY_BYTES = 64, 1024
TIMEOUT = timedelta(hours=2)
"""As long as the slowest rank may take to write what the fastest has written."""


class Agreement:
    """Every rank makes one, in the same order as other groups. `what`: for errors."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def reach(self, why: str, say: str = "") -> list[str]:
        """What every rank says, of which `SAY_BYTES` count. Raises CheckpointError for all where one has a reason `why`
        not to go on, and where one is gone."""
        mine = torch.zeros(SAY_BYTES + WHY_BYTES, dtype=torch.uint8)
        for start, size, text in ((0, SAY_BYTES, say), (SAY_BYTES, WHY_BYTES, why)):
            encoded = text.encode()[:size]
            mine[start : start + len(encoded)] = torch.tensor([*encoded], dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        try:
            dist.all_gather(every, mine, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(self._what, f"a rank is gone: {error}") from error
        for each in every:
            if reason := _text(each[SAY_BYTES:]):
                raise CheckpointError("", reason)
        return [_text(each[:SAY_BYTES]) for each in every]

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)


def _text(data: torch.Tensor) -> str:
    return bytes(data.tolist()).rstrip(b"\0").decode(errors="replace")

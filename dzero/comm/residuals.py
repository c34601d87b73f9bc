"""What rounding to blocks left of a unit's last payloads, which is added to the next ones: error feedback.

    payload = codes(part + residual)        residual = part + residual - values(payload)

So the payloads of many steps add up to the gradients of these steps but for one rounding (Seide et al., 1-Bit SGD,
2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019). A block that is not finite leaves nothing, so that an
overflow ends with its step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dzero.comm.hops import Hops
from dzero.comm.wire import Blocks, Plain
from dzero.utils.numba_views import has_memory


@dataclass(frozen=True)
class Residuals:
    """Residuals of one buffer.

    Attributes:
        first: Of this rank's parts, fp32 [ranks, n].
        second: Of the sums of this rank's group in the second of two hops, fp32 [groups, n]; without one, [0, n].
    """

    first: torch.Tensor
    second: torch.Tensor

    @classmethod
    def zeros(cls, hops: Hops, elems: int, device: torch.device) -> Residuals:
        """Return residuals of zero for parts of `elems` elements."""
        rows = (hops.inner * hops.outer, hops.outer if hops.outer > 1 else 0)
        return cls(*(torch.zeros(each, elems, device=device) for each in rows))


def residual_bytes(hops: Hops, elems: int) -> int:
    """Return the bytes of `Residuals` for parts of `elems` elements."""
    return 4 * elems * (hops.inner * hops.outer + (hops.outer if hops.outer > 1 else 0))


def encode(form: Blocks | Plain, source: torch.Tensor, row: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Write the payload of `source` [elems] and of its `residual`, fp32 [elems], to `row`; update the residual."""
    if residual is None or not has_memory(source):
        form.encode(source, row)
        return
    wanted = residual.add_(source)
    form.encode(wanted, row)
    values = torch.empty_like(wanted)
    form.decode(row, values)
    residual.sub_(values).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

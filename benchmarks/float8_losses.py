"""What do products in 8 bits cost in loss? The default run in bf16, and with torchao's two recipes.

    python benchmarks/float8_losses.py

    side            precision.compute
    bf16            param
    fp8_tensorwise  fp8_tensorwise
    fp8_rowwise     fp8_rowwise

The run is that of `default_runs.py`. On a CPU products are emulated: the rounding is real, the speed is not.
"""

from __future__ import annotations

from default_runs import compare

SIDES = {
    "bf16": [],
    "fp8_tensorwise": ["precision.compute=fp8_tensorwise"],
    "fp8_rowwise": ["precision.compute=fp8_rowwise"],
}

if __name__ == "__main__":
    compare("float8_losses", __doc__, SIDES)

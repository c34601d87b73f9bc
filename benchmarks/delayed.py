"""What does the one-step delay of offload.overlap=delayed cost in loss? The default run, exact and delayed.

    python benchmarks/delayed.py

    side              offload.overlap   offload.delay_warmup_steps
    exact             forward           -
    delayed after 40  delayed           40, the default
    delayed at once   delayed           0

The run is that of `default_runs.py`. The curves part where the delay begins.
"""

from __future__ import annotations

from default_runs import compare

SIDES = {
    "exact": ["offload=host"],
    "delayed after 40": ["offload=host", "offload.overlap=delayed"],
    "delayed at once": ["offload=host", "offload.overlap=delayed", "offload.delay_warmup_steps=0"],
}

if __name__ == "__main__":
    compare("delayed", __doc__, SIDES)

"""TRL's trainers with `DzeroMixin` before them: the losses of TRL alone, which on two ranks is DDP."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")
import published
from launched import launched, torchrun
from trl_runs import CASES, STEPS


@pytest.mark.full("tests/integrations/test_hf_trainer.py::test_a_script_of_trainer_gives_the_same_numbers")
def test_every_trainer_on_two_ranks_has_the_losses_of_trl_with_ddp(tmp_path: Path) -> None:
    """To 1e-6 of them; those of GRPO are small differences of sums, so to 1e-6 of their size."""
    found = launched("trl_runs.py", tmp_path, str(published.make(tmp_path)), by=torchrun(2))
    assert found.pop("told").startswith("DzeroTrainer with sync_ref_model of TRL")
    assert found.keys() == CASES.keys()
    for case, losses in found.items():
        assert len({*losses["alone"]}) == STEPS, f"{case}: each step changes the model"
        close = {"abs": 1e-6} if case == "grpo" else {"rel": 1e-6}
        assert losses["dzero"] == pytest.approx(losses["alone"], **close), case

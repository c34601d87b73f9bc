"""What the trainer's tests train: a tiny published model with its conversations, and a text."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import write_text


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small llama, beside which lie its conversations."""
    pytest.importorskip("transformers")
    import published

    return published.make(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "words.txt")

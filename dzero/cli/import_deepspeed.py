"""Command `dzero import-deepspeed`: write a checkpoint with the states in a folder of DeepSpeed."""

from __future__ import annotations

import argparse
import os

from dzero.checkpoint.errors import CheckpointError
from dzero.hardware import format_bytes
from dzero.integrations.deepspeed.importer import planned_import
from dzero.models.hf import build_hf
from dzero.utils.terminal import bar


def import_deepspeed(options: argparse.Namespace) -> None:
    """Check the folder, write the checkpoint to `options.target`, and print what it holds."""
    if os.path.lexists(options.target):
        raise CheckpointError(str(options.target), "it is there already: remove it, or choose another folder")
    model = None if options.model is None else build_hf(options.model)
    with planned_import(options.folder, model, step=options.step) as found:
        with bar(f"importing {options.folder}", found.tensor_bytes) as progress:
            path = found.write(options.target, progress)
        count, size = len(found.states.masters), format_bytes(found.tensor_bytes)
        print(f"{path}: {count} trained parameters, {size}, after step {found.step}")
        if found.states.moments:
            rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(found.lrs))
            print(f"moments after {found.states.updates} updates; the learning rate of the next step was {rates}")
        else:
            print("weights alone: moments are zeros, and bias correction starts anew")

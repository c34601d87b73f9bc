"""Command `dzero from-deepspeed`: what becomes of each key of a DeepSpeed configuration, and three ways to go on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from dzero.integrations.deepspeed.advice import Advice, advise
from dzero.integrations.deepspeed.config_keys import NEEDLESS, REFUSED, TAKEN
from dzero.integrations.deepspeed.reading import read
from dzero.integrations.deepspeed.translation import Translation, translate
from dzero.integrations.deepspeed.verdicts import shown, shown_key
from dzero.integrations.deepspeed.words import as_code

STAGE = "zero_optimization.stage"
REFUSES = 3
"""Exit status if a key is refused."""
HEADS = {
    TAKEN: "Taken: dzero does it",
    NEEDLESS: "Needless: nothing is lost without it",
    REFUSED: "Refused: do this in its place",
}


def from_deepspeed(options: argparse.Namespace) -> None:
    """Print the translation; exit with 0 if every key is taken or needless, with 3 if one is refused."""
    translation = translate(read(options.config), options.ranks)
    advice = advise(translation, options.ranks)
    if options.json:
        print(json.dumps(as_json(translation, advice), indent=2))
    else:
        print("\n".join(lines(options.config, translation, advice)), flush=True)
    sys.exit(REFUSES if translation.refused else 0)


def as_json(translation: Translation, advice: Advice) -> dict[str, Any]:
    """Return verdicts and advice as plain values."""
    return {
        "keys": [
            {"key": each.key, "value": each.value, "verdict": each.kind, "text": each.text}
            for each in translation.verdicts
        ],
        "dzero": {key: as_code(value) for key, value in translation.shard.items()},
        "training_arguments": advice.arguments,
        "loop": [*advice.loop],
        "train": [*advice.settings],
        "open": advice.yours,
        "notes": [*advice.notes],
    }


def lines(path: object, translation: Translation, advice: Advice) -> Iterator[str]:
    """Yield the report, line by line."""
    for kind, head in HEADS.items():
        if here := [each for each in translation.verdicts if each.kind == kind]:
            yield f"{head}\n"
            yield from (f"  {shown_key(each.key)} = {shown(each.value)}: {each.text}" for each in here)
            yield ""
    if any(each.key == STAGE for each in translation.refused):
        yield "Nothing follows without a stage. Change it, and call this again."
        return
    if translation.refused:
        yield "What follows leaves the refused keys out; DzeroTrainer takes the file once they are changed.\n"
    arguments = ", ".join(f"{key}={value!r}" for key, value in advice.arguments.items())
    settings = ", ".join(f"{key!r}: {as_code(value)}" for key, value in translation.shard.items())
    yield "1. With transformers (from dzero.integrations.transformers import DzeroTrainer)\n"
    yield f"  args = TrainingArguments({arguments})  # what you write here must agree with the file"
    yield f"  trainer = DzeroTrainer(model=model, args=args, train_dataset=data, deepspeed={str(path)!r})"
    yield f"\n  or without the file, by Trainer's own optimizer and schedule: dzero={{{settings}}}\n"
    yield "2. In a loop of your own (names in capitals are yours to choose)\n"
    if translation.schedule is not None:
        yield "  from dzero.integrations.deepspeed.schedules import Schedule"
    yield from (f"  {line}" for line in advice.loop)
    yield "\n3. With dzero train (--config-name finetune for a published model)\n"
    yield f"  {advice.command}" if advice.settings else "  not possible: it has no such schedule"
    for key, why in advice.yours.items():
        yield f"  {key} is yours to choose: {why}"
    if advice.notes:
        yield "\nWhat differs\n"
        yield from (f"  {note}" for note in advice.notes)

"""Page of DeepSpeed's configuration keys, from the table in dzero/integrations/deepspeed/config_keys.py."""

from __future__ import annotations

from collections.abc import Iterator

from dzero.integrations.deepspeed.config_keys import OPTIMIZERS, REFUSED, REFUSED_OPTIMIZERS, TABLE, Key

TOP = "without a section"


def _row(key: str, row: Key) -> str:
    text = row.text.replace("|", "\\|")
    if row.verdict == REFUSED:
        text = f"{text} (a value that asks for nothing is needless)"
    filled = f'; "auto" is `{row.auto}` of TrainingArguments' if row.auto else ""
    return f"| `{key}` | {row.verdict} | {row.form.name.replace('|', chr(92) + '|')} | {text}{filled} |"


def keys() -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# DeepSpeed's keys\n"
    yield "`dzero from-deepspeed ds_config.json` says what becomes of each key of a DeepSpeed configuration, and prints"
    yield "the arguments of `DzeroTrainer`, the calls of a loop and the words of `dzero train` that do the same."
    yield '`DzeroTrainer(deepspeed="ds_config.json")` follows the file itself. Both read this table.\n'
    yield "**taken**: dzero does it. **needless**: nothing is lost without it. **refused**: do the other thing.\n"
    yield "The file is JSON, or Hjson with comments (`pip install 'dzero[deepspeed]'`); base64 is not read."
    yield "Exit code 0: every key is taken or needless; 3: one is refused; 1: the file cannot be read. `--ranks N`"
    yield "checks batch sizes, and `--json` prints the same for programs.\n"
    sections: dict[str, list[str]] = {TOP: []}
    for key, row in TABLE.items():
        sections.setdefault(key.rpartition(".")[0] or TOP, []).append(_row(key, row))
    for section, rows in sections.items():
        yield f"## {section}\n"
        yield "| key | verdict | values | how |\n| --- | --- | --- | --- |"
        yield from rows
        yield ""
    yield "## Optimizers\n"
    yield "| optimizer.type | verdict | how |\n| --- | --- | --- |"
    for name, rule in OPTIMIZERS.items():
        how = "dzero.AdamW" if rule == "AdamW" else f"torch.optim.{rule} in dzero.TorchOptimizer"
        yield f"| `{name}` | taken | {how} |"
    for name, text in REFUSED_OPTIMIZERS.items():
        yield f"| `{name}` | refused | {text} |"

"""Settings of the corpus: which of five sources is read, and how (`data/corpus.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from dzero.compatibility import check_compatible, idle
from dzero.utils.ranges import BELOW_1, check, number, whole
from dzero.utils.rules import IncompatibleError, Settings, shown

TEXT = frozenset({"tokenizer", "separator"})
SETTINGS = {
    "python": TEXT,
    "files": TEXT | {"path", "field", "token_dtype", "vocab_size"},
    ".txt": TEXT | {"path"},
    ".jsonl": TEXT | {"path", "field"},
    ".json": TEXT | {"path", "field"},
    ".parquet": TEXT | {"path", "field"},
    ".npy": frozenset({"path", "vocab_size"}),
    ".bin": frozenset({"path", "vocab_size", "token_dtype"}),
    "dataset": TEXT | {"name", "config", "split", "field"},
    "chat": frozenset({"path", "tokenizer", "loss_on", "pack", "on_bad_row", "chat_template", "cache"}),
}
KINDS = ("text", "chat")
CHOICES = {"loss_on": ("assistant", "completion", "all"), "on_bad_row": ("stop", "skip")}
MOST_IDS = 2**31
WEIGHT = number(1e9)
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Source of the tokens: `path`, `paths` or `name`; with none of them, the text of Python's standard library."""

    kind: str = "text"
    """Kind of the data: text, or chat (conversations and instructions in .jsonl, .json and .parquet files)."""
    path: str | None = None
    """File, folder or quoted glob of .txt, .jsonl, .parquet, .bin or .npy files; .json files by name or glob."""
    paths: list[str] | None = None
    """Mixture in place of path: several sources, each a file, folder or quoted glob."""
    weights: list[float] | None = None
    """Weights of the sources in paths, in which proportion every step takes their sequences. null: their sizes."""
    name: str | None = None
    """Hugging Face dataset, by name or folder."""
    config: str | None = None
    """Configuration of the dataset. null: its only one."""
    split: str | None = None
    """Split of the dataset. null: train."""
    field: str | None = None
    """Key or column that holds the text. null: text."""
    tokenizer: str | None = None
    """Tokenizer file (JSON) of the tokenizers library. null: bytes, 256 ids. For data.kind=chat, a folder with
    tokenizer.json and its chat template. null: that of the model."""
    separator: str | None = None
    """Token of the tokenizer that ends each document. null: the usual end tokens are tried."""
    token_dtype: str | None = None
    """Dtype of the ids in .bin files. null: uint16."""
    vocab_size: int | None = None
    """Vocabulary size of token files. null: the largest id + 1."""
    held_out: float = 0.02
    """Fraction of the data that is held out for evaluation."""
    shuffle: bool = True
    """Shuffle sequences anew in every epoch."""
    loss_on: str | None = None
    """Tokens of conversations that count: assistant (all of its turns), completion (its last turn), or all. null:
    assistant."""
    pack: bool | None = None
    """Pack several conversations into a sequence, each of which attends only to itself; false: pad each. null: true."""
    on_bad_row: str | None = None
    """Reaction to a row that is no conversation: stop, or skip (and count). null: stop."""
    chat_template: str | None = None
    """Chat template (Jinja), or a file with one, in place of the tokenizer's."""
    cache: str | None = None
    """Folder of tokenized conversations. null: ~/.cache/dzero/samples."""

    def __post_init__(self) -> None:
        check("data", self, held_out=BELOW_1, vocab_size=whole(1, MOST_IDS))
        if self.kind not in KINDS:
            raise ValueError(f"data.kind={self.kind!r}: choose one of {[*KINDS]}")
        if self.token_dtype is not None and self.token_dtype not in TOKEN_DTYPES:
            raise ValueError(f"data.token_dtype={self.token_dtype!r}: choose one of {[*TOKEN_DTYPES]}")
        check_compatible(Settings.of(data=self))
        self._check_mixture()
        self.refuse_idle(self.source, [self.source])
        for key, allowed in CHOICES.items():
            if (value := getattr(self, key)) is not None and value not in allowed:
                raise ValueError(f"data.{key}={value!r}: choose one of {[*allowed]}")

    @property
    def source(self) -> str:
        """Source that is read: `chat`, `files`, `dataset` or `python`."""
        if self.kind == "chat":
            return "chat"
        if self.path is not None or self.paths is not None:
            return "files"
        return "python" if self.name is None else "dataset"

    def _check_mixture(self) -> None:
        """Raise ValueError if the sources of a mixture, or their weights, cannot be used."""
        if self.paths is None:
            return
        if not self.paths or not all(isinstance(path, str) and path for path in self.paths):
            raise ValueError(
                f"data.paths={shown(self.paths)}: name at least one source, each a text and none empty, as a list"
            )
        weights = self.weights
        if weights is None:
            return
        if len(weights) != len(self.paths):
            raise ValueError(
                f"data.weights={shown(weights)}: give one for each of the {len(self.paths)} sources in data.paths"
            )
        if wrong := [weight for weight in weights if weight not in WEIGHT]:
            raise ValueError(f"data.weights={shown(weights)}: {wrong[0]} is no weight, which must be {WEIGHT}")
        if not any(weights):
            raise ValueError(f"data.weights={shown(weights)}: at least one must be above 0")

    def of_source(self, path: str, suffixes: Iterable[str] = ()) -> DataConfig:
        """Return the settings of one source of a mixture, whose files have these suffixes.

        Settings that have no effect on these files are left out, because other sources of the mixture may need them.
        """
        needed = frozenset[str]().union(*(SETTINGS[suffix] for suffix in suffixes))
        unset: dict[str, Any] = dict.fromkeys(SETTINGS["files"] - needed - {"path"}) if self.kind == "text" else {}
        return replace(self, path=path, paths=None, weights=None, **unset)

    def refuse_idle(self, what: str, kinds: Iterable[str]) -> None:
        """Raise IncompatibleError if a setting has no effect on any of `kinds` (keys of SETTINGS), which are `what`."""
        allowed = frozenset[str]().union(*(SETTINGS[kind] for kind in kinds))
        for key in sorted(frozenset[str]().union(*SETTINGS.values()) - allowed):
            if (value := getattr(self, key)) is not None:
                rule = idle(f"data.{key}", "data.source", f"which takes {sorted(allowed)}", "", "")
                message = f"data.{key}={value} has no effect on {what}, {rule.why}; remove it"
                raise IncompatibleError(message, rule, Settings.of(data=self).having({"data.source": what}))

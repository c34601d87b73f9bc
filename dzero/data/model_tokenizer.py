"""Tokenizer and chat templates of a model folder, read without running any of its code.

Only tokenizer.json is taken for the tokenizer, as it is, whatever class the configuration names. The special tokens are
those of tokenizer_config.json. The chat template is chat_template.jinja, or that of tokenizer_config.json.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dzero.data.tokenizer import END_TOKENS
from dzero.errors import converting, import_optional
from dzero.utils.hub_cache import private_copies

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = "*token*.json"
"""Pattern of the files that a tokenizer is made of: tokenizer.json, its configuration, and its special tokens."""
TEMPLATES = "chat_templates"
READ_FILES = (TOKENIZER_FILES, "*.jinja", f"{TEMPLATES}/*.jinja")
"""Patterns of all files that are read."""


@dataclass(frozen=True, kw_only=True)
class ModelTokenizer:
    """Tokenizer of a model folder.

    Attributes:
        tokenizer: Fast tokenizer of transformers.
        templates: Chat templates by name, one of which is `default`; empty if there is none.
        vocab_size: One more than the largest id.
        eos_id: Id of the token that ends a text.
        bos_ids: Id of the token that begins a text, in a list that is empty if the tokenizer adds none.
        special: Special tokens, as text.
        digest: SHA-256 of the files of the tokenizer.
    """

    tokenizer: Any
    templates: dict[str, str]
    vocab_size: int
    eos_id: int
    bos_ids: list[int]
    special: list[str]
    digest: bytes


def read_model_tokenizer(folder: Path, chat_template: str | None) -> ModelTokenizer:
    """Read a folder; the arguments and errors are those of `data.chat_template.ChatEncoder`."""
    _check_folder(folder)
    names = sorted(str(path.relative_to(folder)) for pattern in READ_FILES for path in folder.glob(pattern))
    with private_copies(folder, names) as private:
        tokenizer = _load(private, folder)
        digest = hashlib.sha256()
        for path in sorted(private.glob(TOKENIZER_FILES)):
            digest.update(hashlib.sha256(path.name.encode() + b"\0" + path.read_bytes()).digest())
    vocab = tokenizer.get_vocab()
    return ModelTokenizer(
        tokenizer=tokenizer,
        templates=_templates(tokenizer.chat_template, chat_template, folder),
        vocab_size=max(vocab.values(), default=-1) + 1,
        eos_id=_eos_id(tokenizer, vocab, folder),
        bos_ids=_added_bos(tokenizer),
        special=_special(tokenizer),
        digest=digest.digest(),
    )


def _check_folder(folder: Path) -> None:
    """Raise unless the folder has a tokenizer.json, and no link to a folder of templates."""
    if not folder.is_dir():
        raise FileNotFoundError(f"data.tokenizer={folder}: no such folder (looked from {Path.cwd()})")
    if not (folder / TOKENIZER_FILE).exists():
        raise FileNotFoundError(
            f"data.tokenizer={folder} has no {TOKENIZER_FILE}; name a folder with one: tokenizers in other files are "
            "not read (save it again with transformers)"
        )
    if (folder / TEMPLATES).is_symlink():
        raise ValueError(f"{folder / TEMPLATES}: a symbolic link, which is not followed; copy the folder")


def _load(private: Path, folder: Path) -> Any:
    """Return the fast tokenizer of the copy `private` of a folder, whatever class its configuration names."""
    transformers = import_optional("transformers", f"data.tokenizer={folder}", "hf")
    with converting(f"data.tokenizer={folder} cannot be read", Exception, repair="download or save it again"):
        return transformers.PreTrainedTokenizerFast.from_pretrained(
            str(private), local_files_only=True, trust_remote_code=False
        )


def _templates(found: Any, given: str | None, folder: Path) -> dict[str, str]:
    """Return the chat templates by name, with one that is named `default`; empty if there is none."""
    if given is not None:
        return {"default": given if "{" in given else _read_template(Path(given).expanduser())}
    templates = {"default": found} if isinstance(found, str) else {} if found is None else found
    if not isinstance(templates, dict):
        raise ValueError(f"{folder}: its chat template is a {type(templates).__name__}, not text; correct it")
    if templates and ("default" not in templates or not all(isinstance(each, str) for each in templates.values())):
        raise ValueError(
            f"{folder} has chat templates named {sorted(templates)}, and none is the default; give one as "
            "data.chat_template"
        )
    return dict(templates)


def _read_template(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"data.chat_template={path}: no such file, and no template, which has {{{{ }}}} in it")
    with converting(f"data.chat_template={path} is no text in UTF-8", UnicodeDecodeError):
        return path.read_text(encoding="utf-8")


def _eos_id(tokenizer: Any, vocab: dict[str, int], folder: Path) -> int:
    names = [name for name in (tokenizer.eos_token, *END_TOKENS) if name is not None]
    found = next((vocab[name] for name in names if name in vocab), None)
    if found is None:
        raise ValueError(f"{folder}: none of {names} is in the vocabulary; name an eos_token in tokenizer_config.json")
    return found


def _added_bos(tokenizer: Any) -> list[int]:
    """Return the bos token as a list if the tokenizer adds it to a text, else an empty list."""
    with converting("the tokenizer cannot encode the text 'a'", Exception, repair="take another data.tokenizer"):
        ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    return [tokenizer.bos_token_id] if ids and ids[0] == tokenizer.bos_token_id else []


def _special(tokenizer: Any) -> list[str]:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return sorted({token for token in (*added, *tokenizer.all_special_tokens) if token})

"""Encoding of conversations: token ids, and which of them the loss counts.

    loss_on       counted in a chat template's text    counted in plain text (prompt, completion, eos)
    assistant     every turn of the assistant          completion and eos
    completion    the last turn of the assistant       completion and eos
    all           every token but the first            every token but the first

A turn of the assistant ends with the token at which a model is to stop. If the template has {% generation %} tags, the
turns are what is between them, as `apply_chat_template(..., return_assistant_tokens_mask=True)` counts them; else
`data/assistant_spans.py` finds them. A token counts if it overlaps a turn; in plain text, if it begins in the
completion. The first token is never a target, so it never counts.

A chat template writes its own special tokens; one that a message has as text becomes that token too, as in
transformers. A template that asks for the date gets that of the day on which it is rendered. Plain text begins with the
tokenizer's bos token if the tokenizer is set to add one, and ends with its eos token.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzero.data.assistant_spans import Span, TemplateError, TemplateSyntaxError, TemplateTooSlow
from dzero.data.conversations import Conversation
from dzero.data.model_tokenizer import read_model_tokenizer
from dzero.data.template_process import TemplateProcess, TemplateSettings
from dzero.errors import in_short

LOSS_ON = ("assistant", "completion", "all")
BATCH_S = 5.0
FORMAT = 1
"""Version of the encoding: raise it when the same conversation gives other tokens or another mask."""
VERSIONS = ("transformers", "tokenizers", "jinja2")


@dataclass(frozen=True)
class EncodedSample:
    """One sample: `ids`, int32 [n], and `counts`, bool [n], which says whether token i is a target that counts."""

    ids: NDArray[np.int32]
    counts: NDArray[np.bool_]


@dataclass(frozen=True)
class _Text:
    """Text of a sample before it is tokenized; a token counts if it overlaps one of `spans`, or begins in the last."""

    text: str
    spans: list[Span]
    is_plain: bool


class ChatEncoder:
    """Tokenizer and chat template of a model folder.

    The folder is read once. The template runs in a process of its own (`data/template_process.py`), which the first
    conversation starts and `close` ends.

    Attributes:
        name: The folder, for messages.
        vocab_size: One more than the largest id.
        dtype: Smallest of uint16 and int32 that holds all ids.
        eos_id: Id of the token that ends a text.
        fingerprint: Hexadecimal digest of everything that the encoding depends on.
    """

    def __init__(self, folder: Path, loss_on: str, chat_template: str | None = None) -> None:
        """Read the tokenizer and its template.

        Args:
            folder: Folder with tokenizer.json, and tokenizer_config.json and chat_template.jinja if it has them.
            loss_on: One of `LOSS_ON`.
            chat_template: Chat template, or the path of a file with one, to use in place of the folder's.

        Raises:
            FileNotFoundError: The folder or its tokenizer.json is not there.
            ValueError: A file cannot be used, or a setting has an unknown value.
            ModuleNotFoundError: transformers is not installed.
        """
        if loss_on not in LOSS_ON:
            raise ValueError(f"data.loss_on={loss_on!r}: choose one of {[*LOSS_ON]}")
        folder = folder.expanduser()
        read = read_model_tokenizer(folder, chat_template)
        self.name, self.loss_on = str(folder), loss_on
        self.vocab_size, self.eos_id = read.vocab_size, read.eos_id
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.int32)
        self._tokenizer, self._templates, self._bos = read.tokenizer, read.templates, read.bos_ids
        variables = dict(self._tokenizer.special_tokens_map)
        self._process = TemplateProcess(TemplateSettings(self._templates, variables, read.special))
        self.fingerprint = self._fingerprint(read.digest, variables)

    def encode(self, conversation: Conversation) -> EncodedSample:
        """Return the ids and the mask of a conversation.

        Raises:
            ValueError: The template fails, or there is none and the conversation needs one.
        """
        (encoded,) = self.encode_batch([conversation])
        if isinstance(encoded, ValueError):
            raise encoded
        return encoded

    def encode_batch(
        self, conversations: Sequence[Conversation], *, stop: bool = False
    ) -> list[EncodedSample | ValueError]:
        """Return for each of the first conversations its sample, or the error that keeps it from being encoded.

        These are all, or as many as `BATCH_S` allows, and with `stop` none behind the first error. They are tokenized
        at once, on the tokenizer's own threads.

        Raises:
            ValueError: The template is missing, has an error of syntax, or takes too long for several conversations,
                which no other conversation can change.
        """
        results: list[Any] = []
        until_s = time.monotonic() + BATCH_S
        for conversation in conversations:
            results.append(self._text_or_error(conversation))
            if (stop and isinstance(results[-1], ValueError)) or time.monotonic() > until_s:
                break
        where = [index for index, each in enumerate(results) if isinstance(each, _Text)]
        for index, sample in zip(where, self._samples([results[index] for index in where]), strict=True):
            results[index] = sample
        return results

    def decode(self, ids: NDArray[Any]) -> str:
        """Return the text of token ids, with special tokens."""
        return str(self._tokenizer.decode([int(each) for each in ids], skip_special_tokens=False))

    def close(self) -> None:
        """End the process of the chat template; encoding starts it again."""
        self._process.close()

    def _text_or_error(self, conversation: Conversation) -> _Text | TemplateError:
        try:
            return self._text(conversation)
        except (TemplateSyntaxError, TemplateTooSlow) as error:
            raise ValueError(f"{self.name}: {error}") from error
        except TemplateError as error:
            return error

    def _text(self, conversation: Conversation) -> _Text:
        if conversation.messages and self._templates:
            name = "tool_use" if conversation.tools and "tool_use" in self._templates else "default"
            first = {"all": None, "assistant": 0, "completion": conversation.completion}[self.loss_on]
            text, spans = self._process.render(name, conversation.messages, conversation.tools, first)
            return _Text(text, spans, is_plain=False)
        if conversation.text is None:
            raise ValueError(
                f"{self.name} has no chat template, which messages need; give one as data.chat_template, or take the "
                "tokenizer of a chat model"
            )
        prompt, completion = conversation.text
        if len(prompt) + len(completion) > (most := self._process.settings.characters):
            raise TemplateError(
                f"prompt and completion have {len(prompt) + len(completion)} characters, over {most}; cut it"
            )
        return _Text(prompt + completion, [(len(prompt), len(prompt) + len(completion))], is_plain=True)

    def _samples(self, texts: list[_Text]) -> list[EncodedSample | ValueError]:
        """Tokenize texts as one batch, and one by one if the batch fails, to tell which of them it is."""
        if not texts:
            return []
        try:
            encoded = self._tokenizer(
                [each.text for each in texts],
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                padding=False,
                truncation=False,
                verbose=False,
            )
        except Exception as error:  # tokenizers raises no narrower class
            if len(texts) == 1:
                return [ValueError(f"the tokenizer {self.name} cannot encode the text: {in_short(error)}")]
            return [sample for text in texts for sample in self._samples([text])]
        pairs = zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [self._sample(text, ids, offsets) for text, ids, offsets in pairs]

    def _sample(self, text: _Text, ids: list[int], offsets: list[tuple[int, int]]) -> EncodedSample:
        found = np.array(ids, np.int32)
        spans = np.array(offsets, np.int64).reshape(-1, 2)
        counts = _begin_in(spans, text.spans[0][0]) if text.is_plain else _overlap(spans, text.spans)
        if text.is_plain:
            end = [] if ids and ids[-1] == self.eos_id else [self.eos_id]
            bos = [] if ids and [ids[0]] == self._bos else self._bos
            found = np.array([*bos, *ids, *end], np.int32)
            counts = np.concatenate([np.zeros(len(bos), np.bool_), counts, np.ones(len(end), np.bool_)])
        if self.loss_on == "all":
            counts = np.ones(len(found), np.bool_)
        counts[:1] = False
        return EncodedSample(found, counts)

    def _fingerprint(self, files: bytes, variables: dict[str, Any]) -> str:
        digest = hashlib.sha256(files)
        versions = {name: version(name) for name in VERSIONS}
        rest = [FORMAT, self.loss_on, self._templates, variables, self.eos_id, self._bos, versions]
        digest.update(json.dumps(rest, sort_keys=True).encode())
        return digest.hexdigest()


def _overlap(offsets: NDArray[np.int64], spans: list[Span]) -> NDArray[np.bool_]:
    """Return which tokens overlap a span; `offsets` is [n, 2] in characters, and both are in order."""
    if not spans:
        return np.zeros(len(offsets), np.bool_)
    starts, ends = np.array(spans, np.int64).T
    span = np.searchsorted(ends, offsets[:, 0], side="right")
    inside = span < len(spans)
    return np.asarray(inside & (offsets[:, 1] > starts[np.where(inside, span, 0)]), np.bool_)


def _begin_in(offsets: NDArray[np.int64], start: int) -> NDArray[np.bool_]:
    return np.asarray(offsets[:, 0] >= start, np.bool_)

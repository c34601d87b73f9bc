"""Spans of the assistant's turns in a rendered conversation, for chat templates without generation tags.

Note: how the span of a turn is found.

    full      the template's text of all messages
    prefix    text of the messages before the turn, with the generation prompt: what a model is given to answer
    through   text of the messages up to and with the turn

The span is full[len(prefix) : len(through)] if both are a beginning of `full`. Whitespace after a special token at its
end is cut off, because a model stops at that token.

Some templates render an earlier turn otherwise than the last one: they drop its thinking, or move the list of tools.
Then `through` or `prefix` is no beginning of `full`. In that case all messages are rendered once more, with the content
of the turn replaced by a marker. What stands before and after the marker is the same as in `full`, so it tells where
the content is. The text that closes the turn is what follows the marker when the turn is rendered as the last message.

Other templates have no generation prompt. Then a header between `prefix` and the content does not count: the marker
tells where the content begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MARKER = "Qz7dzeroAnswerQz7"

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Text of messages; the second argument says whether the generation prompt is added. Raises `TemplateError`."""
Span = tuple[int, int]


class TemplateError(ValueError):
    """Error of a chat template on a conversation."""


def assistant_spans(
    render: Render, messages: Sequence[Message], first: int, special: Sequence[str]
) -> tuple[str, list[Span]]:
    """Return the text of all messages, and the spans of the assistant's turns in it, in characters and in order.

    Args:
        render: Function that renders messages with the chat template.
        messages: All messages of a conversation.
        first: Index of the first message that counts.
        special: Special tokens of the tokenizer, as text.

    Raises:
        TemplateError: The template fails, or the text does not tell where a turn is.
    """
    full = render(messages, False)
    turns = [index for index in range(first, len(messages)) if messages[index]["role"] == "assistant"]
    before = messages[: turns[0]]
    prompts = _rendered(render, before, True) != _rendered(render, before, False)
    spans: list[Span] = []
    for turn in turns:
        span = _span(render, messages, turn, full, special, prompts)
        if spans and span[0] < spans[-1][1]:
            raise _unclear(turn)
        spans.append(span)
    return full, spans


def prompt_length(render: Render, messages: Sequence[Message], turn: int, full: str) -> int | None:
    """Return the length of what a model is given to answer with message `turn`; None if `full` begins otherwise."""
    prefix = _rendered(render, messages[:turn], True)
    return len(prefix) if prefix is not None and full.startswith(prefix) else None


def _span(
    render: Render, messages: Sequence[Message], turn: int, full: str, special: Sequence[str], prompts: bool
) -> Span:
    start = prompt_length(render, messages, turn, full)
    if start is not None and not prompts:
        before, _ = _around_marker(render, messages, turn, len(messages))
        header = full[start : len(before)] if full.startswith(before) else ""
        start += len(header) if header.strip() else 0
    through = full if turn == len(messages) - 1 else _rendered(render, messages[: turn + 1], False)
    if start is None or through is None or not full.startswith(through) or len(through) < start:
        return _span_by_marker(render, messages, turn, full, special, start)
    return _without_space(full, start, len(through), special)


def _span_by_marker(
    render: Render, messages: Sequence[Message], turn: int, full: str, special: Sequence[str], start: int | None
) -> Span:
    before, after = _around_marker(render, messages, turn, len(messages))
    _, closing = _around_marker(render, messages, turn, turn + 1)
    around = full.startswith(before) and full.endswith(after) and len(before) + len(after) <= len(full)
    shared = _common_start(closing, after)
    stop = max((shared.rfind(token) + len(token) for token in special if token in shared), default=0)
    if not stop and shared == closing:
        stop = len(closing)
    if not around or not before or not stop:
        raise _unclear(turn)
    begin = len(before) if start is None or start > len(before) else start
    return _without_space(full, begin, len(full) - len(after) + stop, special)


def _unclear(turn: int) -> TemplateError:
    return TemplateError(
        f"the chat template does not tell where message {turn} (assistant) begins and ends; use "
        "loss_on=completion or loss_on=all, or a chat template with {% generation %} tags"
    )


def _common_start(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    length = next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
    return one[:length]


def _around_marker(render: Render, messages: Sequence[Message], turn: int, end: int) -> tuple[str, str]:
    """Return the text before and after the content of a turn, of messages[:end]; empty if it does not appear once."""
    marked = {**messages[turn], "content": MARKER}
    text = _rendered(render, [*messages[:turn], marked, *messages[turn + 1 : end]], False)
    if text is None or text.count(MARKER) != 1:
        return "", ""
    before, _, after = text.partition(MARKER)
    return before, after


def _rendered(render: Render, messages: Sequence[Message], prompt: bool) -> str | None:
    """Return the text of some of the messages; None if the template refuses them, which says nothing about all."""
    try:
        return render(messages, prompt)
    except TemplateError:
        return None


def _without_space(full: str, start: int, end: int, special: Sequence[str]) -> Span:
    """Return a span without the whitespace that follows a special token at its end."""
    turn = full[start:end].rstrip()
    return (start, start + len(turn)) if turn.endswith(tuple(special)) else (start, end)

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


class TemplateSyntaxError(TemplateError):
    """Error in the text of a chat template, which is the same for every conversation."""


class TemplateTooSlow(TemplateError):
    """A chat template that takes too long, for too many conversations to go on with others."""


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
    rendered = _Rendered(render, messages, special)
    turns = [index for index in range(first, len(messages)) if messages[index]["role"] == "assistant"]
    prompts = rendered.has_generation_prompt(turns[0])
    spans: list[Span] = []
    for turn in turns:
        span = rendered.span(turn, has_prompt=prompts)
        if spans and span[0] < spans[-1][1]:
            raise _unclear(turn)
        spans.append(span)
    return rendered.full, spans


def prompt_length(render: Render, messages: Sequence[Message], turn: int, full: str) -> int | None:
    """Return the length of what a model is given to answer with message `turn`; None if `full` begins otherwise."""
    prefix = _text(render, messages[:turn], True)
    return len(prefix) if prefix is not None and full.startswith(prefix) else None


class _Rendered:
    """A rendered conversation, in which turns are searched for."""

    def __init__(self, render: Render, messages: Sequence[Message], special: Sequence[str]) -> None:
        self.full = render(messages, False)
        self._render, self._messages, self._special = render, messages, special

    def has_generation_prompt(self, turn: int) -> bool:
        """Return whether the template has one, as far as can be told before message `turn`."""
        before = self._messages[:turn]
        prompted = _text(self._render, before, True)
        return prompted is None or prompted != _text(self._render, before, False)

    def span(self, turn: int, *, has_prompt: bool) -> Span:
        start = prompt_length(self._render, self._messages, turn, self.full)
        if start is not None and not has_prompt:
            before, _ = self._around_marker(turn, self._messages[turn + 1 :])
            header = self.full[start : len(before)] if self.full.startswith(before) else ""
            start += len(header) if header.strip() else 0
        end = self._end(turn)
        if start is None or end is None or end < start:
            return self._span_by_marker(turn, start)
        return self._without_space(start, end)

    def _end(self, turn: int) -> int | None:
        """Return where the text up to and with a turn ends; None if `full` begins otherwise."""
        if turn < len(self._messages) - 1:
            through = _text(self._render, self._messages[: turn + 1], False)
            return len(through) if through is not None and self.full.startswith(through) else None
        if not self._ends_in_two_special_tokens():
            return len(self.full)
        _, closing = self._around_marker(turn, [])
        length = self._closing_length(turn, closing)
        return len(self.full) - len(closing) + length if length and self.full.endswith(closing) else len(self.full)

    def _span_by_marker(self, turn: int, start: int | None) -> Span:
        before, after = self._around_marker(turn, self._messages[turn + 1 :])
        length = self._closing_length(turn, after)
        closing, rest = after[:length], after[length:]
        begin = len(before) if start is None or start > len(before) else start
        end = len(self.full) - len(rest)
        # Text between the content and the closing may differ with the marker, as a newline before a call of a tool.
        last = next((token for token in self._special if closing.endswith(token)), closing)
        around = self.full.startswith(before) and self.full.endswith(rest) and self.full[begin:end].endswith(last)
        if not before or not closing or not around:
            raise _unclear(turn)
        return self._without_space(begin, end)

    def _around_marker(self, turn: int, rest: Sequence[Message]) -> tuple[str, str]:
        """Return the text before and after the content of a turn that `rest` follows; empty if it is not there once."""
        marked = {**self._messages[turn], "content": MARKER}
        text = _text(self._render, [*self._messages[:turn], marked, *rest], False)
        if text is None or text.count(MARKER) != 1:
            return "", ""
        before, _, after = text.partition(MARKER)
        return before, after

    def _closing_length(self, turn: int, after: str) -> int:
        """Return how much of `after` closes a turn; 0 if that cannot be told.

        It is what the turn has both as the last message and with another behind it, up to the last special token.
        What only the last message has ends the conversation.
        """
        _, closing = self._around_marker(turn, [])
        if turn == len(self._messages) - 1:
            after = self._around_marker(turn, [{"role": "user", "content": "x"}])[1] or after
        pairs = enumerate(zip(closing, after, strict=False))
        length = next((index for index, (left, right) in pairs if left != right), min(len(closing), len(after)))
        shared = closing[:length]
        stops = [shared.rfind(token) + len(token) for token in self._special if token in shared]
        return max(stops, default=length if shared == closing else 0)

    def _ends_in_two_special_tokens(self) -> bool:
        text, found = self.full.rstrip(), 0
        while found < 2 and (last := next((token for token in self._special if text.endswith(token)), None)):
            text, found = text[: -len(last)].rstrip(), found + 1
        return found == 2

    def _without_space(self, start: int, end: int) -> Span:
        """Return a span without the whitespace that follows a special token at its end."""
        turn = self.full[start:end].rstrip()
        return (start, start + len(turn)) if turn.endswith(tuple(self._special)) else (start, end)


def _text(render: Render, messages: Sequence[Message], prompt: bool) -> str | None:
    """Return the text of some of the messages; None if the template refuses them, which says nothing about all."""
    try:
        return render(messages, prompt)
    except TemplateError:
        return None


def _unclear(turn: int) -> TemplateError:
    return TemplateError(
        f"the chat template does not tell where message {turn} (assistant) begins and ends; use "
        "loss_on=completion or loss_on=all, or a chat template with {% generation %} tags"
    )

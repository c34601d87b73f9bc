"""Promises of the spans: each turn of the assistant, up to the token at which a model stops, in any template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import chat
import pytest

from dzero.data.assistant_spans import TemplateError, assistant_spans
from dzero.data.conversations import conversation_of

templates = pytest.importorskip("transformers.utils.chat_template_utils")

ROW = chat.turns("What is 你好?", "It is 🎉 Paris.\n", "hello again", "Hello 日本語 there!", system="Be brief.")
NO_SYSTEM = chat.turns("What is 你好?", "It is 🎉 Paris.", "hello again", "Hello 日本語 there!")
THOUGHT = chat.turns("What?", "<think>\nhm\n</think>\n\nParis", "and?", "<think>\nso\n</think>\n\nagain")
SAME = chat.turns("a", "b", "c", "b", "b<|im_end|>", "b")
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"at": "clock"}'}}
CALLING = {
    "messages": [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is noon."},
    ],
    "tools": '[{"type": "function", "function": {"name": "look"}}]',
}
WITH_TOOLS = (
    "{% for tool in tools or [] %}tool {{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}call {{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PHI = (
    "{% for m in messages %}<|header|>{{ m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
NO_TAGS = chat.without_tags(chat.CHATML)


def spans_of(template: str, row: dict[str, Any]) -> list[str]:
    conversation = conversation_of(row)

    def render(messages: Sequence[dict[str, Any]], prompt: bool) -> str:
        try:
            texts, _ = templates.render_jinja_template(
                conversations=[[*messages]],
                tools=conversation.tools and [*conversation.tools],
                chat_template=template,
                add_generation_prompt=prompt,
                bos_token="<s>",
                eos_token="</s>",
            )
        except Exception as error:
            raise TemplateError(str(error)) from error
        return str(texts[0])

    full, spans = assistant_spans(render, conversation.messages, 0, chat.SPECIAL)
    return [full[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("template", "row", "spans"),
    [
        (chat.LLAMA, ROW, ["It is 🎉 Paris.<|eot|>", "Hello 日本語 there!<|eot|>"]),
        (chat.MISTRAL, NO_SYSTEM, [" It is 🎉 Paris.</s>", " Hello 日本語 there!</s>"]),
        (chat.THINKING, THOUGHT, ["Paris<|im_end|>", "<think>\nso\n</think>\n\nagain<|im_end|>"]),
        (chat.THINKING, SAME, ["b<|im_end|>", "b<|im_end|>", "<think>\n\n</think>\n\nb<|im_end|>"]),
        (
            chat.THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
            THOUGHT,
            ["Paris<|im_end|>", "so\n</think>\n\nagain<|im_end|>"],
        ),
        (
            chat.THINKING,
            CALLING,
            ['call {"at": "clock"}<|im_end|>', "<think>\n\n</think>\n\nIt is noon.<|im_end|>"],
        ),
        (PLAIN, NO_SYSTEM, ["It is 🎉 Paris.\n", "Hello 日本語 there!\n"]),
        (
            PLAIN + "{% if add_generation_prompt %}assistant:{% endif %}",
            NO_SYSTEM,
            [" It is 🎉 Paris.\n", " Hello 日本語 there!\n"],
        ),
        (NO_TAGS + "</s>", ROW, ["It is 🎉 Paris.\n<|im_end|>", "Hello 日本語 there!<|im_end|>"]),
        (PHI, ROW, ["It is 🎉 Paris.\n<|eot|>", "Hello 日本語 there!<|eot|>"]),
        (WITH_TOOLS, CALLING, ['call {"at": "clock"}<|im_end|>', "It is noon.<|im_end|>"]),
    ],
    ids=[
        "llama",
        "mistral",
        "thinking",
        "repeats",
        "thinking-prompt",
        "thinking-tools",
        "header",
        "plain",
        "ends",
        "phi",
        "tools",
    ],
)
def test_turns_are_found_by_prefixes_and_markers(template: str, row: dict[str, Any], spans: list[str]) -> None:
    assert spans_of(template, row) == spans


UNCLEAR = {
    "{% for m in messages | reverse %}{{ m.content }}{% endfor %}": "message 3 (assistant) begins and ends",
    "{{ messages | length }}": "message 1 (assistant) begins and ends",
    "{% for m in messages %}{{ m.content | upper }}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}": "1 (a",
    "{% if messages | length < 4 %}{{ raise_exception('few') }}{% endif %}{% for m in messages %}{{ m.content }} "
    "{% endfor %}": "message 1 (assistant) begins and ends",
}


@pytest.mark.parametrize("number", range(len(UNCLEAR)))
def test_turns_that_cannot_be_told_are_refused(number: int) -> None:
    template, says = [*UNCLEAR.items()][number]
    with pytest.raises(TemplateError, match=re.escape(says)):
        spans_of(template, chat.turns("Hi", "Hello", "and", "so"))

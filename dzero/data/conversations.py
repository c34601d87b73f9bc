"""Conversations from the common layouts of chat and instruction data.

    keys of the row                      layout     becomes
    messages                             OpenAI     messages; `tools` is kept, and `functions`, their old name
    conversations                        ShareGPT   messages; `system` and `tools` are kept, and calls are tool calls
    prompt, completion (lists)                      messages, of which the completion's count
    prompt, completion (strings)                    text, as it is: never put into a chat template
    instruction, output                  Alpaca     messages, and text for a tokenizer without a chat template;
                                                    `input`, `system` and `history` are kept
    question, answer                                as Alpaca

The first line of the table that fits is taken; other keys of a row are ignored, and so are keys whose value is null.
A message with the role `function_call` has calls as JSON in its text, one object of `name` and `arguments` or a list of
them; OpenAI's old key `function_call` has one. Both become `tool_calls` of the assistant, and schemas of functions that
are not wrapped become `{"type": "function", "function": schema}`, as chat templates expect.

Every message has a `role` of `ROLES`, and `content` that is a string, unless it only calls tools.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Names of roles in data, and the role of the chat template for each."""
CALLS = ("function_call", "tool_call")
"""Roles of the assistant whose text is the JSON of calls."""
LAYOUTS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("question", "answer"),
)

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One sample before it is tokenized: messages, text, or both forms of the same sample.

    Attributes:
        messages: Messages for a chat template; empty if the sample is plain text.
        tools: JSON schemas of the tools, for a chat template.
        text: Prompt and completion as plain text; None if the sample has only messages.
        completion: Index of the first message that counts with `loss_on=completion`.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    text: tuple[str, str] | None = None
    completion: int = 0


def conversation_of(row: dict[str, Any]) -> Conversation:
    """Return the conversation in a row; the module's docstring has a table of layouts.

    Args:
        row: Keys and values of a row, as JSON has them.

    Returns:
        The conversation, whose values are all valid JSON and valid Unicode.

    Raises:
        ValueError: No layout fits, or a value is not what its layout demands. The message is one line.
    """
    row = {key: value for key, value in row.items() if value is not None}
    for layout in LAYOUTS:
        if all(key in row for key in layout):
            try:
                found = READERS[layout](row)
                _check_json(found)
            except RecursionError as error:
                raise ValueError(f"{layout[0]!r} is nested too deeply for a conversation") from error
            return found
    known = " or ".join("+".join(layout) for layout in LAYOUTS)
    raise ValueError(f"the row has the keys {_short(sorted(row))}, which are no conversation; it needs {known}")


def _openai(row: dict[str, Any]) -> Conversation:
    messages = _messages(row["messages"], "messages")
    return _chat(messages, _tools(row["tools"]) if "tools" in row else _wrapped(_tools(row.get("functions"))))


def _sharegpt(row: dict[str, Any]) -> Conversation:
    turns = row["conversations"]
    if isinstance(turns, list):
        turns = [_renamed(turn) if isinstance(turn, dict) else turn for turn in turns]
    messages = _messages(turns, "conversations")
    if "system" in row and messages[0]["role"] != "system" and (system := _string(row, "system")):
        messages.insert(0, {"role": "system", "content": system})
    return _chat(messages, _wrapped(_tools(row.get("tools"))))


def _renamed(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn with `role` and `content` for ShareGPT's `from` and `value`."""
    names = {"from": "role", "value": "content"}
    return {names.get(key, key): value for key, value in turn.items() if key not in names or names[key] not in turn}


def _wrapped(tools: tuple[dict[str, Any], ...] | None) -> tuple[dict[str, Any], ...] | None:
    """Return schemas of tools, in which a schema of a function says that it is one."""
    if tools is None:
        return None
    return tuple(
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool for tool in tools
    )


def _prompt_completion(row: dict[str, Any]) -> Conversation:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Conversation(text=(prompt, completion))
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        kinds = f"a {type(prompt).__name__} and a {type(completion).__name__}"
        raise ValueError(f"'prompt' and 'completion' are {kinds}; both must be strings, or both lists of messages")
    answer = _messages(completion, "completion")
    asked = _messages(prompt, "prompt") if prompt else []
    if not any(message["role"] == "assistant" for message in answer):
        raise ValueError("'completion' has no message of the assistant")
    return Conversation(messages=(*asked, *answer), tools=_tools(row.get("tools")), completion=len(asked))


def _alpaca(row: dict[str, Any]) -> Conversation:
    given = _string(row, "input") if "input" in row else ""
    return _instruction(row, _string(row, "instruction"), given, _string(row, "output"))


def _question(row: dict[str, Any]) -> Conversation:
    return _instruction(row, _string(row, "question"), "", _string(row, "answer"))


def _instruction(row: dict[str, Any], instruction: str, given: str, answer: str) -> Conversation:
    system = _string(row, "system") if "system" in row else ""
    history = _history(row.get("history", []))
    asked = f"{instruction}\n\n{given}" if given else instruction
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    text = f"{system}\n\n" if system else ""
    for question, reply in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        text += _layout(question, "") + f"{reply}\n\n"
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    text += _layout(instruction, given)
    return Conversation(messages=tuple(messages), text=(text, answer), completion=len(messages) - 1)


def _layout(instruction: str, given: str) -> str:
    """Return the plain layout of an instruction, up to where its answer begins."""
    section = f"### Input:\n{given}\n\n" if given else ""
    return f"### Instruction:\n{instruction}\n\n{section}### Response:\n"


def _history(history: Any) -> list[tuple[str, str]]:
    if not isinstance(history, list) or not all(
        isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn)
        for turn in history
    ):
        raise ValueError("'history' must be a list of [instruction, output], each two strings")
    return [(turn[0], turn[1]) for turn in history]


def _chat(messages: list[Message], tools: tuple[dict[str, Any], ...] | None) -> Conversation:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError(f"none of the {len(messages)} messages is the assistant's, so there is nothing to learn")
    return Conversation(messages=tuple(messages), tools=tools, completion=answers[-1])


def _messages(found: Any, key: str) -> list[Message]:
    if not isinstance(found, list):
        raise ValueError(f"{key!r} is a {type(found).__name__}, not a list of messages")
    if not found:
        raise ValueError(f"{key!r} is empty: a conversation has at least one message")
    return [_message(message, f"{key}[{index}]") for index, message in enumerate(found)]


def _message(found: Any, name: str) -> Message:
    """Return a message without nulls, with a known role, content as one string, and arguments of calls as objects."""
    if not isinstance(found, dict):
        raise ValueError(f"{name} is a {type(found).__name__}, not a message with 'role' and 'content'")
    message = {key: value for key, value in found.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{name} has the role {_short(role)}; choose one of {[*ROLES]}")
    if message.pop("weight", 1) not in (1, True):
        raise ValueError(f"{name} has 'weight': 0, which is not supported; use loss_on=completion, or cut the row")
    if role in CALLS:
        message |= {"content": "", "tool_calls": _calls_of_text(message.get("content"), f"{name} has the role {role}")}
    calls = message.pop("tool_calls", [])
    if (call := message.pop("function_call", None)) and not calls:
        if not isinstance(call, dict):
            raise ValueError(f"{name}: 'function_call' must be an object of 'name' and 'arguments'")
        calls = [{"type": "function", "function": call}]
    if calls:
        message["tool_calls"] = _calls(calls, name)
    if "content" in message:
        message["content"] = _content(message["content"], name)
    elif not calls:
        raise ValueError(f"{name} has no 'content' and no 'tool_calls'; write a string, or remove the row")
    else:
        message["content"] = ""
    return message | {"role": ROLES[role]}


def _content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{name}: 'content' is a {type(content).__name__}, not a string or a list of text parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{name}: 'content' has a part of type {_short(kind)}; only parts of text can be used")
    return "".join(part["text"] for part in content)


def _calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Return tool calls whose arguments are objects: templates expect that, while OpenAI's API writes JSON strings."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{name}: 'tool_calls' must be a list of objects")
    return [_call(call) for call in calls]


def _calls_of_text(calls: Any, name: str) -> list[dict[str, Any]]:
    """Return the calls that a text has as JSON: one object of `name` and `arguments`, or a list of them."""
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except ValueError as error:
            raise ValueError(f"{name}, but its text is no JSON of calls ({error})") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(f"{name}; its text must be JSON of 'name' and 'arguments', or a list of such")
    return [{"type": "function", "function": call} for call in calls]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call  # text that is no JSON is passed on as text
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


def _tools(tools: Any) -> tuple[dict[str, Any], ...] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise ValueError(f"'tools' is a string that is not JSON ({error})") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("'tools' must be a list of objects, or a JSON string of one")
    return tuple(tools)


def _string(row: dict[str, Any], key: str) -> str:
    if not isinstance(row[key], str):
        raise ValueError(f"{key!r} is a {type(row[key]).__name__}, not a string")
    return str(row[key])


def _check_json(found: Conversation) -> None:
    """Raise ValueError unless all values are JSON and all text is Unicode: tokenizers take nothing else."""
    try:
        json.dumps([found.messages, found.tools, found.text], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a text is not valid Unicode ({error.reason}); repair or remove the row") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"a value is no JSON: {error}") from error


def _short(value: Any) -> str:
    return shown if len(shown := repr(value)) <= 200 else f"{shown[:200]} ..."


READERS = dict(zip(LAYOUTS, (_openai, _sharegpt, _prompt_completion, _alpaca, _question), strict=True))

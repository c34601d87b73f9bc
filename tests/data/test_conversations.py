"""Promises of rows and conversations: every common layout is understood, and what is not is refused in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from corpora import conversation, found, rows

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CHAT = (USER, ANSWER)
PARTS = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALL_OF_OPENAI = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
SAID, SEEN = '{"name": "f", "arguments": {"x": 1}}', {"from": "observation", "value": "2"}
OLD_CALL = {"name": "f", "arguments": '{"x": 1}'}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
}
SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [USER, ANSWER], "prompt": "Hi"}, CHAT),
        ({"messages": [USER, {"role": "assistant", "content": PARTS, "name": None}]}, CHAT),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, CHAT),
        ({"conversations": [{"from": "user", "value": "Hi"}, {"from": "bot", "value": "Hello"}]}, CHAT),
        ({"conversations": [USER, {"role": "model", "content": "Hello"}], "system": "Be kind."}, (SYSTEM, *CHAT)),
        ({"messages": None, "prompt": [USER], "completion": [ANSWER]}, CHAT),
        ({"instruction": "Hi", "output": "Hello", "input": ""}, CHAT),
        ({"instruction": "Hi", "output": "Hello", "system": "Be kind."}, (SYSTEM, *CHAT)),
        ({"instruction": "Hi", "output": "Hello", "history": [["Hi", "Hello"]]}, CHAT * 2),
        ({"question": "Hi", "answer": "Hello"}, CHAT),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL_OF_OPENAI]}]},
            (USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}),
        ),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": SAID}, SEEN]},
            (USER, CALLED, {"role": "tool", "content": "2"}),
        ),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "tool_call", "value": f"[{SAID}]"}]},
            (USER, CALLED),
        ),
        ({"messages": [USER, {"role": "tool_call", "content": SAID}]}, (USER, CALLED)),
        ({"messages": [USER, {"role": "assistant", "content": None, "function_call": OLD_CALL}]}, (USER, CALLED)),
        (
            {"messages": [*CHAT, {"role": "function", "name": "f", "tool_call_id": "1", "content": "2"}]},
            (*CHAT, {"role": "tool", "name": "f", "tool_call_id": "1", "content": "2"}),
        ),
    ],
)
def test_every_layout_becomes_messages(row: dict[str, Any], messages: tuple[dict[str, Any], ...]) -> None:
    assert conversation(row).messages == messages


FUNCTION = {"name": "f", "parameters": {}}
TOOL = {"type": "function", "function": FUNCTION}


def test_tools_are_a_list_or_a_string_of_one_and_schemas_of_functions_are_wrapped() -> None:
    for given in ({"tools": [TOOL]}, {"tools": json.dumps([TOOL])}, {"functions": [FUNCTION]}):
        assert conversation({"messages": [*CHAT], **given}).tools == (TOOL,)
    assert conversation({"conversations": [*CHAT], "tools": json.dumps([FUNCTION])}).tools == (TOOL,)
    for nothing in ("", [], None):
        assert conversation({"messages": [*CHAT], "tools": nothing}).tools is None


def test_the_completion_is_known_and_text_is_kept() -> None:
    assert conversation({"messages": [*CHAT, *CHAT]}).completion == 3
    assert conversation({"prompt": [*CHAT, USER], "completion": [ANSWER]}).completion == 3
    assert conversation({"prompt": "a", "completion": "b"}).text == ("a", "b")
    assert conversation({"prompt": "a", "completion": "b"}).messages == ()
    prompt = "### Instruction:\nHi\n\n### Response:\n"
    row = {"instruction": "Hi", "output": "x", "history": [["Hi", "Hello"]], "system": "Be kind."}
    assert conversation(row).text == (f"Be kind.\n\n{prompt}Hello\n\n{prompt}", "x")


DEEP: list[Any] = []
for _ in range(50_000):
    DEEP = [DEEP]
BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({}, "the keys []"),
    ({"text": "Hi"}, "['text']"),
    ({"prompt": "a"}, "prompt+completion"),
    ({"instruction": "a", "input": "b"}, "instruction+output"),
    ({"x" * 10_000: 1}, "..."),
    ({"messages": []}, "'messages' is empty"),
    ({"messages": "Hi"}, "'messages' is a str"),
    ({"messages": [[USER]]}, "messages[0] is a list"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "the role 'wizard'"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "the role ['user']"),
    ({"messages": [USER]}, "none of the 1 messages"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages[1] has no 'content'"),
    ({"messages": [USER, {"role": "assistant", "content": 3}]}, "'content' is a int"),
    ({"messages": [USER, {"role": "assistant", "content": ["a"]}]}, "a part of type 'str'"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "image_url"}]}]}, "type 'image_url'"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": DEEP}]}]}, "deeply"),
    ({"messages": [USER, ANSWER | {"tool_calls": "f()"}]}, "'tool_calls' must be"),
    ({"messages": [USER, ANSWER | {"weight": 0}]}, "'weight': 0"),
    ({"messages": [USER, ANSWER | {"name": b"x"}]}, "no JSON"),
    ({"messages": [USER, ANSWER | {"name": {"\udfff": 1}}]}, "Unicode"),
    ({"messages": [*CHAT], "tools": "{"}, "'tools' is a string that is not JSON"),
    ({"messages": [*CHAT], "tools": "[" * 100_000}, "deeply"),
    ({"messages": [*CHAT], "tools": {"a": 1}}, "'tools' must be"),
    ({"conversations": "a"}, "'conversations' is a str"),
    ({"conversations": [{"from": "human"}]}, "conversations[0] has no 'content'"),
    ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, "the role function_call, but its text"),
    ({"conversations": [{"from": "function_call", "value": "[]"}]}, "must be JSON of 'name' and 'arguments'"),
    ({"conversations": [{"from": "tool_call", "value": '{"x": 1}'}]}, "must be JSON of 'name' and 'arguments'"),
    ({"messages": [USER, {"role": "assistant", "function_call": "f"}]}, "messages[1]: 'function_call' must be"),
    ({"conversations": [USER, ANSWER], "system": 3}, "'system' is a int"),
    ({"prompt": "a", "completion": [ANSWER]}, "a str and a list"),
    ({"prompt": [USER], "completion": [USER]}, "no message of the assistant"),
    ({"prompt": [USER], "completion": []}, "'completion' is empty"),
    ({"prompt": ["a"], "completion": [ANSWER]}, "prompt[0] is a str"),
    ({"prompt": "a\ud800", "completion": "b"}, "Unicode"),
    ({"instruction": 1, "output": "a"}, "'instruction' is a int"),
    ({"instruction": "a", "output": "b", "history": "c"}, "'history' must be"),
    ({"instruction": "a", "output": "b", "history": [["c", 1]]}, "'history' must be"),
    ({"question": "a", "answer": {"text": ["b"]}}, "'answer' is a dict"),
]


@pytest.mark.parametrize(("row", "says"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_row_that_is_no_conversation_is_refused_in_one_short_line(row: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        conversation(row)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


BAD_LINES = {
    b"{": "not JSON",
    b"[1]": "a JSON list",
    b'"text"': "a JSON str",
    b"\xff\xfe{}": "not JSON in UTF-8",
    b'{"a": "\xc3"}': "not JSON in UTF-8",
    b'{"a": 1} {"b": 2}': "not JSON",
    b"[" * 200_000: "not JSON",
    b'{"a":' * 200_000: "not JSON",
    b"\0" * 100: "not JSON",
}


def test_a_line_that_is_no_object_is_a_bad_row_and_not_the_end(tmp_path: Path) -> None:
    for number, (line, says) in enumerate(BAD_LINES.items()):
        path = tmp_path / f"chat{number}.jsonl"
        path.write_bytes(b'{"n": 1}\r\n\n' + line + b'\n{"n": 2}')
        first, bad, last = rows(path)
        assert [(row.value, row.where) for row in (first, bad, last)] == [
            ({"n": 1}, f"{path.name} line 1"),
            ({}, f"{path.name} line 3"),
            ({"n": 2}, f"{path.name} line 4"),
        ]
        assert says in bad.problem
        assert len(bad.problem) < 500
        assert last.read_bytes == path.stat().st_size


def test_rows_of_parquet_come_without_the_nulls_that_arrow_adds(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    calls = {"function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"name": "g", "arguments": {"y": 2}}}
    values = [{"messages": [USER, {"role": "assistant", "tool_calls": [call]}]} for call in calls] * 3
    parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "x.parquet", row_group_size=2)
    (tmp_path / "a.jsonl").write_text('{"x": null}\n')
    read = rows(tmp_path)
    assert [(row.value, row.where) for row in read] == [
        ({"x": None}, "a.jsonl line 1"),
        *((value, f"x.parquet row {number}") for number, value in enumerate(values)),
    ]
    assert read[-1].read_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_has_the_rows_of_its_lines(tmp_path: Path, indent: int | None) -> None:
    """The array is longer than what is read of it at once, a MiB, and its rows than a block of a file."""
    kinds: list[Any] = [{"messages": [*CHAT], "n": 1}, {"messages": [ANSWER, USER], "n": 22}, {"a": "]},[é"}]
    many = [{**row, "pad": "é" * (number * 37 % 7000)} for number, row in enumerate(kinds * 200)]
    (tmp_path / "a.json").write_text(json.dumps([3, *many], indent=indent, ensure_ascii=False), encoding="utf-8")
    assert (tmp_path / "a.json").stat().st_size > 3 << 20
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, many)))
    bad, *found = rows(tmp_path / "a.json")
    assert (bad.value, bad.problem) == ({}, "the element is a JSON int, not an object with keys")
    assert [(row.value, row.where, row.problem) for row in found] == [
        (row, f"a.json element {index + 1}", "") for index, row in enumerate(many)
    ]
    assert [row.value for row in rows(tmp_path / "lines.json")] == many


def test_an_array_has_the_rows_that_datasets_reads(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    given = [{"conversations": [{"from": "human", "value": f"{n}"}, {"from": "gpt", "value": "ok"}]} for n in range(5)]
    (tmp_path / "a.json").write_text(json.dumps(given))
    theirs = datasets.load_dataset(
        "json", data_files=str(tmp_path / "a.json"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert [row.value for row in rows(tmp_path / "a.json")] == [*theirs]


BAD_ARRAYS = {
    b"[1, 2": "element 2 ",
    b'[{"a": 1} {"a": 2}]': "element 1 .*expected ','",
    b'[{"a": 1},]': "element 1 ",
    b'[{"a": 1}] []': "element 1 .*more after the array",
    b'[{"a": \xff}]': "element 0 ",
    b"[" * 200_000: "element 0 ",
}


@pytest.mark.parametrize("text", BAD_ARRAYS, ids=range(len(BAD_ARRAYS)))
def test_a_damaged_array_is_refused_at_its_element(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(ValueError, match=BAD_ARRAYS[text]):
        rows(tmp_path / "a.json")


def test_json_files_of_a_folder_are_read_by_a_glob(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"n": 1}]')
    with pytest.raises(FileNotFoundError, match=r"its \.json files are read by data\.path='.*/\*\.json'"):
        rows(tmp_path)
    assert len(rows(tmp_path / "*.json")) == 1
    (tmp_path / "b.jsonl").write_text('{"n": 1}')
    assert found(tmp_path) == (tmp_path / "b.jsonl",)


def test_other_and_damaged_files_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for name, says in (("a.txt", "are rows of"), ("a.npy", "are rows of"), ("a.parquet", "no readable .parquet file")):
        (tmp_path / name).write_text("PAR1 Hello PAR1")
        with pytest.raises(ValueError, match=says):
            rows(tmp_path / name)

"""Process that renders chat templates, with a limit on its time and memory.

A chat template is a program that comes with a model. The sandbox of transformers keeps it from the files and from the
network, but not from running forever or taking all memory. So it runs in a process of its own:

    limit      set by                               what becomes of a template over it
    time       RLIMIT_CPU, anew per conversation    the system ends the process; the next conversation gets a new one
    time lost  `MOST_LOST` of these limits in all   refused for all conversations, if it is most of the template's time
    memory     RLIMIT_AS                            MemoryError inside the template
    output     a check of the rendered text         refused

Processor time is counted, not time on the clock, so that a busy machine changes nothing; a template cannot wait.
Requests and replies are JSON over a pair of sockets, one reply for each request:

    TemplateSettings                        once, at the start
    {"template", "messages", "tools", "first"}   ->   {"text", "spans"} or {"error", "syntax"}, and "seconds"
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from dzero.data.assistant_spans import (
    Message,
    Span,
    TemplateError,
    TemplateSyntaxError,
    TemplateTooSlow,
    assistant_spans,
    prompt_length,
)
from dzero.errors import import_optional, in_short

MOST_LOST = 3
"""Multiple of the limit per conversation that slow ones may take together, or half of the template's whole time."""
SLOW = 0.25
"""Part of the limit from which a conversation is slow. With a usual template, one of 700 messages takes that."""
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class TemplateSettings:
    """Chat templates by name, the special tokens that they are given, the text of all special tokens, and limits.

    `characters` also limits what is tokenized at once, which takes about a hundred bytes of memory per character.
    """

    templates: dict[str, str]
    variables: dict[str, Any]
    special: list[str]
    seconds: int = 20
    memory_bytes: int = 4 * 2**30
    characters: int = 16 * 2**20


class TemplateProcess:
    """Process that renders conversations; it is started by the first one, and again if a template ended it."""

    def __init__(self, settings: TemplateSettings) -> None:
        self.settings = settings
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._slow, self._slow_s, self._whole_s = 0, 0.0, 0.0

    def render(
        self, template: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, first: int | None
    ) -> tuple[str, list[Span]]:
        """Return the text of all messages, and the spans of the assistant's turns from message `first` on.

        With `first=None` no spans are searched for.

        Raises:
            TemplateSyntaxError: The text of the template has an error.
            TemplateError: The template fails, takes too long, or does not tell where a turn is.
            TemplateTooSlow: Slow conversations, and those that ended the process, took too much of the time in all.
        """
        began_s = time.monotonic()
        request = {"template": template, "messages": [*messages], "tools": tools and [*tools], "first": first}
        try:
            connection = self._connection or self._start()
            connection.send_bytes(json.dumps(request).encode())
            reply = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise self._ended(time.monotonic() - began_s) from error
        except BaseException:  # an interrupt: the reply that is still to come belongs to no later request
            self.close()
            raise
        self._count(reply["seconds"], is_slow=reply["seconds"] > SLOW * self.settings.seconds)
        if "error" in reply:
            raise (TemplateSyntaxError if reply["syntax"] else TemplateError)(reply["error"])
        return reply["text"], [(start, end) for start, end in reply["spans"]]

    def close(self) -> None:
        """End the process; a later conversation starts a new one."""
        if self._connection is not None and self._process is not None:
            _end(self._connection, self._process)
        self._connection = self._process = None

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
        )
        theirs.close()
        self._connection = ours
        weakref.finalize(self, _end, ours, self._process)
        ours.send_bytes(json.dumps(asdict(self.settings)).encode())
        return ours

    def _ended(self, seconds: float) -> Exception:
        """Return the error for a process that has ended by itself, `seconds` after it was asked."""
        code = self._process.wait() if self._process is not None else 0
        self.close()
        if code >= 0:
            return RuntimeError(f"the process that renders chat templates failed with exit status {code}")
        self._count(min(seconds, self.settings.seconds), is_slow=True)
        if code == -signal.SIGXCPU:
            return TemplateError(
                f"the chat template took more than {self.settings.seconds} s of processor time on one conversation; "
                "shorten the conversation, or correct the template"
            )
        return TemplateError(f"the chat template's process was ended by signal {-code} (out of memory, if it is 9)")

    def _count(self, seconds: float, *, is_slow: bool) -> None:
        """Count the time of a conversation; raise `TemplateTooSlow` if slow ones took too much in all."""
        self._whole_s += seconds
        if not is_slow:
            return
        self._slow, self._slow_s = self._slow + 1, self._slow_s + seconds
        if self._slow_s >= MOST_LOST * self.settings.seconds and self._slow_s > self._whole_s / 2:
            raise TemplateTooSlow(
                f"the chat template took {self._slow_s:.0f} s of its {self._whole_s:.0f} s on {self._slow} slow "
                "conversations; correct the template, or leave such conversations out"
            )


def _end(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.kill()  # there is nothing that it has to finish
    process.wait()


class _Renderer:
    """The chat templates inside the process."""

    def __init__(self, settings: TemplateSettings) -> None:
        self.settings = settings
        self.library = import_optional("transformers.utils.chat_template_utils", "a chat template", "hf")
        self.syntax_error = import_optional("jinja2", "a chat template", "hf").TemplateSyntaxError

    def answer(self, template: str, messages: list[Message], tools: Any, first: int | None) -> dict[str, Any]:
        source = self.settings.templates[template]

        def render(some: Sequence[Message], prompt: bool) -> str:
            return self._render(source, some, tools, prompt=prompt)[0]

        try:
            if first is None:
                return {"text": render(messages, False), "spans": []}
            if not GENERATION_TAG.search(source):
                text, spans = assistant_spans(render, messages, first, self.settings.special)
            else:
                text, spans = self._render(source, messages, tools, tags=True)
                spans = _from_turn(render, messages, first, text, spans)
            return {"text": text, "spans": spans}
        except TemplateError as error:
            return {"error": str(error), "syntax": isinstance(error, TemplateSyntaxError)}

    def _render(
        self, source: str, messages: Sequence[Message], tools: Any, *, prompt: bool = False, tags: bool = False
    ) -> tuple[str, list[Span]]:
        try:
            texts, spans = self.library.render_jinja_template(
                conversations=[[*messages]],
                tools=tools,
                chat_template=source,
                return_assistant_tokens_mask=tags,
                add_generation_prompt=prompt,
                **self.settings.variables,
            )
        except self.syntax_error as error:
            raise TemplateSyntaxError(f"line {error.lineno} of the chat template: {in_short(error)}") from error
        except Exception as error:  # a template is a program: it may raise anything
            raise TemplateError(f"the chat template fails: {in_short(error)}") from error
        if len(texts[0]) > self.settings.characters:
            raise TemplateError(f"the chat template writes more than {self.settings.characters} characters")
        return texts[0], spans[0] if tags else []


def _from_turn(render: Any, messages: list[Message], first: int, text: str, spans: list[Span]) -> list[Span]:
    """Return those of the template's own spans that belong to the assistant's turns from message `first` on."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if first <= turns[0]:
        return spans
    start = prompt_length(render, messages, next(turn for turn in turns if turn >= first), text)
    if start is None:
        left = sum(turn < first for turn in turns)
        if len(spans) != len(turns):
            raise TemplateError(
                f"the chat template has {len(spans)} generated spans for {len(turns)} turns of the assistant, so the "
                "completion cannot be told apart; use loss_on=assistant or loss_on=all"
            )
        return spans[left:]
    return [span for span in spans if span[1] > start]


def main() -> None:
    """Answer requests on the socket whose number is the only argument, until its other end is closed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    connection = Connection(int(sys.argv[1]))
    try:
        settings = TemplateSettings(**json.loads(connection.recv_bytes()))
        renderer = _Renderer(settings)
        _limit(resource.RLIMIT_AS, _mapped_bytes() + settings.memory_bytes)
        while True:
            request = connection.recv_bytes()
            _limit(resource.RLIMIT_CPU, int(time.process_time()) + settings.seconds + 1)
            connection.send_bytes(_reply(renderer, request))
    except (EOFError, ConnectionError):
        return


def _reply(renderer: _Renderer, request: bytes) -> bytes:
    began_s = time.process_time()

    def timed(answer: dict[str, Any]) -> bytes:
        return json.dumps(answer | {"seconds": time.process_time() - began_s}).encode()

    try:
        return timed(renderer.answer(**json.loads(request)))
    except (MemoryError, RecursionError) as error:
        return timed({"error": f"the conversation is too large: {in_short(error)}", "syntax": False})


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _mapped_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()


if __name__ == "__main__":
    main()

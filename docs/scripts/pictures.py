"""Make the pages' pictures from the pages' own commands.

    python docs/scripts/pictures.py                       all of them
    python docs/scripts/pictures.py plan help             those that are named

    picture            made by                                              needs
    plan.png           the command of guides/plan.md                        matplotlib
    help.png           `dzero --help`, as a terminal shows it               chromium
    run.txt            the first command of README.md                       (a minute on two idle cores)
    tensorboard.png    TensorBoard on that run                              chromium
    finetune.png       TensorBoard on the run of tutorials/finetune.md      chromium

A browser is used without network but for TensorBoard on this machine. tests/plan/test_plan.py fails where plan.png
does not show what its command plans.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NO_BROWSER = f"this picture needs one of {', '.join(BROWSERS)} (Debian: apt-get install chromium)"
COLUMNS = 100
"""Of the terminal that is drawn."""
CHARTS = "loss|memory/(activations|moments)|optim/(grad_norm|lr)"
SETTINGS = {"timeSeriesSettingsPaneOpened": False, "stepSelectorEnabled": False, "scalarSmoothing": 0}
STORE = f"localStorage.setItem('_tb_global_settings', '{json.dumps(SETTINGS)}')"
DRAWN_S, LATE = 25, "/late"
CLOSED = f"<script>{STORE}</script><img src='{LATE}' style='display:none'>"
"""The picture is taken when all of the page has come, so something comes when charts were drawn."""


def command_of(has: str, readme: str | None = None) -> list[str]:
    """Return the words of the first command that contains `has`, in the README or a page; `&&` begins another command.

    Raises LookupError where there is none.
    """
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text() for page in pages) if readme is None else readme
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in [] if language else block.replace("\\\n", " ").splitlines():
            for command in line.partition("  #")[0].split("&&"):
                if has in command:
                    return shlex.split(command)
    raise LookupError(f"no command in README.md or docs/ contains {has!r}")


def run(words: Sequence[str], folder: Path) -> str:
    """Return what a command of a page writes, with this checkout's dzero. Raises CalledProcessError."""
    program = {"python": [sys.executable], "dzero": [sys.executable, "-m", "dzero"]}.get(words[0], [words[0]])
    line = [*program, *(str(ROOT / word) if word == "train.py" else word for word in words[1:])]
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS)}
    return subprocess.run(line, cwd=folder, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def plan() -> None:
    """Draw what `## Plan` plans."""
    words = command_of("--picture plan.png")
    run([str(FOLDER / word) if word == "plan.png" else word for word in words], ROOT)


def help_() -> None:
    """Draw the tool's own help."""
    terminal_picture("dzero --help", run(["dzero", "--help"], ROOT), FOLDER / "help.png")


def run_and_board() -> None:
    """Train as the README does; keep what it writes, and TensorBoard's page."""
    words = command_of("train.py zero.stage=3")
    with tempfile.TemporaryDirectory() as folder:
        written = run(words, Path(folder))
        told = f"$ {shlex.join(words)}     # two CPU cores; paths shortened\n{without_paths(written)}"
        (FOLDER / "run.txt").write_text(told)
        board(Path(folder) / "outputs", FOLDER / "tensorboard.png")


def finetune() -> None:
    """Fine-tune as the tutorial does; keep TensorBoard's page."""
    with tempfile.TemporaryDirectory() as folder:
        for has in ("make_model.py my-model", "optim.lr=2e-3"):
            words = [str(ROOT / word) if word.startswith("examples/") else word for word in command_of(has)]
            words = [word.replace("=examples/", f"={ROOT}/examples/") for word in words]
            run(words, Path(folder))
        board(Path(folder) / "outputs", FOLDER / "finetune.png")


def without_paths(written: str) -> str:
    """Put the usual place of Python's library for this machine's."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return written.replace(sysconfig.get_paths()["stdlib"], f"/usr/lib/{version}")


def board(logs: Path, path: Path) -> None:
    """Picture six of TensorBoard's charts of the runs under `logs`."""
    with tensorboard(logs) as address, without_settings(address) as plain:
        screenshot(f"{plain}?tagFilter={quote(CHARTS)}#timeseries", path, 1500, 850)


@contextmanager
def tensorboard(logs: Path) -> Iterator[str]:
    """Serve `logs` on this machine alone; yields the address."""
    line = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        assert server.stderr is not None
        try:
            found = next(filter(None, (re.search(r"http://127\.0\.0\.1:\d+/", told) for told in server.stderr)), None)
            if found is None:
                raise RuntimeError("TensorBoard ended before it said where it listens")
            yield found[0]
        finally:
            server.terminate()


@contextmanager
def without_settings(address: str) -> Iterator[str]:
    """Pass TensorBoard on with its pane of settings closed, which only its page's own storage can say."""

    class Passing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == LATE:
                time.sleep(DRAWN_S)
                self.send_error(404)
            else:
                self.pass_on(None)

        def do_POST(self) -> None:
            self.pass_on(self.rfile.read(int(self.headers["Content-Length"])))

        def pass_on(self, body: bytes | None) -> None:
            kind = {"Content-Type": self.headers["Content-Type"]} if body else {}
            try:
                with urlopen(Request(address + self.path.lstrip("/"), body, kind)) as answer:
                    status, said, headers = answer.status, answer.read(), answer.headers
            except HTTPError as error:
                status, said, headers = error.code, error.read(), error.headers
            if headers.get_content_type() == "text/html":
                headers.replace_header("Content-Type", "text/html")
                said = CLOSED.encode() + said
            self.send_response(status)
            self.send_header("Content-Type", headers["Content-Type"])
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing of every request."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Passing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def terminal_picture(title: str, written: str, path: Path) -> None:
    """Draw what a command wrote, as a terminal of `COLUMNS` columns shows it."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(written.rstrip("\n")))
        svg = console.export_svg(title=html.escape(title))
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None, "rich says how large its drawing is"
    width, height = (int(float(size)) + 1 for size in found.groups())
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f"<html><body style='margin:0'>{svg}</body></html>")
        screenshot(page.as_uri(), path, width, height)


def screenshot(address: str, path: Path, width: int, height: int) -> None:
    """Picture a page. Raises RuntimeError without a browser, and where it makes no picture."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise RuntimeError(f"{path.name}: {NO_BROWSER}")
    with tempfile.TemporaryDirectory() as profile:
        line = [browser, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        line += ["--no-sandbox"] if os.geteuid() == 0 else []
        line += [f"--window-size={width},{height}"]
        made = Path(profile) / "picture.png"
        ended = subprocess.run([*line, f"--screenshot={made}", address], capture_output=True, text=True, timeout=300)
        if not made.exists():
            raise RuntimeError(f"{path.name}: {browser} made no picture: {ended.stderr.strip()[-500:]}")
        shutil.copyfile(made, path)


PICTURES: dict[str, Callable[[], None]] = {"plan": plan, "help": help_, "run": run_and_board, "finetune": finetune}


def main() -> None:
    """Make the pictures that are asked for."""
    parser = argparse.ArgumentParser(description="Make the README's pictures from its own commands.")
    parser.add_argument("pictures", nargs="*", metavar="PICTURE", help=f"of {', '.join(PICTURES)}; default: all")
    names = parser.parse_args().pictures or [*PICTURES]
    if unknown := [name for name in names if name not in PICTURES]:
        parser.error(f"{unknown[0]}: choose of {', '.join(PICTURES)}")
    for name in names:
        try:
            PICTURES[name]()
        except (LookupError, RuntimeError, subprocess.CalledProcessError) as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

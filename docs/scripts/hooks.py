"""What mkdocs does beside its own work: the tables, pictures and the log of benchmarks/ are pages below results/.

Pages link to files of the repository, as it is read without the site. Links to files in benchmarks/ become links to
their pages; a link to any other file outside of docs/ becomes plain text.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
DOCS, BENCHMARKS = ROOT / "docs", ROOT / "benchmarks"
SHOWN = (".md", ".png")
LINK = re.compile(r"```.*?```|`[^`\n]*`|\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)", re.DOTALL)
"""A link to a file; or code, in which there are none."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures of benchmarks/ to the site."""
    for path in [*BENCHMARKS.glob("*.md"), *BENCHMARKS.glob("results/*")]:
        if path.suffix in SHOWN:
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Turn links to files of the repository into links to pages of the site, and keep figures out of its search."""
    at = PurePosixPath(page.file.src_uri)
    if at.parts[0] == "results":
        page.meta["search"] = {"exclude": True}

    def turned(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if target is None:
            return link[0]
        path = (Path(page.file.abs_src_path).parent / target).resolve()
        if path.is_relative_to(BENCHMARKS) and path.suffix in SHOWN:
            there = PurePosixPath("results") / path.name
        elif path.is_relative_to(DOCS):
            there = PurePosixPath(path.relative_to(DOCS).as_posix())
        else:
            return text
        return f"[{text}]({'../' * (len(at.parts) - 1)}{there}{anchor})"

    return LINK.sub(turned, markdown)

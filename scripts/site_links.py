"""A hook of MkDocs: what pages link to outside of docs/ (code, results, tests) comes with the site, as text.

The repository has no address that a page could name, and the site is read without a network.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\]\(((?:\.\./)+[\w./-]+?)(#[\w-]+)?\)")


def _outside(page: str, link: str) -> str | None:
    """The path from the root of the repository, or None where the link stays in docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") else path


def _text(path: Path) -> str:
    if path.is_dir():
        return "".join(f"{each.name}\n" for each in sorted(path.iterdir()))
    return path.read_text()


def on_files(files: Files, config: Any) -> Files:
    """Adds the files that are linked to."""
    added = set()
    for page in files.documentation_pages():
        for link, _ in OUTSIDE.findall(page.content_string):
            path = _outside(page.src_uri, link)
            if path is not None and path not in added:
                added.add(path)
                files.append(File.generated(config, f"source/{path}.txt", content=_text(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Leads the links there."""

    def led(found: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, found[1])
        if path is None:
            return found[0]
        back = "../" * page.file.src_uri.count("/")
        return f"]({back}source/{path}.txt)"

    return OUTSIDE.sub(led, markdown)

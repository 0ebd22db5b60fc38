"""Promise: the site of docs/ has every page and every public name, its links lead somewhere, the README stays short.

Read as text: MkDocs, which the workflow runs with warnings as errors (scripts/docs.sh), is not needed here.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import shardopt
from shardopt import rules
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
ENTRIES = [entry for text in PAGES.values() for entry in re.findall(r"^::: (shardopt[\w.]*)$", text, re.MULTILINE)]


def navigation() -> list[str]:
    nav = re.search(r"^nav:\n((?: .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert nav is not None
    return re.findall(r": ([\w/-]+\.md)$", nav[1], re.MULTILINE)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(navigation()) == sorted(PAGES)


def resolved(entry: str) -> Any:
    """What a name stands for, as an import finds it."""
    names = entry.split(".")
    for cut in range(len(names), 0, -1):
        try:
            found: Any = import_module(".".join(names[:cut]))
        except ModuleNotFoundError:
            continue
        for name in names[cut:]:
            found = getattr(found, name)
        return found
    raise AssertionError(f"{entry} cannot be imported")


def test_every_public_name_has_an_entry_in_the_reference() -> None:
    wanted = {f"shardopt.{name}" for name in shardopt.__all__}
    wanted |= {f"shardopt.rules.{name}" for name in rules.__all__ if name not in ("rule", "Variant")}
    assert wanted <= set(ENTRIES), wanted - set(ENTRIES)
    assert len(ENTRIES) == len(set(ENTRIES))


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_shows_something(entry: str) -> None:
    """It exists; what has no docstring, the site leaves out."""
    found = resolved(entry)
    if entry == "shardopt.rules.Value":
        return  # a protocol of operators
    assert found.__doc__, entry
    if isinstance(found, type) and found.__module__.startswith("shardopt"):
        silent = [
            name
            for name, each in vars(found).items()
            if not name.startswith("_") and (isinstance(each, property) or callable(each))
            if not any(getattr(getattr(base, name, None), "__doc__", None) for base in found.__mro__)
        ]
        assert not silent, f"{entry}: {silent}"


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_into_a_page_find_their_heading() -> None:
    found = 0
    for page in (ROOT / "README.md", *(DOCS / name for name in PAGES)):
        for link, anchor in re.findall(r"\]\(([^)#:\s]*)#([\w-]+)\)", page.read_text()):
            to = page if not link else Path(page.parent, link)
            assert anchor in anchors(to.read_text()), f"{page.name}: {link}#{anchor}"
            found += 1
    assert found >= 10


def test_lists_are_lists_on_the_site_too() -> None:
    """Its Markdown takes a list that follows a paragraph's line for more of the paragraph."""
    for name, text in PAGES.items():
        plain = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
        found = re.search(r"^(?![-*|#>\s]|\d+\. ).+\n(?:[*-] |1\. ).*", plain, re.MULTILINE)
        assert found is None, f"{name}: an empty line is missing before {found[0] if found else ''!r}"


def test_pictures_stand_on_a_page_and_are_there() -> None:
    drawn = {path.name for path in (DOCS / "pictures").glob("*.svg")}
    shown = {name for text in PAGES.values() for name in re.findall(r"!\[[^\]]+\]\(pictures/([\w.-]+)\)", text)}
    assert drawn == shown


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130 and len(text.split()) <= 1500


def test_the_workflow_builds_the_site() -> None:
    assert "- run: bash scripts/docs.sh\n" in (ROOT / ".github" / "workflows" / "tests.yml").read_text()

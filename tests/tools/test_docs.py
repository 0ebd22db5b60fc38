"""Every block of Python in the README and under docs/ runs as it stands there; what they quote and link to is there."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.scripts import run_script

PAGES = sorted((ROOT / "docs").rglob("*.md"))
KERNELS = ROOT / "docs" / "kernels.md"
BLOCKS = [
    pytest.param(page, block, id=f"{page.stem}-{number}")
    for page in (ROOT / "README.md", *PAGES)
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    if page != KERNELS or "import" in block  # it shows a piece of a file of ours too, which test_public.py runs
]


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_the_code_of_a_page_runs(page: Path, block: str, tmp_path: Path) -> None:
    """The README's without a warning; a framework may warn."""
    needs = [name for name in ("transformers", "accelerate", "lightning") if re.search(rf"^from {name}\b", block, re.M)]
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs the extra 'frameworks' ({missing[0]}): pip install .[frameworks]")
    script = tmp_path / "block.py"  # a rule is read from its file
    script.write_text(block)
    done = run_script(script, cwd=tmp_path, warn=page not in PAGES, frameworks=bool(needs))
    assert done.returncode == 0, done.stderr


def strings_of(path: Path) -> Iterator[str]:
    """Every text in a file's code; what an f-string fills in is a blank that no page quotes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "\0" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


MESSAGES = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


def test_messages_that_a_page_explains_are_those_of_the_code() -> None:
    texts = [text for path in (ROOT / "shardopt").rglob("*.py") for text in strings_of(path)]
    quoted = {message: re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL) for message in MESSAGES}
    assert len(quoted) > 25
    lost = [message for message, pattern in quoted.items() if not any(map(pattern.search, texts))]
    assert not lost, f"no code says so any more: {lost}"


def test_links_between_pages_lead_somewhere() -> None:
    found = 0
    for page in (*PAGES, ROOT / "README.md"):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"
            found += not link.startswith("https://")
    assert found >= 30


def test_pages_are_there_and_found() -> None:
    """From the README; the reference has a first page, and tests/house/test_site.py compares what lies behind it."""
    names = {page.name for page in PAGES if page.parent.name == "docs"} | {"api/index.md"}
    linked = set(re.findall(r"\(docs/([\w/-]+\.md)(?:#[\w-]+)?\)", (ROOT / "README.md").read_text()))
    assert names == linked and len(BLOCKS) >= 6

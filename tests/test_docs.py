"""Every block of Python in the pages under docs/ runs as it stands there."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_of_a_page_runs(block: str, tmp_path: Path) -> None:
    needs = [name for name in ("transformers", "accelerate", "lightning") if re.search(rf"^from {name}\b", block, re.M)]
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs the extra 'frameworks' ({missing[0]}): pip install .[frameworks]")
    script = tmp_path / "block.py"
    script.write_text(block)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_pages_are_there_and_found() -> None:
    names = {page.name for page in PAGES}
    linked = set(re.findall(r"\(docs/(\w+\.md)\)", (ROOT / "README.md").read_text()))
    assert names == linked and len(BLOCKS) >= 6

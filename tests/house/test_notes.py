"""Promise: a note that code refers to by its title exists, once."""

import re
from collections import Counter

from tests.support.paths import ROOT

# ``[Note: Title]`` at the beginning of a line begins a note; "See [Note: Title]" refers to one.
NOTE = re.compile(r"\[Note: ([^\]\n]+)\]")


def test_no_title_dangles() -> None:
    begun: Counter[str] = Counter()
    referred: dict[str, str] = {}
    for path in sorted((ROOT / "shardopt").rglob("*.py")):
        for line in path.read_text().splitlines():
            for title in NOTE.findall(line):
                if line.strip().lstrip("# ").startswith(f"[Note: {title}]"):
                    begun[title] += 1
                else:
                    referred[title] = f"{path.name}: {line.strip()}"
    assert begun and referred  # there are some, and NOTE finds them
    assert {title: where for title, where in referred.items() if title not in begun} == {}
    assert [title for title, count in begun.items() if count > 1] == []

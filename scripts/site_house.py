"""A hook of MkDocs: draws the house of docs/house.md, whose Mermaid only sites with a network can show.

A box for each room, a row for each floor; an arrow from a room to what it imports, wider for more imports.
"""

import math
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # MkDocs loads a hook by its path
from house import FLOORS

PICTURE = re.compile(r"^```mermaid\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
ARROW = re.compile(r"(\w+) -->\|(\d+)\| (\w+)")
WIDTH, ROW, BOX, HEIGHT = 880, 76, 118, 34
# Where rooms that have a floor to themselves stand: side by side, so that arrows pass beside them.
STEPS = (440, 190, 690, 320, 560, 130, 750, 590, 300)


def places(shown: set[str]) -> dict[str, tuple[float, float]]:
    """The middle of each room's box."""
    found = {}
    floors = [rooms for floor in FLOORS if (rooms := [each for each in floor if each in shown])]
    for row, rooms in enumerate(floors):
        for index, room in enumerate(rooms):
            alone = STEPS[row % len(STEPS)]
            x = alone if len(rooms) == 1 else WIDTH * (2 * index + 1) / (2 * len(rooms))
            found[room] = (x, ROW * row + HEIGHT)
    return found


def drawn(mermaid: str) -> str:
    arrows = [(one, other, int(count)) for one, count, other in ARROW.findall(mermaid)]
    at = places({room for one, other, _ in arrows for room in (one, other)})
    height = max(y for _, y in at.values()) + HEIGHT
    lines = [
        f'<div class="house"><svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="Which folder imports which">'
    ]
    for one, other, count in arrows:
        (x, y), (to_x, to_y) = at[one], at[other]
        y, to_y = y + HEIGHT / 2, to_y - HEIGHT / 2 - 5
        bend = (to_y - y) / 2
        path = f"M{x:g} {y:g}C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y:g}l-4 -7h8l-4 7"
        title = f"<title>{one} imports from {other} {count} times</title>"
        lines.append(f'<path d="{path}" stroke-width="{1 + math.log2(count) / 2:.1f}">{title}</path>')
    for room, (x, y) in at.items():
        lines.append(f'<rect x="{x - BOX / 2:g}" y="{y - HEIGHT / 2:g}" width="{BOX}" height="{HEIGHT}" rx="6"/>')
        lines.append(f'<text x="{x:g}" y="{y + 5:g}">{room}</text>')
    return "".join([*lines, "</svg></div>\n"])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return PICTURE.sub(lambda found: drawn(found[1]), markdown)

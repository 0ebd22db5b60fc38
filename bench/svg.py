"""The little of SVG that the pictures need: text, boxes and lines on a panel, legible on light and dark pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# Class -> colour on a light page, on a dark one. The panel is opaque: a reader whose system and page disagree reads it
# all the same.
COLOURS = {
    "panel": ("#f6f8fa", "#161b22"),
    "ink": ("#1f2328", "#e6edf3"),
    "quiet": ("#59636e", "#9198a1"),
    "other": ("#8c959f", "#6e7681"),
    "ours": ("#0f766e", "#2dd4bf"),
    "param": ("#2563eb", "#60a5fa"),
    "gradient": ("#d97706", "#fbbf24"),
    "state": ("#0f766e", "#2dd4bf"),
    "compute": ("#64748b", "#94a3b8"),
    "reduce": ("#d97706", "#fbbf24"),
    "gather": ("#2563eb", "#60a5fa"),
    "update": ("#0f766e", "#2dd4bf"),
    "absent": ("#d0d7de", "#30363d"),
}
# Likewise of lines, and of the words that name them.
LINES = {
    "line-1": ("#59636e", "#9198a1"),
    "line-2": ("#0f766e", "#2dd4bf"),
    "line-3": ("#2563eb", "#60a5fa"),
    "line-4": ("#b45309", "#fbbf24"),
    "line-5": ("#9333ea", "#c084fc"),
}


def _style(has_lines: bool) -> str:
    def rules(theme: int) -> str:
        found = [f".{name}{{fill:{colours[theme]}}}" for name, colours in COLOURS.items()]
        for name, colours in LINES.items() if has_lines else ():
            found.append(f"polyline.{name}{{fill:none;stroke:{colours[theme]}}}text.{name}{{fill:{colours[theme]}}}")
        return "".join(found)

    return f"text{{font-family:{FONT}}}{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}"


@dataclass
class Picture:
    """An SVG of a width and height in pixels; what is drawn later lies above."""

    width: int
    height: int
    title: str
    body: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        kind: str = "ink",
        size: int = 14,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' * bold
        self.body.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str, words: str = "") -> None:
        """With what it shows when the pointer rests on it."""
        told = f"<title>{escape(words)}</title>" * bool(words)
        self.body.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3">{told}</rect>'
        )

    def line(self, points: Sequence[tuple[float, float]], kind: str, words: str) -> None:
        """Through these points, one of LINES, with what it shows when the pointer rests on it."""
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        told = f"<title>{escape(words)}</title>"
        self.body.append(f'<polyline class="{kind}" stroke-width="2" points="{drawn}">{told}</polyline>')

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" aria-label="{escape(self.title)}">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{_style(any(each.startswith('<polyline') for each in self.body))}</style>",
                f'<rect class="panel" width="{self.width}" height="{self.height}" rx="8"/>',
                *self.body,
                "</svg>",
                "",
            ]
        )

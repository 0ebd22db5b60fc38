"""An extension of Griffe: docstrings, which are written for help() and editors, as Markdown for the site.

Formulas become MathML, which browsers show without a script; roles such as :class: become code; ``::`` becomes ``:``.
"""

import re
import textwrap
from typing import Any

import griffe
from latex2mathml.converter import convert

MATH = re.compile(r"^( *)\.\. math::\n((?:\1    .*\n|\n)+)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):`~?\.*([^`]+)`")


def _formula(found: re.Match[str]) -> str:
    """Lines of an ``aligned`` block; one formula each."""
    lines = re.split(r"\\\\\n", textwrap.dedent(found[2]).strip() + "\n")
    shown = [convert(" ".join(line.replace("&", "").split()), display="block") for line in lines if line.strip()]
    return textwrap.indent("\n" + "\n\n".join(f"<div>{each}</div>" for each in shown) + "\n\n", found[1])


def as_markdown(text: str) -> str:
    text = MATH.sub(_formula, text + "\n")
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)  # a title that Griffe takes for code
    text = INLINE.sub(lambda found: convert(found[1]), text)
    text = ROLE.sub(lambda found: f"`{found[1].removeprefix('shardopt.')}`", text)
    return re.sub(r"^\s*::$", "", re.sub(r"(?<=\S)::$", ":", text, flags=re.MULTILINE), flags=re.MULTILINE)


class AsMarkdown(griffe.Extension):  # type: ignore[misc]
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

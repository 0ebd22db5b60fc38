"""Tables as text."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows as lines: the first column is aligned to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        ).rstrip()
        for first, *others in rows
    )

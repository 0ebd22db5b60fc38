"""What no measurement is needed for: who holds what at each stage, and what a step does when."""

from svg import Picture

RANKS = 4
KINDS = (("param", "params"), ("gradient", "gradients"), ("state", "masters, states"))
# Stage -> how many of the kinds, from the last on, are cut in slices.
STAGES = (("stage=0", "as under DDP", 0), ("stage=1", "params only", 1), ("stage=2", "", 2), ("stage=3", "", 3))


def who_holds_what() -> Picture:
    """A row a stage, a box a rank; in it a bar a kind, of which this rank's slice is filled."""
    picture = Picture(560, 452, "Who holds what: params, gradients, masters and states of four ranks at each stage")
    for rank in range(RANKS):
        picture.text(176 + 108 * rank, 30, f"rank {rank}", "quiet", 13, "middle")
    for row, (name, quiet, cut) in enumerate(STAGES):
        top = 44 + 92 * row
        picture.text(20, top + 44, name, bold=True)
        picture.text(20, top + 62, quiet, "quiet", 13)
        for rank in range(RANKS):
            left = 128 + 108 * rank
            for line, (kind, words) in enumerate(KINDS):
                y = top + 8 + 24 * line
                is_cut = line >= len(KINDS) - cut
                picture.box(left, y, 96, 16, "absent" if is_cut else kind, f"{words}: {'1/4' if is_cut else 'all'}")
                if is_cut:
                    picture.box(left + 24 * rank, y, 24, 16, kind, f"{words}: slice {rank} of 4")
    for place, (kind, words) in enumerate(KINDS):
        picture.box(128 + 130 * place, 420, 16, 16, kind)
        picture.text(150 + 130 * place, 433, words, "quiet", 13)
    return picture


# Engine -> lanes of (name, [(kind, begin, length, words)]), in parts of a forward.
LANES: tuple[tuple[str, tuple[tuple[str, tuple[tuple[str, float, float, str], ...]], ...]], ...] = (
    (
        "DDP",
        (
            (
                "compute",
                (
                    ("compute", 0, 4, "forward"),
                    ("compute", 4, 8, "backward"),
                    ("update", 14, 4, "update all"),
                ),
            ),
            ("traffic", (("reduce", 6, 8, "all-reduce: 2 units"),)),
        ),
    ),
    (
        "stage=2",
        (
            ("compute", (("compute", 0, 4, "forward"), ("compute", 4, 8, "backward"), ("update", 12, 1.4, "1/N"))),
            ("traffic", (("reduce", 6, 6.4, "reduce-scatter: 1"), ("gather", 13, 4, "all-gather: 1"))),
        ),
    ),
    (
        "stage=3",
        (
            (
                "compute",
                (("compute", 0.6, 4.4, "forward"), ("compute", 5, 8.4, "backward"), ("update", 14.2, 1.4, "1/N")),
            ),
            (
                "traffic",
                (
                    ("gather", 0, 4, "all-gather: 1"),
                    ("gather", 4.6, 4.4, "again: up to 1"),
                    ("reduce", 9.2, 5, "reduce-scatter: 1"),
                ),
            ),
        ),
    ),
)


def timeline() -> Picture:
    """Not to scale: what overlaps what."""
    picture = Picture(
        760, 348, "A step in time: what is computed and what travels under DDP, at stage 2 and at stage 3"
    )
    scale = 24.0
    for row, (name, lanes) in enumerate(LANES):
        top = 20 + 92 * row
        picture.text(20, top + 38, name, bold=True)
        for line, (_, events) in enumerate(lanes):
            for kind, begin, length, words in events:
                left, width = 96 + scale * begin, scale * length - 2
                picture.box(left, top + 32 * line, width, 28, "panel")
                picture.box(left, top + 32 * line, 4, 28, kind)
                picture.box(left, top + 32 * line + 24, width, 4, kind, words)
                picture.text(left + 9, top + 32 * line + 16, words, "ink", 12)
    for place, (kind, words) in enumerate(
        (("compute", "compute"), ("reduce", "gradients travel"), ("gather", "params travel"), ("update", "update"))
    ):
        picture.box(96 + 165 * (place % 2), 290 + 24 * (place // 2), 16, 16, kind)
        picture.text(120 + 165 * (place % 2), 303 + 24 * (place // 2), words, "quiet", 13)
    picture.text(20, 358, "Not to scale. A unit is (N-1)/N of the params, sent by each rank.", "quiet", 13)
    return picture

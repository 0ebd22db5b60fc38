"""Draw the pictures of the README and the pages: measured ones from committed results; nothing is measured.

python bench/pictures.py            write docs/pictures/*.svg
python bench/pictures.py --check    exit code 1 if that would change one (a test asks)
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from diagrams import timeline, who_holds_what
from readme import ROOT, newest
from svg import LINES, Picture

FOLDER = ROOT / "docs" / "pictures"
# Engine of bench/train.py -> its name in a picture.
NAMES = {
    "ddp": "DDP + torch AdamW",
    "fsdp2": "FSDP2 + torch AdamW",
    "deepspeed-1": "DeepSpeed stage 1",
    "deepspeed-2": "DeepSpeed stage 2",
    "deepspeed-3": "DeepSpeed stage 3",
    "module-1": "shardopt stage=1",
    "module-2": "shardopt stage=2",
    "module-3": "shardopt stage=3",
}


def bars(title: str, note: str, values: dict[str, float], words: Callable[[float], str]) -> Picture:
    """A bar for each engine, from zero."""
    picture = Picture(560, 112 + 30 * len(values), title)
    picture.text(20, 30, title, size=15, bold=True)
    scale = 270 / max(values.values())
    for row, (engine, value) in enumerate(values.items()):
        y, kind = 50 + 30 * row, "ours" if engine.startswith("module") else "other"
        picture.text(20, y + 16, NAMES[engine], bold=kind == "ours")
        picture.box(220, y, scale * value, 22, kind, f"{NAMES[engine]}: {words(value)}")
        picture.text(228 + scale * value, y + 16, words(value))
    for line, words in enumerate(note.splitlines()):
        picture.text(20, picture.height - 34 + 18 * line, words, "quiet", 13)
    return picture


def _note(result: dict[str, Any]) -> str:
    settings, machine, packages = result["settings"], result["machine"], result["results"]["packages"]
    return (
        f"GPT of {result['results']['params'] / 1e6:.1f}M params, {settings['dtype']}, {settings['ranks']} gloo ranks, "
        f"{machine['device']}.\ntorch {machine['torch']}, DeepSpeed {packages['deepspeed']}."
    )


def measured(value: Callable[[dict[str, Any]], float]) -> dict[str, float]:
    """A value of every engine of the pictures, all of one run."""
    engines = newest("peers-fp32")["results"]["engines"]
    return {name: value(engines[name]) for name in NAMES}


def bytes_a_param() -> Picture:
    title = "Peak memory of a rank, bytes a param (less is better)"
    values = measured(lambda engine: engine["peak bytes a param"])
    return bars(title, _note(newest("peers-fp32")), values, lambda value: f"{value:.1f}")


def step_time() -> Picture:
    title = "Time of a training step, times DDP's (less is better)"
    values = measured(lambda engine: engine["step x DDP"]["median"])
    return bars(title, _note(newest("peers-fp32")), values, lambda value: f"{value:.2f}x")


Points = Sequence[tuple[float, float]]


def panel(picture: Picture, left: int, title: str, ends: tuple[float, float], curves: dict[str, Points]) -> None:
    """Curves over an axis from 0 to the largest x, between these losses; what is above them is left out."""
    top, bottom, width, (low, high) = 90, 300, 330, ends
    most = max(x for points in curves.values() for x, _ in points)
    picture.text(left, 72, title, bold=True)
    for tick in range(math.ceil(10 * low), math.floor(10 * high) + 1, 2):
        y = bottom - (tick / 10 - low) / (high - low) * (bottom - top)
        picture.box(left, y, width, 1, "absent")
        picture.text(left - 6, y + 4, f"{tick / 10:.1f}", "quiet", 12, "end")
    for part in range(5):
        x = left + part / 4 * width
        picture.text(x, bottom + 18, f"{most * part / 4:.3g}", "quiet", 12, "middle")
    for kind, (name, points) in zip(LINES, curves.items(), strict=False):
        shown = [(x, y) for x, y in points if y <= high]
        placed = [(left + x / most * width, bottom - (y - low) / (high - low) * (bottom - top)) for x, y in shown]
        picture.line(placed, kind, f"{name}: {points[-1][1]:.3f}")


def loss_curves() -> Picture:
    """Training loss of each optimizer at its best rate, over steps and over the time that they take."""
    result = newest("curves")
    found, settings = result["results"], result["settings"]
    points, times = found["points"], found["times"]
    over_steps = {row["optimizer"]: list(zip(points, row["losses"], strict=True)) for row in found["rows"]}
    base = times["AdamW"]["step s"]["median"]
    seconds = {name: base * times[name]["step x AdamW"]["median"] for name in over_steps}
    over_time = {name: [(seconds[name] * x, y) for x, y in curve] for name, curve in over_steps.items()}
    picture = Picture(790, 380, "Loss of a small GPT over steps and over time, by optimizer")
    picture.text(20, 30, "Loss, nats a byte (less is better)", size=15, bold=True)
    for number, (kind, name) in enumerate(zip(LINES, over_steps, strict=False)):
        picture.text(360 + 88 * number, 30, name, kind, bold=True)
    ends = min(row["losses"][-1] for row in found["rows"]) - 0.05, max(row["losses"][4] for row in found["rows"])
    panel(picture, 50, "over steps", ends, over_steps)
    panel(picture, 435, "over seconds", ends, over_time)
    note = (
        f"GPT of {times['params']:,} params, {settings['batch']} x {settings['context']} bytes a step, "
        f"{settings['seeds']} seeds, each at the best of {settings['rates']} rates."
    )
    picture.text(20, 346, note, "quiet", 13)
    picture.text(20, 364, f"One thread of {result['machine']['device']}, shared with others.", "quiet", 13)
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "bytes": bytes_a_param,
    "step": step_time,
    "who-holds-what": who_holds_what,
    "timeline": timeline,
    "curves": loss_curves,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a picture is out of date")
    check = parser.parse_args().check
    stale = []
    for name, draw in PICTURES.items():
        path, svg = FOLDER / f"{name}.svg", draw().svg()
        if not path.exists() or path.read_text() != svg:
            stale.append(path.name)
            if not check:
                path.write_text(svg)
    if stale and check:
        print(f"out of date: {', '.join(stale)}. Run: python bench/pictures.py", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

"""Draw the pictures of the README and the pages: measured ones from committed results; nothing is measured.

python bench/pictures.py            write docs/pictures/*.svg
python bench/pictures.py --check    exit code 1 if that would change one (a test asks)
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from diagrams import timeline, who_holds_what
from readme import ROOT, newest
from svg import Picture

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
        f"{machine['device']}.\ntorch {machine['torch']}, DeepSpeed {packages['deepspeed']}. "
        "No GPU has been measured yet."
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


PICTURES: dict[str, Callable[[], Picture]] = {
    "bytes": bytes_a_param,
    "step": step_time,
    "who-holds-what": who_holds_what,
    "timeline": timeline,
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

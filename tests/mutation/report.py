"""Branch coverage by folder and file, of what was recorded last. A file below the limit needs a reason in the table."""

import argparse
import json
import sys
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

from coverage import Coverage

from tests.mutation.covering import DATA, FOLDER, MAP, digest_of
from tests.support.paths import ROOT

LIMIT = 90.0  # percent of lines and branches together, as coverage.py counts them

# What is written as Python, and runs as machine code that no tracer sees: rules, and kernels that Numba compiles.
_NOT_PYTHON = [r"^@rule\(", r"^@njit\(", r"^    def (block_sums|add_blocks|count|count_nonfinite|margin_sums|mixed)\("]
# Why a file is below the limit.
REASONS: dict[str, str] = {
    "shardopt/partition/comm/all_to_all.py": "the collective of a backend that gloo lacks; ranks that leave half-way",
    "shardopt/step/tensor_mates.py": "memory that runs out, on one rank, between two exchanges",
}
_COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def tables() -> tuple[dict[str, Any], dict[str, Any]]:
    """By folder and by file: the four counts, and percent of lines, of branches, of both."""
    coverage = Coverage(data_file=str(DATA), config_file=False)
    coverage.load()
    for pattern in _NOT_PYTHON:
        coverage.exclude(pattern)
    out = FOLDER / "report.json"
    coverage.json_report(outfile=str(out))
    told = json.loads(out.read_text())["files"]
    files = {str(Path(ROOT, name).relative_to(ROOT)): each["summary"] for name, each in sorted(told.items())}
    folders: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(_COUNTS, 0))
    for file, summary in files.items():
        for name in _COUNTS:
            folders[str(Path(file).parent)][name] += summary[name]
            folders["all"][name] += summary[name]
    return {name: _row(each) for name, each in folders.items()}, {name: _row(each) for name, each in files.items()}


def _row(summary: dict[str, int]) -> dict[str, float]:
    statements, lines, branches, taken = (summary[name] for name in _COUNTS)
    percents = [
        round(100 * part / whole, 1) if whole else 100.0
        for part, whole in ((lines, statements), (taken, branches), (lines + taken, statements + branches))
    ]
    return {
        **{name: summary[name] for name in _COUNTS},
        **dict(zip(("lines", "branches", "both"), percents, strict=True)),
    }


def as_text(told: dict[str, Any]) -> str:
    text = f"# Coverage by the default suite, {told['date']}\n\n{told['tests']} tests passed. In percent.\n"
    for title in ("folders", "files"):
        rows = told[title]
        text += f"\n| {title} | statements | lines | branches | both |\n|---|---:|---:|---:|---:|\n"
        for name, row in rows.items():
            mark = "" if row["both"] >= LIMIT else " (low)"
            text += f"| {name}{mark} | {row['num_statements']} | {row['lines']} | {row['branches']} | {row['both']} |\n"
    text += f"\nBelow {LIMIT:.0f} %:\n\n"
    return text + "".join(f"- `{name}`: {reason}.\n" for name, reason in told["below"].items())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.report", description=__doc__)
    parser.parse_args()
    recorded = json.loads(MAP.read_text())
    changed = [file for file, digest in recorded["digests"].items() if digest_of(file) != digest]
    if changed:
        sys.exit(f"changed since the recording: {', '.join(changed)}")
    folders, files = tables()
    low = [file for file, row in files.items() if row["both"] < LIMIT]
    told = {
        "date": date.today().isoformat(),
        "tests": len(recorded["tests"]),
        "folders": folders,
        "files": files,
        "below": {file: REASONS.get(file, "no reason is given") for file in low},
    }
    print(as_text(told))
    missing, needless = sorted(set(low) - set(REASONS)), sorted(set(REASONS) - set(low))
    if missing:
        print(f"No reason in {Path(__file__).name}: {', '.join(missing)}", file=sys.stderr)
    if needless:
        print(f"A reason that is not needed: {', '.join(needless)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

"""Draws mutants of the package, runs each under the tests that run its line, and says which ones no test notices."""

import argparse
import json
import re
import sys
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from datetime import date
from pathlib import Path
from typing import Any

from tests.mutation.covering import Covering, digest_of, package_files
from tests.mutation.mutants import Mutant, draw, mutants_of
from tests.mutation.scratch import Scratch
from tests.support.paths import ROOT

RESULTS = Path(__file__).parent / "results"
ParamRecord = dict[str, Any]  # of the results' file: a mutant's fields, and what became of it
KILLED, SURVIVED, NOT_COVERED, UNCLEAR, GONE = "killed", "survived", "not covered", "unclear", "gone"
# Seconds that a run of tests may take beside three times what its tests took: a fixture that several tests share, a
# training of each version say, counts for the first of them alone.
PATIENCE = 240.0


class Trial:
    """A copy of the checkout for one mutant after the other."""

    def __init__(self, options: argparse.Namespace, covering: Covering | None, passes: dict[str, bool]) -> None:
        self._options = options
        self._covering = covering
        self._passes = passes  # whether what killed a mutant passes without one
        self._scratch = Scratch(options.tests_from)

    def judge(self, mutant: Mutant) -> ParamRecord:
        """What becomes of a mutant."""
        path = self._scratch.root / mutant.file
        source = path.read_text()
        found = mutant.moved_to(source)
        if found is None:
            return {"status": GONE}
        batches = self._batches(found)
        if not batches:
            return {"status": NOT_COVERED}
        status, by, spent, ran = SURVIVED, None, 0.0, 0
        for batch in batches:
            tests, limit = self._within(batch, self._options.cap - spent)
            while tests and status == SURVIVED:
                unsound = [test for test, passes in list(self._passes.items()) if "::" in test and not passes]
                path.write_text(found.apply(source))
                outcome = self._scratch.run(tests, unsound, limit)
                path.write_text(source)
                spent += outcome.seconds
                by = outcome.killer
                if by is None:
                    ran += len(tests)
                    break
                if self._passes_alone(by, tests, limit):
                    status = KILLED
                elif "::" not in by or by in unsound:  # no test can be left out
                    status = UNCLEAR
        told = {"status": status, "by": by, "seconds": round(spent, 1)}
        return told if status == KILLED else {**told, "ran": ran, "of": sum(map(len, batches))}

    def _batches(self, mutant: Mutant) -> list[list[str]]:
        if self._covering is None:
            return [self._options.tests or ["tests"]]
        return self._covering.batches(mutant)

    def _within(self, batch: list[str], left: float) -> tuple[list[str], float]:
        """As many as there is time for, and how long they may take."""
        if self._covering is None:
            return batch, left
        tests, total = [], 0.0
        for test in batch:
            total += self._covering.seconds[test]
            if total <= left:
                tests.append(test)
        return tests, 3 * min(total, left) + PATIENCE

    def _passes_alone(self, killer: str, tests: list[str], limit: float) -> bool:
        """A test that fails without a mutant kills none. After a hang or a crash: whether all of the tests pass."""
        tests = [killer] if "::" in killer else tests
        key = " ".join(tests)
        if key not in self._passes:
            self._passes[key] = self._scratch.run(tests, [], limit).killer is None
        return self._passes[key]


class Results:
    """The mutants of a seed, in a file that is written anew after each one."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._seed = seed
        self._lock = threading.Lock()
        self.entries: list[ParamRecord] = json.loads(path.read_text())["mutants"] if path.exists() else []

    def draw(self, count: int, only: str) -> None:
        files = [file for file in package_files() if file.startswith(only)]
        drawn = draw(
            (each for file in files for each in mutants_of(file, (ROOT / file).read_text())), self._seed, count
        )
        self.entries = [{"id": f"{self._seed}-{number:03}", **asdict(each)} for number, each in enumerate(drawn)]

    def note(self, entry: ParamRecord, told: ParamRecord) -> None:
        with self._lock:
            entry.update(told)
            print(f"{entry['id']} {entry['file']}:{entry['line']} {entry['kind']}: {told}", flush=True)
            self.write()

    def write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        told = {"date": date.today().isoformat(), "seed": self._seed, "mutants": self.entries}
        self._path.write_text(json.dumps(told, indent=1) + "\n")
        self._path.with_suffix(".md").write_text(self._text())

    def summary(self) -> str:
        counts = Counter(each["status"] for each in self.entries if "status" in each)
        return ", ".join(f"{count} {status}" for status, count in counts.most_common()) + "."

    def _text(self) -> str:
        done = [each for each in self.entries if "status" in each]
        text = f"# {len(done)} mutants of seed {self._seed}\n\n{self.summary()}\n\n{_of_verdicts(done)}\n"
        for title in ("folder", "kind"):
            text += f"\n| {title} | mutants | killed |\n|---|---:|---:|\n"
            groups: dict[str, list[ParamRecord]] = defaultdict(list)
            for each in done:
                groups[each["kind"] if title == "kind" else str(Path(each["file"]).parent)].append(each)
            for name, group in sorted(groups.items()):
                text += f"| {name} | {len(group)} | {sum(each['status'] == KILLED for each in group)} |\n"
        text += "\n## Not killed\n"
        for each in done:
            if each["status"] != KILLED:
                ran = f", {each['ran']} of {each['of']} tests ran" if "ran" in each else ""
                other = f"; by the other tests: {each['elsewhere']['status']}" if "elsewhere" in each else ""
                text += f"\n{_head(each)}: {each['status']}{ran}{other}\n\n{_change(each)}\n"
                text += f"Verdict: {each.get('verdict', 'open')}.\n"
        text += "\n## Killed\n"
        killed = [each for each in done if each["status"] == KILLED]
        return text + "".join(
            f"\n{_head(each)}: {each['by']}, {each['seconds']} s\n\n{_change(each)}" for each in killed
        )


def _of_verdicts(entries: list[ParamRecord]) -> str:
    """How many were killed in the end, by tests that ran later or are new, and the first words of other verdicts."""
    words = (each["status"] if each["status"] == KILLED else each.get("verdict", "open") for each in entries)
    counts = Counter(re.split("[ ,:]", each)[0] for each in words)
    return f"With the verdicts: {', '.join(f'{count} {word}' for word, count in counts.most_common())}."


def _head(entry: ParamRecord) -> str:
    return f"**{entry['id']}** `{entry['file']}:{entry['line']}` {entry['kind']}"


def _change(entry: ParamRecord) -> str:
    lines = [f"{sign} {line}" for sign, name in (("-", "before"), ("+", "after")) for line in entry[name].splitlines()]
    return "\n".join(["```diff", *lines, "```", ""])


def todo(results: Results, options: argparse.Namespace) -> list[ParamRecord]:
    survivors = [each for each in results.entries if each.get("status") in (SURVIVED, NOT_COVERED, UNCLEAR)]
    if options.tests_from is not None:
        return survivors
    if options.survivors:
        return [each for each in survivors if "verdict" not in each]
    return [each for each in results.entries if "status" not in each]


def run(results: Results, options: argparse.Namespace) -> None:
    covering = None if options.tests or options.tests_from else Covering()
    entries = todo(results, options)
    changed = {
        each["file"] for each in entries if covering and covering.digests.get(each["file"]) != digest_of(each["file"])
    }
    if changed:
        sys.exit(f"changed since the recording: {', '.join(sorted(changed))}")
    passes: dict[str, bool] = {}
    own = threading.local()

    def judge(entry: ParamRecord) -> None:
        if not hasattr(own, "trial"):
            own.trial = Trial(options, covering, passes)
        told = own.trial.judge(Mutant(**{field.name: entry[field.name] for field in fields(Mutant)}))
        if options.tests_from is not None:
            told = {"elsewhere": told}
        elif options.survivors:
            told = {"verdict": f"killed by {told['by']}"} if told["status"] == KILLED else {}
        results.note(entry, told)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(judge, entries))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=120, help="mutants to draw, where the seed has no results yet")
    parser.add_argument("--only", default="shardopt", help="draw from this folder or file alone")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cap", type=float, default=600, help="seconds of tests for one mutant")
    parser.add_argument("--survivors", action="store_true", help="those without a verdict once more")
    parser.add_argument("--tests", nargs="+", help="run these, whatever runs the line")
    parser.add_argument("--tests-from", type=Path, help="the survivors, under the tests of another checkout")
    parser.add_argument("--out", type=Path, help="the results' file (.json)")
    options = parser.parse_args()
    name = f"mutants-{options.seed}" + options.only.removeprefix("shardopt").replace("/", "-").removesuffix(".py")
    results = Results(options.out or RESULTS / f"{name}.json", options.seed)
    if not results.entries:
        results.draw(options.count, options.only)
    run(results, options)
    results.write()
    print(results.summary())


if __name__ == "__main__":
    main()

"""The map that a recording leaves: which tests run a line, and how long each test takes."""

import hashlib
import json
from typing import Any

from coverage import CoverageData

from tests.mutation.mutants import Mutant
from tests.support.paths import ROOT

FOLDER = ROOT / ".test_cache" / "coverage"
DATA = FOLDER / "data"
PASSED = FOLDER / "passed.json"  # the tests that passed, and their seconds
MAP = FOLDER / "map.json"
IMPORT = "import"  # the context of what no test runs: imports, definitions

# Kernels are compiled, once a process, and rules are read as text: no tracer sees what runs then. Their own tests and
# those that run functions of ``_LAUNCH`` use what comes of both.
_COMPILED = ("shardopt/kernels/", "shardopt/rules/")
_OF_COMPILED = ("tests/kernels/", "tests/rules/")
_LAUNCH = "shardopt/kernels/launch.py"


def package_files() -> list[str]:
    """Relative to the checkout."""
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "shardopt").rglob("*.py"))]


def digest_of(file: str) -> str:
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()


def write_map() -> None:
    data = CoverageData(str(DATA))
    data.read()
    seconds: dict[str, float] = json.loads(PASSED.read_text())
    number = {test: index for index, test in enumerate(seconds)}
    sets: dict[tuple[int, ...], int] = {}
    lines: dict[str, dict[int, tuple[int, bool]]] = {}
    for file in package_files():
        contexts = data.contexts_by_lineno(str(ROOT / file))
        lines[file] = {}
        for line, names in sorted(contexts.items()):
            # A process of the tests has the static context ``import``, and another one for each test: ``import|test``.
            tests = {name.removeprefix(f"{IMPORT}|") for name in names} & number.keys()
            key = tuple(sorted(number[test] for test in tests))
            lines[file][line] = (sets.setdefault(key, len(sets)), IMPORT in names)
    digests = {file: digest_of(file) for file in lines}
    told = {"tests": list(seconds), "seconds": seconds, "sets": list(sets), "lines": lines, "digests": digests}
    MAP.write_text(json.dumps(told))


class Covering:
    """Finds the tests of a mutant."""

    def __init__(self) -> None:
        told: dict[str, Any] = json.loads(MAP.read_text())
        self._tests: list[str] = told["tests"]
        self._sets = [{self._tests[index] for index in each} for each in told["sets"]]
        self._lines = {file: {int(line): each for line, each in lines.items()} for file, lines in told["lines"].items()}
        self.seconds: dict[str, float] = told["seconds"]
        self.digests: dict[str, str] = told["digests"]

    def batches(self, mutant: Mutant) -> list[list[str]]:
        """The tests that run the mutant's line: the five fastest, those of the folder's own, the others."""
        tests = self._tests_of(mutant)
        first, others = tests[:5], tests[5:]
        home = "/".join(["tests", *mutant.file.split("/")[1:-1]]) + "/"
        own = [test for test in others if test.startswith(home) and home != "tests/"]
        return [batch for batch in (first, own, [test for test in others if test not in set(own)]) if batch]

    def _tests_of(self, mutant: Mutant) -> list[str]:
        """First those that are seen to run it; then those that use what ran before them, at import or in a cache."""
        lines, seen, runs_before = self._lines[mutant.file], set(), mutant.is_cached
        for number, at_import in (lines[each] for each in range(mutant.first, mutant.last + 1) if each in lines):
            seen |= self._sets[number]
            runs_before |= at_import
        tiers = [seen]
        if mutant.file.startswith(_COMPILED):
            own = {test for test in self._tests if test.startswith(_OF_COMPILED)}
            tiers += [self._tests_of_functions(mutant.file), own, self._tests_of_functions(_LAUNCH)]
        elif runs_before:
            tiers.append(self._tests_of_functions(mutant.file))
        return list(dict.fromkeys(test for tier in tiers for test in sorted(tier, key=lambda each: self.seconds[each])))

    def _tests_of_functions(self, file: str) -> set[str]:
        """Those that run any line of the file but at its import."""
        return set().union(*(self._sets[number] for number, at_import in self._lines[file].values() if not at_import))

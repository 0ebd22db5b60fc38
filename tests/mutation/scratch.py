"""A copy of the checkout, in which one mutant at a time is put to tests."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

_NOTHING_COLLECTED = 5  # of pytest's exit codes


@dataclass(frozen=True)
class Outcome:
    """Of one run of pytest."""

    killer: str | None  # the test that failed first, or ``hang``, ``crash``, ``import``; None: all passed
    seconds: float


class Scratch:
    def __init__(self, tests_from: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True)
        self.root = Path(self._folder.name) / "copy"
        self._copy(ROOT, ".")
        kernels = Path(".test_cache", "kernels")
        if (ROOT / kernels).exists():
            shutil.copytree(ROOT / kernels, self.root / kernels)
        if tests_from is not None:
            shutil.rmtree(self.root / "tests")
            self._copy(tests_from, "tests", "pyproject.toml")

    def _copy(self, source: Path, *paths: str) -> None:
        command = ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard", *paths]
        for name in filter(
            None, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
        ):
            if (source / name).exists():  # not deleted
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, self.root / name)

    def run(self, tests: list[str], without: list[str], limit: float) -> Outcome:
        """Until the first one fails, in this order."""
        temporary = self.root.parent / "tmp"
        temporary.mkdir()
        # pytest's own folder for the tests, and all that they put elsewhere, goes with it.
        environment = {**os.environ, "PYTHONPATH": str(self.root), "TMPDIR": str(temporary)}
        options = ["-x", "-q", "-rfE", "-n0", "-p", "no:randomly", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        left_out = [f"--deselect={test}" for test in without]
        command = [sys.executable, "-m", "pytest", *options, *left_out, *tests]
        start, out = time.monotonic(), temporary.with_suffix(".out")
        code = None
        with out.open("w") as file:
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill_session(process)
            shutil.rmtree(temporary, ignore_errors=True)
        return Outcome(_killer(code, out.read_text(errors="replace"), tests), time.monotonic() - start)


def _kill_session(process: "subprocess.Popen[bytes]") -> None:
    """The ranks that pytest forked, and what they started, too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _killer(code: int | None, text: str, tests: list[str]) -> str | None:
    if code is None:
        return "hang"
    if code in (0, _NOTHING_COLLECTED):
        return None
    if code < 0:
        return "crash"
    for line in text.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            named = line.partition(" ")[2]
            told = next((test for test in tests if named == test or named.startswith(f"{test} - ")), None)
            return told or named.partition(" - ")[0]
    return "import"  # of conftest.py

"""``python -m shardopt``: whatever is typed, an answer or one line that says what is wrong, and a telling exit code."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardopt.__main__ import main
from tests.support.paths import ROOT
from tests.support.scripts import run_script

Printed = pytest.CaptureFixture[str]


def called(arguments: Sequence[str], capsys: Printed) -> tuple[int, str, str]:
    try:
        code = main(arguments)
    except SystemExit as ended:  # argparse's
        code = ended.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    return code, out, err


PLAN = ["plan", "--params", "7e5"]
TYPED = [
    ["plan", "--params", "-3"],
    ["plan", "--params=-3"],
    ["plan", "--params", "7"],
    ["plan", "--params", "7GB"],
    ["plan", "--params", "nan"],
    ["plan", "--params", "inf"],
    ["plan", "--params", "1e30"],
    ["plan", "--params", "1e999"],
    ["plan", "--params", "2e15"],
    ["plan"],
    [*PLAN, "--ranks", "0"],
    [*PLAN, "--ranks", "1.5"],
    [*PLAN, "--ranks", "1" * 30],
    [*PLAN, "--device-memory", "0"],
    [*PLAN, "--device-memory", "inf"],
    [*PLAN, "--device-memory", "-8G"],
    [*PLAN, "--host-memory", "lots"],
    [*PLAN, "--plot", "x.bogus"],
    [*PLAN, "--plot", "/nonexistent/x.png"],
    [*PLAN, "--optimizer", "Adan"],
    ["twins", "--steps", "0"],
    ["twins", "--steps", "-1"],
    ["twins", "--seed", "1" * 30],
    ["twins", "--seed", str(2**63)],
    ["export", "somewhere", "out", "--to", "torch", "--optimizer", "-1"],
    ["export", "somewhere", "out", "--to", "pickle"],
    ["frobnicate"],
    [],
]


@pytest.mark.parametrize("arguments", TYPED, ids=" ".join)
def test_a_wrong_command_line_is_2(arguments: list[str], capsys: Printed) -> None:
    """argparse's code, and its way to say which option it was; nothing was printed before."""
    code, out, err = called(arguments, capsys)
    assert code == 2 and not out and "Traceback" not in err, err
    assert "error: " in err.splitlines()[-1] and len(err.splitlines()[-1]) < 300, err


def test_what_cannot_be_done_is_1(tmp_path: Path, capsys: Printed) -> None:
    """One line, and nothing made."""
    junk, text = tmp_path / "junk", tmp_path / "text.pt"
    junk.mkdir()
    text.write_text("not a checkpoint")
    missing, out = str(tmp_path / "missing"), str(tmp_path / "out")
    for arguments in (
        ["doctor", missing],
        ["doctor", str(text)],
        *([command, *where] for command in ("inspect", "verify") for where in ([missing], [str(junk)], [str(text)])),
        ["verify", "--all", str(junk)],
        *(["export", where, out, "--to", to] for where in (missing, str(junk)) for to in ("torch", "safetensors")),
        ["import", missing, out],
        ["import", str(junk), out],
        ["import", str(text), out],
        ["import", str(text), out, "--names", missing],
        ["import", str(junk), out, "--from", "dcp"],
        ["import", str(junk), out, "--from", "deepspeed"],
        [*PLAN, "--device-memory", "1M"],
    ):
        code, printed, err = called(arguments, capsys)
        assert code == 1, (arguments, printed, err)
        told = err if err else printed.splitlines()[-1]
        assert "Traceback" not in err and len(told.splitlines()) == 1, (arguments, err)
        assert err.startswith("error: ") or "none fits" in printed or "DAMAGED" in printed, (arguments, err)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["junk", "text.pt"]


def test_a_bug_is_3_and_an_interrupt_130(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line too; ``python -X dev`` has the traceback."""
    for error, code, words in (
        (KeyError("x"), 3, "a bug in shardopt, please report it (KeyError: 'x'). python -X dev"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "error: MemoryError"),
    ):

        def fails(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("shardopt.tools.plan.Planner.need", fails)
        found, out, err = called(PLAN, capsys)
        assert (found, out, len(err.splitlines())) == (code, "", 1) and words in err
    shown = called(["--help"], capsys)
    assert shown[0] == 0 and "exit codes:" in shown[1]


def test_billions_are_billions(capsys: Printed) -> None:
    for text in ("7B", "7b", "7e9", "7000M"):
        code, out, _ = called(["plan", "--params", text, "--ranks", "8"], capsys)
        assert code == 0 and "7,000,000,000 params, 8 ranks" in out
        assert "cheapest" not in out  # without a limit there is no choice


CHILD = """
import json, resource, sys
from shardopt.__main__ import main

calls = 0

def count(frame, event, argument):
    global calls
    calls += event == "call"

sys.setprofile(count)
code = main(sys.argv[1:])
sys.setprofile(None)
print(json.dumps([code, calls, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]), file=sys.stderr)
"""


def test_a_plan_of_a_trillion_params_is_soon_made(tmp_path: Path) -> None:
    """Only what is shown is laid out; where all ways are searched, those that differ in their tier share a layout.
    A call of a Python function takes some 0.3 us; 5 s and 1 GiB are promised."""
    script = tmp_path / "count.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + CHILD)
    for size, more, most in (("1T", [], 1_000_000), ("10B", ["--device-memory", "80G"], 4_000_000)):
        done = run_script(script, "plan", "--params", size, "--ranks", "4096", *more)
        code, calls, kilobytes = json.loads(done.stderr.splitlines()[-1])
        assert "000,000,000 params, 4096 ranks" in done.stdout and code == 0, done.stderr
        assert calls < most and kilobytes < 1 << 20, (calls, kilobytes)


def test_what_is_read_by_head_ends_quietly() -> None:
    """More than a pipe holds is printed, to a reader that takes one line of it."""
    line = f"set -o pipefail; {sys.executable} -m shardopt plan --params 7B --all | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (1, "") and "7,000,000,000 params" in done.stdout

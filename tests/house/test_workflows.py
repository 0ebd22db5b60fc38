"""The workflows of the repository, and what a release says of itself, agree with what there is."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import shardopt
from shardopt.__main__ import main
from tests.support.paths import ROOT

yaml = pytest.importorskip("yaml")  # comes with the extra "frameworks"

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Modules that a line starts with -m, and what brings them.
INSTALLED = {"pip": "Python", "build": "a line before it", "pytest": "the extra test"}


def runs(file: Path) -> list[str]:
    jobs: dict[str, Any] = yaml.safe_load(file.read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job.get("steps", ())]
    return [line for step in steps for line in step.get("run", "").splitlines()]


LINES = [pytest.param(line, id=f"{file.stem}: {line}") for file in FILES for line in runs(file)]


def commands(line: str) -> list[list[str]]:
    """The simple commands of a line, without variables that are set for them."""
    found = []
    for each in re.split(r"&&|\|\||;(?![^']*')", re.sub(r"\$\{\{.*?\}\}", "0", line)):
        words = shlex.split(each)
        while "=" in words[0]:
            words = words[1:]
        found.append(words)
    return found


@pytest.mark.parametrize("line", LINES)
def test_a_line_runs(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As far as it can without a network and in seconds: the shell reads it, and its commands are there."""
    subprocess.run(["bash", "-n", "-c", re.sub(r"\$\{\{.*?\}\}", "0", line)], check=True, timeout=600)
    for program, *arguments in commands(line):
        if program == "bash":
            script, *others = arguments
            shown = subprocess.run(["bash", str(ROOT / script), "--help"], capture_output=True, text=True, timeout=600)
            assert shown.returncode == 0 and script in shown.stdout and not others
        elif program == "shardopt":
            with pytest.raises(SystemExit) as ended:
                main([*arguments, "--help"])
            assert ended.value.code == 0 and f"usage: shardopt {arguments[0]}" in capsys.readouterr().out
        elif program.endswith("python") and arguments[0] == "-m":
            assert arguments[1] in INSTALLED
            extras = set(re.findall(r"\w+", "".join(re.findall(r"\.\[([\w,]+)\]", " ".join(arguments)))))
            assert extras <= set(PROJECT["optional-dependencies"])
            if arguments[1] == "pytest":
                collect = [sys.executable, *arguments, "--version"]
                assert subprocess.run(collect, capture_output=True, timeout=600, cwd=ROOT).returncode == 0
        elif program.endswith("python") and arguments[0] != "-c":
            shown = subprocess.run([sys.executable, arguments[0], *arguments[1:], "--help"], cwd=ROOT, timeout=600)
            assert shown.returncode == 0
        else:
            assert program in ("cd", "test") or arguments[0] == "-c", program


def test_the_tests_run_on_what_is_supported() -> None:
    """From the oldest Python, torch and Triton that pyproject.toml allows to the newest that setup.sh installs."""
    matrix = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["tests"]["strategy"]["matrix"]
    versions = [tuple(map(int, version.split("."))) for version in matrix["python"]]
    oldest = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    newest = re.search(r"<= \((\d+), (\d+)\)", (ROOT / "scripts" / "setup.sh").read_text())
    assert newest is not None
    assert versions == [(3, minor) for minor in range(oldest[1], int(newest[2]) + 1)]
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    floors = {}
    for name in ("torch", "triton"):
        (floors[name],) = (
            found[1] for each in PROJECT["dependencies"] if (found := re.match(rf"{name}>=([\d.]+)", each))
        )
    assert pinned is not None and matrix["torch"] == [pinned[1]]
    assert matrix["include"] == [
        {
            "python": matrix["python"][0],
            "torch": f"{floors['torch']}.0",
            "oldest": f"triton=={floors['triton']}.0",
        }
    ]


def test_a_release_is_tested() -> None:
    """Before it is built, as every change is."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    tests = ROOT / jobs["tests"]["uses"]
    assert "workflow_call" in yaml.safe_load(tests.read_text())[True]  # how YAML reads "on"
    assert jobs["build"]["needs"] == "tests" and jobs["publish"]["needs"] == "build"


def test_a_release_says_which_it_is() -> None:
    """The changelog begins with the version, and so does the citation; the papers on the repository lead somewhere."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == shardopt.__version__ and cited["license"] == PROJECT["license"]
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert shardopt.__version__ in heads[0]
    assert all(
        re.fullmatch(r"\[(Unreleased|\d+\.\d+\.\d+)\](: \d+\.\d+\.\d+| - \d{4}-\d\d-\d\d)", head) for head in heads
    )
    for name in ("CONTRIBUTING.md", "SECURITY.md"):
        text = (ROOT / name).read_text()
        links = re.findall(r"\]\(([^)#:]+)", text) + re.findall(r"`bash (scripts/[\w.]+)", text)
        assert links and all((ROOT / link).exists() for link in links), name

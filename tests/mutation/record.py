"""Runs the default suite, or the tests that are named, under coverage.py; finds out which tests run a line."""

import argparse
import json
import os
import subprocess
import sys

from coverage import Coverage

from tests.mutation.covering import DATA, FOLDER, IMPORT, MAP, PASSED, write_map
from tests.support.coverage_contexts import TEST
from tests.support.paths import ROOT

_SETTINGS = f"""\
[run]
branch = true
source = {ROOT / "shardopt"}
data_file = {DATA}
parallel = true
patch = fork, _exit
context = ${{{TEST}-{IMPORT}}}
disable_warnings = module-not-imported, no-data-collected, no-ctracer, trace-changed
"""


def record(arguments: list[str], adds: bool) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob(f"{DATA.name}.*"):
        path.unlink()
    before: dict[str, float] = json.loads(PASSED.read_text()) if adds else {}
    PASSED.unlink(missing_ok=True)
    settings = FOLDER / "settings"
    settings.write_text(_SETTINGS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.coverage_contexts", *arguments]
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(settings)}
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    PASSED.write_text(json.dumps({**before, **json.loads(PASSED.read_text())}, indent=0))
    data = Coverage(data_file=str(DATA), config_file=False)
    if adds:
        data.load()
    data.combine([str(FOLDER)], strict=True)
    data.save()
    write_map()
    print(f"The map of lines is in {MAP.relative_to(ROOT)}.")
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.record", description=__doc__)
    parser.add_argument("--add", action="store_true", help="to what was recorded before, with the same sources")
    options, rest = parser.parse_known_args()
    sys.exit(record(rest, options.add))

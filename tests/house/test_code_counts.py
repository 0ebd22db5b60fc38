"""Promise: the ways that every step takes do not grow by stealth: a fast way beside the general one shows as lines."""

import importlib.util
import json
from types import ModuleType

import pytest

from tests.support.paths import ROOT

MARGIN = 1.08  # over the committed number


def counting() -> ModuleType:
    spec = importlib.util.spec_from_file_location("count_code", ROOT / "scripts" / "count_code.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outgrown(now: dict[str, tuple[int, int]], committed: dict[str, dict[str, int]]) -> dict[str, str]:
    """Group -> how many lines it has, and how many it may have."""
    return {
        name: f"{code} lines of code, at most {committed[name]['code'] * MARGIN:.0f}"
        for name, (_, code) in now.items()
        if code > committed[name]["code"] * MARGIN
    }


def test_no_group_outgrows_the_committed_table() -> None:
    """Delete what a change replaces; ``python scripts/count_code.py --write`` commits to numbers that fell."""
    count_code = counting()
    now, committed = count_code.sizes_of_groups(), json.loads(count_code.TABLE.read_text())
    assert now.keys() == committed.keys()
    assert all(files and code for files, code in now.values())
    assert outgrown(now, committed) == {}


@pytest.mark.parametrize(("code", "is_found"), [(100, False), (108, False), (109, True)])
def test_a_group_that_grows_is_found(code: int, is_found: bool) -> None:
    assert bool(outgrown({"kernels": (3, code)}, {"kernels": {"files": 3, "code": 100}})) == is_found

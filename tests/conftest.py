"""What all tests share."""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.ranks import Pool

_ROOT = Path(__file__).parents[1]
# Processes that tests start, the fork server first of all, find ``shardopt`` and ``tests`` in this checkout.
os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

_COSTS = _ROOT / "tests" / "results" / "processor_time.json"  # seconds of processor of each file, as measured


def pytest_configure(config: pytest.Config) -> None:
    # The process that only hands out tests to workers runs none, and is spared four seconds of imports.
    if not config.getoption("numprocesses", None):
        from tests.support import preload  # noqa: F401


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Dear files come first: a worker that begins one at the end would leave the other one idle."""
    if "PYTEST_XDIST_WORKER" in os.environ and not config.pluginmanager.hasplugin("randomly"):
        costs = json.loads(_COSTS.read_text())["files"] if _COSTS.exists() else {}
        items.sort(key=lambda item: -costs.get(item.nodeid.partition("::")[0], {"cpu": 0})["cpu"])


@pytest.fixture(scope="session")
def ranks() -> Iterator["Pool"]:
    """Processes that tests run functions of several ranks on."""
    from tests.support.ranks import Pool

    pool = Pool()
    yield pool
    pool.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collections that tests ask for pass over what was imported until now, which is a million objects."""
    gc.collect()
    gc.freeze()

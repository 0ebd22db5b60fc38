"""What all tests share."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Processes that tests start, the fork server first of all, find ``shardopt`` and ``tests`` in this checkout.
_ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])

from tests.support import preload  # noqa: E402, F401
from tests.support.ranks import Pool  # noqa: E402


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Processes that tests run functions of several ranks on."""
    pool = Pool()
    yield pool
    pool.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collections that tests ask for pass over what was imported until now, which is a million objects."""
    gc.collect()
    gc.freeze()

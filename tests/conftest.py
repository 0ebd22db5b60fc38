"""What all tests share."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# Processes that tests start, the fork server first of all, find ``shardopt`` and ``tests`` in this checkout.
_ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])

from tests.support import preload  # noqa: E402, F401
from tests.support.ranks import Pool  # noqa: E402


# Neither how fast an example runs nor how fast it is drawn may fail a test.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("default", **_UNTIMED, derandomize=True)
settings.register_profile("slow", **_UNTIMED, derandomize=False, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    """The default run draws the same examples each time; one with the long sweeps draws others, and says which."""
    settings.load_profile("default" if "not slow" in config.option.markexpr else "slow")


@pytest.fixture(autouse=True)
def seed() -> None:
    """What a test draws without a seed of its own does not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Processes that tests run functions of several ranks on."""
    pool = Pool()
    yield pool
    pool.close()

"""What all tests share."""

import gc
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.ranks import Pool

_ROOT = Path(__file__).parents[1]
# Processes that tests start, the fork server first of all, find ``shardopt`` and ``tests`` in this checkout.
os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

# A run needs some hundred native kernels, each in most of its processes: they are compiled once, for the next run too.
os.environ["SHARDOPT_KERNEL_CACHE"] = str(_ROOT / ".test_cache" / "kernels")

_COSTS = _ROOT / "tests" / "results" / "processor_time.json"  # seconds of processor of each file, as measured

# Neither how fast an example runs nor how fast it is drawn may fail a test.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("default", **_UNTIMED, derandomize=True)
settings.register_profile("slow", **_UNTIMED, derandomize=False, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    # The default run draws the same examples each time; one with the long sweeps draws others, and says which.
    settings.load_profile("default" if "not slow" in config.option.markexpr else "slow")
    # The process that only hands out tests to workers runs none, and is spared four seconds of imports.
    if not config.getoption("numprocesses", None):
        from tests.support import fork_servers

        capture = config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # what ranks write is shown with the test that fails
        fork_servers.begin()
        capture.suspend_global_capture()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Dear files come first: a worker that begins one at the end would leave the other one idle."""
    moving = [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]
    if moving:
        raise pytest.UsageError(
            f"give this test an id of its own, since each worker would see another one: {moving[0]}"
        )
    if "PYTEST_XDIST_WORKER" in os.environ and not config.pluginmanager.hasplugin("randomly"):
        costs = json.loads(_COSTS.read_text())["files"] if _COSTS.exists() else {}
        dear = {"cpu": 30.0}  # a file that nobody has measured: last, it might leave the other worker idle
        items.sort(key=lambda item: -costs.get(item.nodeid.partition("::")[0], dear)["cpu"])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As ``--dist loadfile`` does, but that files which share a dear process go to one worker."""
    from xdist.scheduler import LoadFileScheduling

    from tests.support.together import place_of

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return place_of(nodeid)

    return Together(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def seed() -> None:
    """What a test draws without a seed of its own does not depend on the tests before it."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator["Pool"]:
    """Processes that tests run functions of several ranks on."""
    from tests.support.ranks import Pool

    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks_with_frameworks() -> Iterator["Pool"]:
    """The same; each has imported the frameworks, which takes three seconds of a core, with the process it is of."""
    from tests.support.ranks import Pool

    pool = Pool(frameworks=True)
    yield pool
    pool.close()


def pytest_sessionstart() -> None:
    gc.disable()  # what is imported stays


def pytest_collection_finish() -> None:
    """Collections that tests ask for pass over what was imported until now, which is a million objects."""
    gc.collect()
    gc.freeze()
    gc.enable()

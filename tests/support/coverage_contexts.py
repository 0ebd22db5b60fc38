"""Which test runs a line, in whichever process it runs; does nothing in an ordinary run of the tests.

``python -m tests.mutation.record`` runs pytest with this module as a plugin, and with ``COVERAGE_PROCESS_START`` set:
coverage.py then starts in every new process by itself, and anew in every process that is forked. What is left to say is
the test:

* The process of a test switches its context when a test begins.
* A process that a test starts finds the test in the environment, as its static context (``record.py``).
* The fork server starts before the first test. What it imports belongs to no test but to the context ``import``.
* A rank is told the test with each job, and saves its data after the job: it may be killed before the next one.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TEST = "SHARDOPT_TEST"  # of the environment: the test that runs; missing in an ordinary run


def attributed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What a rank is to call, with what, so that the lines that ``function(*arguments)`` runs count for this test."""
    return (_run_for, (os.environ[TEST], function, arguments)) if TEST in os.environ else (function, arguments)


def _run_for(test: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    _switch(test)
    try:
        return function(*arguments)
    finally:
        _save()


def _switch_again() -> None:
    """In a process that a test forks itself: coverage.py has started anew there."""
    if TEST in os.environ:
        _switch(os.environ[TEST])


def _switch(test: str) -> None:
    from coverage import Coverage

    os.environ[TEST] = test
    current = Coverage.current()
    assert current is not None, "coverage.py did not start in this process"
    current.switch_context(test)


def _save() -> None:
    from coverage import Coverage

    current = Coverage.current()
    assert current is not None
    current.save()


# -- as a plugin of pytest ---------------------------------------------------------------------------------------------

_seconds: dict[str, float] = {}
_not_passed: set[str] = set()


def pytest_sessionstart(session: pytest.Session) -> None:
    if _runs_tests(session.config):
        from tests.support.fork_servers import begin

        begin()
        os.register_at_fork(after_in_child=_switch_again)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _switch(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if not report.passed:
        _not_passed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    _save()
    if not _is_worker(session.config):
        passed = {test: round(seconds, 3) for test, seconds in _seconds.items() if test not in _not_passed}
        Path(os.environ["COVERAGE_PROCESS_START"]).with_name("passed.json").write_text(json.dumps(passed))


def _is_worker(config: pytest.Config) -> bool:
    """Of pytest-xdist: it runs tests, and reports to the process that was started."""
    return hasattr(config, "workerinput")


def _runs_tests(config: pytest.Config) -> bool:
    return _is_worker(config) or not config.getoption("numprocesses", None)

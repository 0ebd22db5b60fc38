"""A process in which Triton compiles kernels: that of the tests has its interpreter switched on for good."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import pytest

from tests.support.paths import ROOT

# What was compiled is kept beside the native kernels, by Triton's hash of the source, the options and its own version.
CACHE = ROOT / ".test_cache" / "triton"


class Compiling:
    """Runs functions of a module's own there, one after the other; what they raise is raised here."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with _environment(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(CACHE)):  # a process begins with the first call
            future = self._pool.submit(_call, function, *arguments)
        return future.result()

    def close(self) -> None:
        self._pool.shutdown()


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except pytest.fail.Exception as error:  # which has no name to be found by on the other side
        raise AssertionError(str(error)) from None


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})

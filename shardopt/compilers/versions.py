"""The compilers of the kernels: which versions work, and a clear error at first use of another one."""

import importlib
import re
from contextlib import suppress
from importlib import metadata

from ..beginning import as_at_the_beginning
from ..errors import UnsupportedVersionError

# Library -> oldest and newest version that the tests were run with.
TESTED = {"numba": ((0, 61), (0, 68)), "triton": ((3, 6), (3, 9))}


def require(library: str, purpose: str) -> None:
    """Loads a library.

    Raises:
        UnsupportedVersionError: the library is missing, broken, or older than the tested versions. Newer ones pass.
    """
    oldest, newest = TESTED[library]
    span = f"{_dotted(oldest)} to {_dotted(newest)}"
    try:
        with as_at_the_beginning():
            found = importlib.import_module(library).__version__
    except Exception as error:  # a broken installation raises anything
        call = f"pip install '{library}>={_dotted(oldest)}' (tested: {span})"
        if _is_installed(library):
            call = f"run python -c 'import {library}'; if that fails too, {call}"
        raise UnsupportedVersionError(
            f"{call}: {library} cannot be imported ({type(error).__name__}: {error}), and it compiles the update for "
            f"{purpose}, so no step can be taken."
        ) from error
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < oldest:
        raise UnsupportedVersionError(
            f"upgrade {library}, pip install '{library}>={_dotted(oldest)}': {library} {found} is older than the "
            f"tested versions ({span}), so the update for {purpose} might not compile, or compile to other numbers."
        )


def _is_installed(library: str) -> bool:
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(library))
    return False


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

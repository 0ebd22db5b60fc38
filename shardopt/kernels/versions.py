"""The compilers behind the kernels: which versions work, and a clear error at first use where one does not."""

import importlib
import re

from ..errors import UnsupportedVersionError

# library -> oldest and newest version that the tests were run with.
TESTED = {"numba": ((0, 61), (0, 68)), "triton": ((3, 6), (3, 9))}


def require(library: str, purpose: str) -> None:
    """Loads ``library``.

    Raises:
        UnsupportedVersionError: it is missing, broken, or older than what was tested. Newer ones are tried.
    """
    oldest, newest = TESTED[library]
    span = f"{_dotted(oldest)} to {_dotted(newest)}"
    try:
        found = importlib.import_module(library).__version__
    except Exception as error:  # a broken installation raises anything
        raise UnsupportedVersionError(
            f"{library} cannot be imported ({type(error).__name__}: {error}): it compiles the update for {purpose}, so "
            f"no step can be taken. Install a tested version ({span}): pip install '{library}>={_dotted(oldest)}'."
        ) from error
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < oldest:
        raise UnsupportedVersionError(
            f"{library} {found} is older than what shardopt was tested with ({span}): the update for {purpose} might "
            f"not compile, or compile to other numbers. Upgrade it: pip install '{library}>={_dotted(oldest)}'."
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

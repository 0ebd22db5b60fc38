"""The params of one bucket that some code may read, while the guard keeps the others."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Parameter

    # A param as the bucket has it, as the model has it, the class of that, and the class that guards it.
    Guarded = tuple[Parameter, Parameter, type, type]


_VERSION = attrgetter("_version")  # in C: of many params at once


class Readable:
    """Params of a bucket that are shown together, by lists: what the code of one module reads, or all of them.

    Each call of a module costs as much as it reads, and not as much as the bucket holds. Several may share a param: all
    that are shown are hidden together.
    """

    def __init__(self, params: Sequence[Guarded], shown: list[Readable]):
        """
        Args:
            shown: those of the bucket that are shown at this moment; this one adds itself.
        """
        self._params, self._shown, self._is_shown = [each[0] for each in params], shown, False
        self._plain = [(outer, own) for _, outer, own, _ in params]
        self._guarded = [(outer, guard) for _, outer, _, guard in params]

    def show(self) -> None:
        """Lets the params be read: their values are whole."""
        if not self._is_shown:
            self._is_shown = True
            self._shown.append(self)
            for outer, own in self._plain:
                outer.__class__ = own

    @staticmethod
    def hide_all(shown: list[Readable]) -> None:
        """Guards all params that are shown: a read of one is an error."""
        for each in shown:
            each._is_shown = False
            for outer, guard in each._guarded:
                outer.__class__ = guard
        del shown[:]

    def versions(self) -> list[int]:
        """Returns the version counters of the params. The bucket must be allocated."""
        return list(map(_VERSION, self._params))

    def written(self, versions: Sequence[int]) -> Parameter | None:
        """Returns a param that was written to since it had this version, if there is one."""
        pairs = zip(self._params, versions, strict=True)
        return next((param for param, version in pairs if param._version != version), None)

    def remove(self, outer: Parameter) -> None:
        """Guards a param no more: it has left the bucket."""
        self._guarded = [each for each in self._guarded if each[0] is not outer]

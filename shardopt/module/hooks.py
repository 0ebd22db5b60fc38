"""Hooks that do not keep an optimizer alive. Modules, params and graphs hold their hooks for as long as they live."""

import weakref
from collections.abc import Callable
from typing import Any

from ..uncompiled import uncompiled


def call_while_alive(function: Callable[..., Any], *objects: object, otherwise: Any = None) -> Callable[..., Any]:
    """Returns a function that calls ``function(*objects, *arguments)`` while all objects are alive.

    Once one of them is gone, it does nothing but return ``otherwise``.

    The returned function holds the objects weakly: a hook must not keep an optimizer that the user dropped
    (test_taken_over_and_given_back), and a bucket must not keep the masters and states that lie in its own shard.
    """
    references = [weakref.ref(each) for each in objects]

    def call(*arguments: Any) -> Any:
        alive: tuple[object, ...] = ()
        for reference in references:
            one = reference()
            if one is None:
                return otherwise
            alive += (one,)
        return function(*alive, *arguments)

    return call


def remove_all(hooks: list[Any]) -> None:
    """Removes hooks by their handles, which are forgotten."""
    while hooks:
        hooks.pop().remove()


class ModuleHook:
    """A method as the hook of a module. The hook holds the method's object weakly, and does nothing once that object is
    gone, or in a copied or unpickled module.

    torch.compile omits the hook from its graphs: the hook communicates with other ranks.
    """

    def __init__(self, method: Any):
        """``method``: bound to its object."""
        self._owner, self._function = weakref.ref(method.__self__), method.__func__

    @uncompiled("it communicates with other ranks")
    def __call__(self, *arguments: Any) -> Any:
        owner = self._owner()
        return None if owner is None else self._function(owner, *arguments)

    def __reduce__(self) -> Any:
        return _no_hook, ()


class KeepingHook:
    """A hook of a module that does nothing, and keeps an object alive as long as the module. Copies lack the object."""

    def __init__(self, kept: object):
        self._kept = kept

    def __call__(self, *_: Any) -> None:
        pass

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    pass

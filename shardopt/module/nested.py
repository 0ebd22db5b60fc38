"""The tensors in what a module is given and returns."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def tensors_within(values: Any, depth: int = 3) -> Iterable[torch.Tensor]:
    """Returns the tensors in nested values, and in objects that pytree does not know (dataclasses, a library's output
    classes), ``depth`` levels deep."""
    if type(values) is torch.Tensor or isinstance(values, torch.Tensor):  # nearly always; a search takes far longer
        return (values,)
    if type(values) is tuple and {torch.Tensor}.issuperset(map(type, values)):
        return values
    leaves = torch.utils._pytree.tree_leaves(values)
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for leaf in leaves if depth else ():
        if not isinstance(leaf, (torch.Tensor, nn.Module, type)):
            names = getattr(leaf, "__dict__", getattr(leaf, "__slots__", ()))
            found += tensors_within([getattr(leaf, name, None) for name in names], depth - 1)
    return found


def with_own_nodes(given: Any, own: set[Any]) -> Any:
    """Returns the arguments of a call. Tensors among them get autograd nodes of their own, which are added to ``own``.

    What the call may write to (a list, a cache) stays what it is, with the tensors that it holds.
    """
    if isinstance(given, torch.Tensor) and given.requires_grad:
        view = given.view_as(given)
        own.add(view.grad_fn)
        return view
    if type(given) is tuple:
        return tuple(with_own_nodes(each, own) for each in given)
    return given

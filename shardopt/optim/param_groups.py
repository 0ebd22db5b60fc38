"""Checks new param groups, and matches those of a loaded state dict with the optimizer's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.optim.optimizer import ParamsT

from ..config import Options, check_process_group
from ..errors import ShardoptError
from ..rules import Rule

if TYPE_CHECKING:
    from ..config import OptionKeywords

Group = dict[str, Any]
Params: TypeAlias = ParamsT | torch.nn.Module
"""The first argument of a constructor: tensors, named tensors or param groups, as in torch; or a module."""

# Flags that torch accepts and shardopt cannot: what would go wrong, and what to do.
_REFUSED_FLAGS = {
    "capturable": "the step's scalars are computed on the host, so a captured graph would replay those of one step "
    "forever; pass capturable=False and run the step outside of the graph",
    "differentiable": "params are updated in place by one fused kernel, which autograd cannot see; pass "
    "differentiable=False, or use the torch class where gradients must flow through the step",
}


def read_arguments(
    name: str, params: Any, defaults: object, rule: Rule, options: OptionKeywords
) -> tuple[Any, Rule, Options]:
    """Returns the checked arguments of an optimizer's constructor: params, the rule with what options add, options.

    Args:
        name: of the optimizer's class.

    Raises:
        TypeError: an argument has another type.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"rule takes what shardopt.rule makes of a function, found {type(rule).__name__}.")
    if not isinstance(defaults, dict):
        raise TypeError(f"defaults takes a dict of hyper-parameters, found {type(defaults).__name__}.")
    unknown = [option for option in options if option not in Options.__dataclass_fields__]
    if unknown:
        raise TypeError(
            f"{name}.__init__() got an unexpected keyword argument {unknown[0]!r}; beyond "
            f"the rule's own hyper-parameters it takes {', '.join(Options.__dataclass_fields__)}."
        )
    if isinstance(params, torch.nn.Module):
        if options.get("module", params) is not params:
            raise TypeError(
                "a module was given as the first argument and another one as module=: only one can be taken over."
            )
        options["module"] = params
        params = list(params.parameters())
    elif not isinstance(params, Iterable):
        found = f"the class {params.__name__}" if isinstance(params, type) else type(params).__name__
        raise TypeError(
            f"pass the model, or model.parameters(): params takes a module, tensors or param groups, found {found}."
        )
    from .matrices import check_matrix_options

    keywords: dict[str, Any] = {**options}
    given = Options(**keywords)
    check_matrix_options(rule, given)
    if given.ema is not None:
        rule = rule.averaging(given.ema)
    return params, rule, given


def check_given(group: Any, defaults: Mapping[str, Any], name: str) -> None:
    """Checks a new param group before torch has filled in the defaults.

    Args:
        name: of the optimizer's class.

    Raises:
        TypeError: it is not a param group.
        ShardoptError: it sets a flag that a fused update cannot follow.
    """
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError(f"param_group must be a dict with 'params', found {type(group).__name__}.")
    for flag, reason in _REFUSED_FLAGS.items():
        if group.get(flag, defaults.get(flag)):
            raise ShardoptError(f"{name} was given {flag}=True: {reason}.")
    check_process_group(group.get("process_group"), "process_group of a param group")


def check_added(
    group: Group, rule: Rule, check_arguments: Callable[[Mapping[str, Any]], dict[str, Any]] | None
) -> None:
    """Checks a new param group once it has all hyper-parameters.

    Args:
        check_arguments: the check of a class with torch's arguments; it returns those that it knows.

    Raises:
        TypeError: a param is complex, or a hyper-parameter is not a number.
        ValueError: a hyper-parameter is out of its range, or makes a scalar of the update Inf or NaN.
        BindingError: the rule sums over rows and columns, and it is not known which of them a rank has of a DTensor.
    """
    # Not at the top: test_fresh_process.py limits what an import loads.
    from ..domain.hyperparameters import check_group
    from ..domain.norm_rules import check_slices
    from .matrices import check_matrices

    check_group(rule, group, check_arguments)
    check_matrices(rule, group)
    check_slices(rule, group["params"])
    if any(param.is_complex() for param in group["params"]):
        raise TypeError(
            "complex params are not supported: the fused update would drop their imaginary part. Use "
            "torch.view_as_real on the param, or give it to a torch.optim optimizer of its own."
        )


def matched(given: Sequence[Group], groups: Sequence[Group], defaults: Mapping[str, Any]) -> list[Group]:
    """Returns saved param groups with the optimizer's params in place of their numbers.

    Raises:
        ValueError: the groups do not match (torch's own messages).
    """
    saved = copy.deepcopy(list(given))
    if len(saved) != len(groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    if any(len(new["params"]) != len(own["params"]) for new, own in zip(saved, groups, strict=True)):
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
        )
    for new, own in zip(saved, groups, strict=True):
        new["params"] = own["params"]
        for key in ("param_names", "process_group", "rule", "matrices"):  # torch's dicts lack the last two
            if key in own:
                new.setdefault(key, own[key])
        for key, value in defaults.items():  # a dict saved before torch knew the flag, or where there is no such flag
            new.setdefault(key, own.get(key, value))
    return saved


def copied(state_dict: object) -> dict[str, Any]:
    """Returns a shallow copy, which hooks may change.

    Raises:
        TypeError: the argument is not a state dict.
    """
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise TypeError(
            f"state_dict takes what state_dict() returned, with 'state' and 'param_groups', found a "
            f"{type(state_dict).__name__}. Nothing was changed."
        )
    return state_dict.copy()

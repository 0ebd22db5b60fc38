"""Finds the class, params and arguments of the optimizer that a DeepSpeed config, or the script, asks for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import ShardoptError
from ...optim import classes as optim
from ...optim.optimizer import ShardedOptimizer
from ...rules.adam import adam, adam_scalars
from .keys import anything, flag, number, pair, text

if TYPE_CHECKING:
    from .keys import Keys, Kind

Construct = Callable[..., ShardedOptimizer]


# The function of (params, <shardopt's keywords>) that makes the optimizer, these params, and a state dict to load.
Wanted = tuple[Construct, Any, dict[str, Any] | None]


def has_betas(construct: Construct) -> bool:
    return "betas" in construct([torch.zeros(1, 1)]).defaults  # 2D, as Muon takes


def optimizer_of(keys: Keys, module: nn.Module, params: Any, given: Any) -> Wanted:
    """
    Args:
        params: tensors or param groups; None: the module's.
        given: replaces the section: an optimizer, a class, or a function of params; None: the section counts.
    """
    if given is not None:
        if keys.has("optimizer.type") or keys.has("optimizer.params"):
            keys.drop("optimizer")
            keys.warn("optimizer", "optimizer= was given, which replaces it")
        return _of_script(module, params, given)
    whole = list(module.parameters()) if params is None else params
    if keys.has("optimizer"):
        return _of_section(keys, whole)
    if _have_rates(whole):
        return optim.ShardedAdamW, whole, None
    keys.errors.append(
        "no optimizer section: give the script's own as from_deepspeed_config(..., optimizer=torch.optim.AdamW("
        "model.parameters(), lr=...)), or its class, or param groups with an 'lr' each, for AdamW"
    )
    return optim.ShardedAdamW, whole, None


def _have_rates(params: Any) -> bool:
    groups = params if isinstance(params, list | tuple) else []
    return bool(groups) and all(isinstance(group, Mapping) and "lr" in group for group in groups)


# -- from the script ---------------------------------------------------------------------------------------------------


def _of_script(module: nn.Module, params: Any, given: Any) -> Wanted:
    if isinstance(given, ShardedOptimizer):
        raise ShardoptError(
            "give the class as optimizer=, or a torch.optim optimizer: the config's stage and offload would not reach "
            f"a {type(given).__name__} that is already constructed."
        )
    inner = given.func if isinstance(given, functools.partial) else given
    if isinstance(inner, type) and issubclass(inner, ShardedOptimizer):
        return given, list(module.parameters()) if params is None else params, None
    if not isinstance(given, torch.optim.Optimizer):
        if not callable(given):
            raise ShardoptError(
                f"optimizer= takes an optimizer of torch.optim, its class, or a function of params that returns one, "
                f"found a {type(given).__name__}: {given!r}."
            )
        given = given(list(module.parameters()) if params is None else params)
        params = None
    if params is not None:
        raise ShardoptError("give optimizer= without params=, or its class: the optimizer already has params.")
    if not isinstance(given, torch.optim.Optimizer) or isinstance(given, ShardedOptimizer):
        raise ShardoptError(
            f"optimizer= must return an optimizer of torch.optim, it returned a {type(given).__name__}."
        )
    return _like(given)


def _like(given: torch.optim.Optimizer) -> Wanted:
    """Returns the sharded class of that name, with the same groups and states."""
    construct = _class_like(given)
    known = inspect.signature(construct).parameters
    defaults = {key: value for key, value in given.defaults.items() if key in known}
    replaced, groups = ("param_names", *_REPLACED.get(type(given).__name__, ())), []
    for group in given.param_groups:
        own = {key: value for key, value in group.items() if key not in replaced}
        if "param_names" in group:
            own["params"] = list(zip(group["param_names"], group["params"], strict=True))
        groups.append(own)
    return functools.partial(construct, **defaults), groups, given.state_dict() if given.state else None


def _class_like(given: torch.optim.Optimizer) -> type[ShardedOptimizer]:
    name = type(given).__name__
    if type(given) is getattr(torch.optim, name, None) and f"Sharded{name}" in optim.__all__:
        found: type[ShardedOptimizer] = getattr(optim, f"Sharded{name}")
        return found
    # DeepSpeed's and Apex's own kernels of the same rules.
    if name in ("FusedAdam", "DeepSpeedCPUAdam") and type(given).__module__.split(".")[0] in ("deepspeed", "apex"):
        decoupled = bool(getattr(given, "adam_w_mode", True))
        if all(group.get("bias_correction", True) for group in given.param_groups):
            return optim.ShardedAdamW if decoupled else optim.ShardedAdam
    names = ", ".join(each.removeprefix("Sharded") for each in optim.__all__)
    raise ShardoptError(
        f"give as optimizer= one of torch.optim ({names}), or a subclass of shardopt.ShardedOptimizer with a rule: the "
        f"update of {type(given).__module__}.{name} is not known, so another update would run."
    )


# Keys of groups that the choice of the class replaces.
_REPLACED = {"FusedAdam": ("bias_correction", "step"), "DeepSpeedCPUAdam": ("bias_correction",)}


# -- from the section --------------------------------------------------------------------------------------------------


def _uncorrected_scalars(group: Mapping[str, Any], step: int, carried: Mapping[str, float]) -> dict[str, float]:
    return {**adam_scalars(group, step, carried), "step_size": group["lr"], "bias_correction2_sqrt": 1.0}


# Adam and AdamW without bias correction: the first steps are small.
_UNCORRECTED = replace(adam, name="adam_uncorrected", scalars=_uncorrected_scalars)


def _uncorrected_adam(params: Any, plain: Construct, arguments: Mapping[str, Any], **options: Any) -> ShardedOptimizer:
    """Returns Adam or AdamW for ``"bias_correction": false``. ``plain``: the class with the correction."""
    return ShardedOptimizer(params, plain([torch.zeros(1)], **arguments).defaults, rule=_UNCORRECTED, **options)


# Defaults of DeepSpeed's constructors that differ from those of the classes here.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.0},
    "Adam": {"weight_decay": 0.0},
    "Lion": {"lr": 1e-3},
}
_NAMES = {each.removeprefix("Sharded").lower(): each.removeprefix("Sharded") for each in optim.__all__}


def _of_section(keys: Keys, params: Any) -> Wanted:
    kind = keys.take("optimizer.type", text, "AdamW")
    is_corrected = keys.take("optimizer.params.bias_correction", flag, True)
    is_torchs = keys.take("optimizer.params.torch_adam", flag, False)
    is_decoupled = keys.take("optimizer.params.adam_w_mode", flag, True)
    name = _NAMES.get(kind.lower(), "")
    if not name:
        keys.refuse("optimizer.type", kind, f"there are {', '.join(sorted(_NAMES.values()))}")
        keys.drop("optimizer.params")
        return optim.ShardedAdamW, params, None
    if name == "Adam" and is_decoupled:  # DeepSpeed's "Adam" decouples its decay too, unless adam_w_mode is false
        name = "AdamW"
    construct: Construct = getattr(optim, f"Sharded{name}")
    signature = inspect.signature(construct).parameters
    known = {key: each.default for key, each in signature.items() if key not in ("params", "options")}
    for key in keys.names_in("optimizer.params"):
        if key not in known:
            keys.drop(f"optimizer.params.{key}")
            keys.errors.append(f"optimizer.params.{key}: {kind} has no such argument{_INSTEAD.get(key, '')}")
    arguments = keys.take_all("optimizer.params", lambda key: _kind_of(known[key]))
    arguments = {**({} if is_torchs else _DEFAULTS.get(name, {})), **arguments}
    if is_corrected:
        construct = functools.partial(construct, **arguments)
    elif name in ("Adam", "AdamW"):
        construct = functools.partial(_uncorrected_adam, plain=construct, arguments=arguments)
    else:
        keys.refuse("optimizer.params.bias_correction", False, f"{kind} has no such argument")
    try:
        construct([torch.zeros(1)])
    except (TypeError, ValueError) as error:
        keys.errors.append(f"optimizer.params: {str(error).removesuffix('.')}")
        return optim.ShardedAdamW, params, None
    return construct, params, None


_INSTEAD = {"max_grad_norm": " (gradient_clipping is the key for it)"}


def _kind_of(default: Any) -> Kind:
    """Returns the kind of value that a constructor takes, by its default."""
    if isinstance(default, bool) or default is None:
        return flag
    if isinstance(default, tuple):
        return pair
    return number if isinstance(default, int | float) else anything

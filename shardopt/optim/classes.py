"""The public optimizers: ``Sharded`` + the torch name, with torch's arguments, then shardopt's keywords.

A class here is its signature: :func:`like` lets the torch class of the same name check the arguments and name the keys
of the param groups, so that defaults and error messages are torch's to the letter, and hands over the rule. What the
keywords after torch's mean is told by :class:`shardopt.config.Options`; ``scripts/options.py`` writes them into each
docstring, and ``help()`` has their meanings.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

import torch
from torch import Tensor

from ..arguments import flag, number, plain
from ..rules.adadelta import adadelta
from ..rules.adagrad import adagrad
from ..rules.adam import adam
from ..rules.adamax import adamax
from ..rules.asgd import asgd
from ..rules.lion import lion
from ..rules.nadam import nadam
from ..rules.radam import radam
from ..rules.rmsprop import rmsprop
from ..rules.rprop import rprop
from ..rules.sgd import sgd
from .optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from ..config import OptionKeywords
    from ..rules.rule import Rule
    from .param_groups import Params

__all__ = [
    "ShardedASGD",
    "ShardedAdadelta",
    "ShardedAdagrad",
    "ShardedAdam",
    "ShardedAdamW",
    "ShardedAdamax",
    "ShardedLion",
    "ShardedNAdam",
    "ShardedRAdam",
    "ShardedRMSprop",
    "ShardedRprop",
    "ShardedSGD",
]

Init = TypeVar("Init", bound=Callable[..., None])


Defaults = Callable[..., dict[str, Any]]
_RECIPES: dict[Callable[..., None], tuple[Rule, Callable[[], dict[str, Any]]]] = {}


def like(
    made: type[torch.optim.Optimizer] | Defaults, rule: Rule, chosen_by: Mapping[str, Callable[[], Rule]] | None = None
) -> Callable[[Init], Init]:
    """Make the ``__init__`` of a sharded optimizer out of its bare signature ``(self, params, ..., **options)``.

    Args:
        made: the torch class whose arguments these are, or what makes the defaults of param groups of them; it raises
            what is wrong with them.
        chosen_by: numbers above 0 that torch's class does not take, None by default: each is a key of the param groups
            when it is given, and the rule is the one that is returned then.
    """
    choosers = chosen_by or {}

    def decorate(signature_only: Init) -> Init:
        signature = inspect.signature(signature_only)
        others = ("self", "params", "options", *choosers)
        own = {name: each for name, each in signature.parameters.items() if name not in others}

        def check_group(chosen: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
            """What a param group says of the arguments, checked as they are."""
            arguments = {name: _checked(each, group[name]) for name, each in own.items() if name in group}
            defaults_of(made, arguments)
            for name in choosers:
                if name in chosen and name in group:
                    arguments[name] = number(group[name], name, above=0)
                elif group.get(name) is not None:
                    raise ValueError(
                        f"give {name} to the optimizer too, {name}=inf for groups without it: a param group says "
                        f"{name}={group[name]!r}, which the optimizer's rule does not read."
                    )
            return arguments

        def default_group() -> dict[str, Any]:
            return defaults_of(made, {name: each.default for name, each in own.items()})

        @functools.wraps(signature_only)
        def __init__(self: ShardedOptimizer, *positional: Any, **keywords: Any) -> None:
            bound = signature.bind(self, *positional, **keywords)
            bound.apply_defaults()
            arguments = bound.arguments
            params, options = arguments["params"], arguments["options"]
            given = {name: _checked(each, arguments[name]) for name, each in own.items()}
            defaults = defaults_of(made, given)
            chosen = {name: arguments[name] for name in choosers if arguments[name] is not None}
            defaults |= {name: number(value, name, above=0) for name, value in chosen.items()}
            self._check_group, self._given = functools.partial(check_group, chosen), given
            self._unread = tuple(name for name in choosers if name not in chosen)
            of_these = next((choosers[name]() for name in chosen), rule)
            ShardedOptimizer.__init__(self, params, defaults, rule=of_these, **options)

        _RECIPES[__init__] = rule, default_group
        return cast(Init, __init__)

    return decorate


def checked_for(kind: type[ShardedOptimizer], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of a class of this module as its constructor takes them, or raises its errors."""
    signature = inspect.signature(kind.__init__)
    return {name: _checked(signature.parameters[name], value) for name, value in arguments.items()}


def _stable_adamw() -> Rule:
    from ..rules.stable_adamw import stable_adamw  # not at the top: test_fresh_process.py limits what an import loads

    return stable_adamw


def recipe(kind: type[ShardedOptimizer]) -> tuple[Rule, dict[str, Any]]:
    """The rule of a class of this module, and the defaults of its param groups.

    Without an optimizer: to construct one torch imports its compiler, for seconds.
    """
    rule, default_group = _RECIPES[kind.__init__]
    return rule, default_group()


def _checked(parameter: inspect.Parameter, value: Any) -> Any:
    """The value, in Python's own type where it is NumPy's; its range is for torch to judge.

    Raises:
        TypeError: it is not a number, flag or tuple of numbers, as the parameter's default is.
    """
    default, name = parameter.default, parameter.name
    if "str" in str(parameter.annotation) or "Mapping" in str(parameter.annotation):
        return value  # for what makes the defaults to judge
    if default is None or isinstance(default, bool):
        return None if value is None and default is None else flag(value, name, or_none=" or None" * (default is None))
    may_be_tensor = "Tensor" in str(parameter.annotation)
    if not isinstance(default, tuple):
        return _number(value, name, may_be_tensor)
    if not isinstance(value, tuple | list) or len(value) != len(default):
        raise TypeError(f"{name} takes {len(default)} numbers, as {default}, found {value!r}.")
    return type(value)(
        None if each is None and own is None else _number(each, f"{name}[{index}]", may_be_tensor)
        for index, (each, own) in enumerate(zip(value, default, strict=True))
    )


def _number(value: Any, name: str, may_be_tensor: bool) -> Any:
    """Of Python; a tensor where torch takes one, since a scheduler may write to it."""
    with suppress(ValueError):  # NaN, for which torch has words of its own
        found = number(value, name)
        if isinstance(value, torch.Tensor) and not may_be_tensor:
            return found
    return plain(value)


@functools.cache
def _bare(torch_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same without torch's own ``add_param_group``, which imports its compiler."""

    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        self.param_groups.append({**self.defaults, **param_group})

    return type(torch_class.__name__, (torch_class,), {"add_param_group": add_param_group})


def _refuse_nan(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for one that torch let pass: no rule can use it, if not at the first step."""
    for name, value in arguments.items():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, float | torch.Tensor):
                number(each, name)


def defaults_of(made: type[torch.optim.Optimizer] | Defaults, arguments: dict[str, Any]) -> dict[str, Any]:
    """The param groups' defaults, as torch makes them of these arguments, or torch's error."""
    if isinstance(made, type):
        construct = cast(Callable[..., torch.optim.Optimizer], _bare(made))
        defaults = construct([torch.empty(0, 0, device="cpu")], **arguments).defaults
    else:
        defaults = made(**arguments)
    _refuse_nan(arguments)
    return defaults


class ShardedAdamW(ShardedOptimizer):
    r"""AdamW (Loshchilov and Hutter, arXiv 1711.05101), sharded.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        \theta_t &= \theta_{t-1} (1 - \gamma\lambda)
            - \gamma \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    Arguments are those of :class:`torch.optim.AdamW`, and ``clip_update`` (StableAdamW, arXiv 2304.13013): where the
    root of the mean of :math:`g_t^2 / \max(\hat v_t, \epsilon^2)` over a whole param passes it (1.0 is usual), the
    param's learning rate is divided by their quotient. A step takes two passes over the shards then.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, release_gradients=False,
    reduce_dtype=None, offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedAdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    """

    # As in torch: the states of an Adam do not turn this into one.
    _fixed = MappingProxyType({"decoupled_weight_decay": True})

    @like(torch.optim.AdamW, rule=adam, chosen_by={"clip_update": _stable_adamw})
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        clip_update: float | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedAdam(ShardedOptimizer):
    r"""Adam (Kingma and Ba, arXiv 1412.6980), sharded.

    .. math::
        g_t &\leftarrow g_t + \lambda \theta_{t-1} \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        \theta_t &= \theta_{t-1} - \gamma \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    Arguments are those of :class:`torch.optim.Adam`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, release_gradients=False,
    reduce_dtype=None, offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedAdam(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    """

    @like(torch.optim.Adam, rule=adam)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedSGD(ShardedOptimizer):
    r"""Stochastic gradient descent with momentum (Sutskever, Martens, Dahl and Hinton, 2013), sharded.

    .. math::
        g_t &\leftarrow g_t + \lambda \theta_{t-1} \\
        b_t &= \mu b_{t-1} + (1 - \tau) g_t, \qquad b_1 = g_1 \\
        \theta_t &= \theta_{t-1} - \gamma b_t

    Arguments are those of :class:`torch.optim.SGD`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, release_gradients=False,
    reduce_dtype=None, offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedSGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    """

    @like(torch.optim.SGD, rule=sgd)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedAdagrad(ShardedOptimizer):
    r"""Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011), sharded.

    .. math::
        g_t &\leftarrow g_t + \lambda \theta_{t-1}, \qquad G_t = G_{t-1} + g_t^2 \\
        \theta_t &= \theta_{t-1} - \frac{\gamma}{1 + (t - 1) \eta} \frac{g_t}{\sqrt{G_t} + \epsilon}

    Arguments are those of :class:`torch.optim.Adagrad`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, release_gradients=False,
    reduce_dtype=None, offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedAdagrad(model.parameters(), lr=0.01)
    """

    @like(torch.optim.Adagrad, rule=adagrad)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedRMSprop(ShardedOptimizer):
    r"""RMSprop (Hinton, lecture 6 of Neural Networks for Machine Learning, 2012), sharded.

    .. math::
        g_t &\leftarrow g_t + \lambda \theta_{t-1}, \qquad v_t = \alpha v_{t-1} + (1 - \alpha) g_t^2 \\
        b_t &= \mu b_{t-1} + g_t / (\sqrt{v_t} + \epsilon) \\
        \theta_t &= \theta_{t-1} - \gamma b_t

    Arguments are those of :class:`torch.optim.RMSprop`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, release_gradients=False,
    reduce_dtype=None, offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedRMSprop(model.parameters(), lr=0.01, momentum=0.9, centered=True)
    """

    @like(torch.optim.RMSprop, rule=rmsprop)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedNAdam(ShardedOptimizer):
    r"""NAdam (Dozat, Incorporating Nesterov Momentum into Adam, 2016), sharded.

    .. math::
        \mu_t &= \beta_1 (1 - \tfrac{1}{2} \, 0.96^{t \psi}) \\
        \hat m_t &= \frac{\mu_{t+1} m_t}{1 - \prod_{i \le t+1} \mu_i}
            + \frac{(1 - \mu_t) g_t}{1 - \prod_{i \le t} \mu_i} \\
        \theta_t &= \theta_{t-1} - \gamma \frac{\hat m_t}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    with Adam's moments :math:`m` and :math:`v`. Arguments are those of :class:`torch.optim.NAdam`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, release_gradients=False,
    reduce_dtype=None, offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedNAdam(model.parameters(), lr=2e-3)
    """

    @like(torch.optim.NAdam, rule=nadam)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedRAdam(ShardedOptimizer):
    r"""RAdam (Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, arXiv 1908.03265), sharded.

    .. math::
        \theta_t = \theta_{t-1} - \gamma \frac{m_t}{1 - \beta_1^t}
            \cdot r_t \frac{\sqrt{1 - \beta_2^t}}{\sqrt{v_t} + \epsilon}

    with Adam's moments :math:`m` and :math:`v`; the factor after the dot is left out while the variance of the second
    moment is intractable, :math:`\rho_t \le 5`. Arguments are those of :class:`torch.optim.RAdam`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, release_gradients=False,
    reduce_dtype=None, offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedRAdam(model.parameters(), lr=1e-3, weight_decay=0.01, decoupled_weight_decay=True)
    """

    @like(torch.optim.RAdam, rule=radam)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedAdamax(ShardedOptimizer):
    r"""Adamax (Kingma and Ba, arXiv 1412.6980, section 7), sharded.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad u_t = \max(\beta_2 u_{t-1}, |g_t| + \epsilon) \\
        \theta_t &= \theta_{t-1} - \frac{\gamma}{1 - \beta_1^t} \frac{m_t}{u_t}

    Arguments are those of :class:`torch.optim.Adamax`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, release_gradients=False,
    reduce_dtype=None, offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedAdamax(model.parameters(), lr=2e-3)
    """

    @like(torch.optim.Adamax, rule=adamax)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedAdadelta(ShardedOptimizer):
    r"""Adadelta (Zeiler, arXiv 1212.5701), sharded.

    .. math::
        v_t &= \rho v_{t-1} + (1 - \rho) g_t^2, \qquad
        \Delta_t = \frac{\sqrt{u_{t-1} + \epsilon}}{\sqrt{v_t + \epsilon}} \, g_t \\
        u_t &= \rho u_{t-1} + (1 - \rho) \Delta_t^2, \qquad \theta_t = \theta_{t-1} - \gamma \Delta_t

    Arguments are those of :class:`torch.optim.Adadelta`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, release_gradients=False,
    reduce_dtype=None, offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedAdadelta(model.parameters(), rho=0.95)
    """

    @like(torch.optim.Adadelta, rule=adadelta)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedASGD(ShardedOptimizer):
    r"""Averaged stochastic gradient descent (Polyak and Juditsky, SIAM J. Control Optim. 30, 1992), sharded.

    .. math::
        \theta_t &= \theta_{t-1} (1 - \lambda \eta_t) - \eta_t g_t, \qquad
        \eta_{t+1} = \gamma / (1 + \lambda \gamma t)^\alpha \\
        a_t &= a_{t-1} + \mu_t (\theta_t - a_{t-1}), \qquad \mu_{t+1} = 1 / \max(1, t - t_0)

    The average :math:`a` is the state ``ax``. Arguments are those of :class:`torch.optim.ASGD`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, release_gradients=False,
    reduce_dtype=None, offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedASGD(model.parameters(), lr=0.01, t0=1000)
    """

    @like(torch.optim.ASGD, rule=asgd)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


class ShardedRprop(ShardedOptimizer):
    r"""Rprop (Riedmiller and Braun, ICNN 1993), sharded.

    .. math::
        \Delta_t &= \operatorname{clamp}(\eta_t \Delta_{t-1}, \Delta_{\min}, \Delta_{\max}), \qquad \Delta_0 = \gamma \\
        \theta_t &= \theta_{t-1} - \operatorname{sign}(g_t) \Delta_t

    :math:`\eta_t` is ``etas[1]`` where the gradient kept its sign, ``etas[0]`` where it changed (:math:`g_t` then
    counts as 0), else 1. Arguments are those of :class:`torch.optim.Rprop`.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, release_gradients=False,
    reduce_dtype=None, offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedRprop(model.parameters(), lr=0.01)
    """

    @like(torch.optim.Rprop, rule=rprop)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50),
        *,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...


def _lion_defaults(
    lr: float | Tensor = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> dict[str, Any]:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not 0.0 <= lr < math.inf:
        raise ValueError(f"Invalid learning rate: {lr}")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not 0.0 <= weight_decay < math.inf:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
    return {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}


class ShardedLion(ShardedOptimizer):
    r"""Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675), sharded.

    .. math::
        \theta_t &= \theta_{t-1} (1 - \gamma\lambda)
            - \gamma \operatorname{sign}(\beta_1 m_{t-1} + (1 - \beta_1) g_t) \\
        m_t &= \beta_2 m_{t-1} + (1 - \beta_2) g_t

    Args:
        params: as for every torch optimizer.
        lr: a third to a tenth of AdamW's, as every element moves by all of it.
        betas: of the interpolation and of the momentum.
        weight_decay: decoupled, as AdamW's; three to ten times as large for the same ``lr * weight_decay``.
        maximize: ascend instead of descend.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, release_gradients=False,
    reduce_dtype=None, offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedLion(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

    @like(_lion_defaults, rule=lion)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> None: ...

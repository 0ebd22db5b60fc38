"""Muon for matrices of hidden layers, and AdamW for all other params, in one optimizer."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from ..arguments import mapping, number, whole
from ..errors import ShardoptError
from ..rules.adam import adam
from ..rules.choice import KEY, PUBLISHED_KEYS, RuleChoice
from ..rules.muon import muon
from .classes import ShardedAdamW
from .like import checked_for, defaults_of, like
from .matrices import apart_from_matrices, split_params
from .named_rules import warn_of_unread, with_rule
from .optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from ..config import OptionKeywords
    from .param_groups import Params

__all__ = ["ShardedMuon"]

_MUON, _ADAMW = "muon", "adamw"
_ADAMW_ARGUMENTS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "fused")
# Keys of groups that something reads, beside Muon's own.
_READ = {
    *_ADAMW_ARGUMENTS,
    *("capturable", "differentiable", "decoupled_weight_decay", "use_muon", "use_adamw", KEY, *PUBLISHED_KEYS),
}


def _muon_defaults(adamw: Mapping[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    """Returns the defaults of param groups that ``torch.optim.Muon`` makes, or raises its error."""
    number(arguments.get("eps", 0), "eps", least=0)
    if whole(arguments.get("ns_steps", 0), "ns_steps", least=0) >= 100:  # torch says so in the first step
        raise ValueError("Number of steps must be less than 100 for computational efficiency")
    given = mapping(adamw, "adamw", "{'lr': 3e-4}")
    unknown = [name for name in given if name not in _ADAMW_ARGUMENTS]
    if unknown:
        raise TypeError(
            f"adamw takes arguments of torch.optim.AdamW, {', '.join(_ADAMW_ARGUMENTS)}, found {unknown[0]!r}."
        )
    _of_adamw(given)
    return defaults_of(torch.optim.Muon, arguments)


def _of_adamw(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of AdamW's param groups with these arguments, or raises its error."""
    return defaults_of(torch.optim.AdamW, checked_for(ShardedAdamW, arguments))


class ShardedMuon(ShardedOptimizer):
    r"""Muon (Jordan et al., 2024), sharded: momentum whose singular values are all made about 1.

    .. math::
        B_t &= \mu B_{t-1} + (1 - \mu) g_t, \qquad
            \tilde B_t = (1 - \mu) g_t + \mu B_t \ \text{(Nesterov)} \\
        \theta_t &= \theta_{t-1} (1 - \gamma\lambda) - \gamma r(\theta) \, \mathrm{NS}_k(\tilde B_t)

    Arguments are those of :class:`torch.optim.Muon`. Each matrix is made whole on one rank, once a step, and the bits
    are torch's for fp32 params, at every stage and number of ranks.

    Param groups may say ``rule="muon"`` or ``rule="adamw"``, or as published scripts do ``use_muon=True``,
    ``kind="adamw"`` or ``algorithm="adamw"``. Where the module is handed over, a group that says neither
    is split: 2D weights of hidden layers take Muon; embeddings, heads, norms, biases and all else take AdamW, with
    AdamW's own defaults. ``print(optimizer)`` shows which param took which. ``matrices=3`` in a group cuts each of its
    params into three along the first dimension (a fused qkv), ``matrices=(32, 8, 8)`` into matrices of so many rows;
    ``matrices="stack"`` takes 3D params as stacks.

    Args:
        adamw: arguments of :class:`torch.optim.AdamW` for params that take AdamW, such as ``dict(lr=3e-4)``.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    Example:
        >>> optimizer = ShardedMuon(model, lr=0.02, adamw=dict(lr=3e-4), stage=2)
    """

    @like(_muon_defaults, rule=RuleChoice.among({_MUON: muon, _ADAMW: adam}))
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None: ...

    @classmethod
    def _groups_of(
        cls, module: nn.Module, defaults: Mapping[str, Any], given: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        hidden, others = split_params({"params": module.parameters()}, apart_from_matrices(module))
        of_adamw = _of_adamw(given.get("adamw") or {})
        return [{**defaults, "params": hidden, KEY: _MUON}, {**defaults, **of_adamw, "params": others, KEY: _ADAMW}]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See :meth:`ShardedOptimizer.add_param_group`. A group that is split becomes two."""
        count = len(self.param_groups)
        try:
            for each in self._split(param_group):
                super().add_param_group(each)
        except Exception:
            del self.param_groups[count:]
            raise

    def _split(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        if not isinstance(group, dict) or "params" not in group:
            return [group]  # add_param_group() of the base class refuses it
        assert isinstance(self.rule, RuleChoice)
        given, group = group, with_rule(self.rule, group)
        warn_of_unread(given, self.param_groups, _READ | self.defaults.keys())
        if KEY in group or self.options.module is None:
            return [self._filled(group)]
        hidden, others = split_params(group, self._apart)
        if hidden and others and "lr" in group:
            raise ShardoptError(
                f"say rule='muon' or rule='adamw' in groups of their own: a group with lr={group['lr']} holds "
                f"{len(hidden)} matrices of hidden layers, which take Muon, and {len(others)} other params, which take "
                "AdamW. Learning rates of the two differ widely, and this one would be lost for one of them."
            )
        split = [{**group, "params": hidden, KEY: _MUON}, {**group, "params": others, KEY: _ADAMW}]
        return [self._filled(each) for each in split if each["params"]]

    def _filled(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the group, with AdamW's defaults if that is its rule: never with Muon's learning rate."""
        if group.get(KEY) != _ADAMW:
            return group
        given = _of_adamw(self._given["adamw"] or {})
        _of_adamw({name: value for name, value in group.items() if name in _ADAMW_ARGUMENTS})
        return {**given, **group}

    @property
    def _apart(self) -> set[Tensor]:
        module = self.options.module
        return set() if module is None else apart_from_matrices(module)

    def __repr__(self) -> str:
        took = [f"{word}: {', '.join(names)}" for word, names in self._took().items()]
        lines = [textwrap.fill(each, 120, initial_indent="    ", subsequent_indent="        ") for each in took]
        return "\n".join([super().__repr__()[:-2], *lines, ")"])

    def _took(self) -> dict[str, list[str]]:
        """Returns the names of the params that each rule updates; shapes of those without a name."""
        module = self.options.module
        named = {} if module is None else {param: name for name, param in module.named_parameters()}
        took: dict[str, list[str]] = {}
        for group in self.param_groups:
            names = group.get("param_names") or [
                named.get(param, f"of shape {tuple(param.shape)}") for param in group["params"]
            ]
            took.setdefault(group.get(KEY, _MUON), []).extend(names)
        return took

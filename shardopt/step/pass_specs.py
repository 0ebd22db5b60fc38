"""The specs of the kernels that one launch takes: one, or one for each pass of a rule that looks at whole params."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..kernels.pass_spec import PassSpec
from ..rules.passes import passes_of
from ..rules.rule import Variant

if TYPE_CHECKING:
    from ..kernels.spec import StepSpec


@functools.cache
def pass_specs(spec: StepSpec) -> tuple[StepSpec, ...]:
    """Returns what a launch of this spec is compiled for, in the order of the passes."""
    variant = spec.variant
    if not (isinstance(variant, Variant) and variant.reductions):
        return (spec,)
    return tuple(PassSpec(each, spec.param, spec.grad, spec.master, spec.states) for each in passes_of(variant))

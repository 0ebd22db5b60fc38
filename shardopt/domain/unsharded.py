"""Contexts in which params show whole weights at stage 3, or the moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..arguments import flag
from ..errors import ShardoptError
from .agreement import StepDigest, agree, agree_on_call
from .averaged import averaged, has_average
from .domain import Domain
from .exact_params import exact_params, put_away

if TYPE_CHECKING:
    from ..rules import Rule
    from .sharded_params import ShardedParams


@contextmanager
def unsharded(domains: Sequence[Domain], rule: Rule, ema: object) -> Iterator[None]:
    """Collective where params are sharded or averages are shown: see :meth:`ShardedOptimizer.unsharded`.

    Args:
        domains: the main one first; empty before the first step.
    """
    domain, averages = next(iter(domains), None), list[Domain]()
    asked: bool | None = None
    with suppress(TypeError):  # raised below, on all ranks
        asked = flag(ema, "ema")

    def read() -> dict[str, Any]:
        if flag(ema, "unsharded(ema=)"):
            averages.extend(_averaging(domains, rule))
        return {"ema": asked}

    # Below stage 3 every rank has its weights, and need not wait for another one, unless they are rounded.
    is_whole = domain is None or (domain.sharded is None and not domain.codes_updates)
    is_whole = is_whole and not any(shard.is_cast for each in domains for shard in each.shards)
    if domain is None or (is_whole and (rule.average is None or asked is False)):
        read()
    else:
        agree_on_call("unsharded()", read, domain.mesh.world)
    from .shown_params import shown_exactly  # no more is loaded than is used

    with ExitStack() as stack:
        for each in [] if averages else domains:
            stack.enter_context(each.shown_whole())
        for each in averages:
            stack.enter_context(put_away(each))
            stack.enter_context(averaged(each))
        for each in [] if averages else domains:
            if each.sharded is not None:
                stack.enter_context(each.sharded.unsharded())
            elif each.codes_updates:
                stack.enter_context(shown_exactly(each))
        for each in [] if averages else domains:
            stack.enter_context(exact_params(each))
        yield


def _averaging(domains: Sequence[Domain], rule: Rule) -> list[Domain]:
    """Returns the domains that have an average. Experts without a token so far have none yet."""
    if rule.average is None:
        raise ShardoptError(
            "construct the optimizer with ema=0.999, say: unsharded(ema=True) was called and no average of the weights "
            "is kept. An average begins with the next step."
        )
    check_weights(domains, "unsharded(ema=True)")
    found = [each for each in domains if has_average(each)]
    if not found:
        raise ShardoptError("take a step before unsharded(ema=True): there is no average yet.")
    return found


def check_weights(domains: Sequence[Domain], call: str) -> None:
    """Raises ShardoptError while params show the average of the weights."""
    for domain in domains:
        if domain.is_averaged:
            raise ShardoptError(
                f"leave `with optimizer.unsharded(ema=True):` before {call}: inside, the params are the average of the "
                "weights, and would be taken for the weights."
            )


def check_not_unsharded(domains: Sequence[Domain], call: str) -> None:
    """Raises ShardoptError inside of ``unsharded()`` at stage 3, where an update in backward would be undone."""
    if any(_unsharded(domains)):
        raise ShardoptError(
            f"leave `with optimizer.unsharded():` before {call} at stage 3: the end of the context writes the whole "
            "params back, over the update."
        )


def _unsharded(domains: Sequence[Domain]) -> Iterator[ShardedParams]:
    for domain in domains:
        if domain.sharded is not None and domain.sharded.gatherer.here.unsharded_contexts:
            yield domain.sharded


def is_resharded(domains: Sequence[Domain]) -> bool:
    """True outside of ``unsharded()``, where :func:`resharded` does nothing."""
    for domain in domains:
        if domain.exact is not None or (domain.sharded is not None and domain.sharded.gatherer.here.unsharded_contexts):
            return False
    return True


@contextmanager
def resharded(domains: Sequence[Domain], problem: Exception | None) -> Iterator[None]:
    """A context for a step, collective inside of ``unsharded()``: slices have what was written, and params are sharded.

    After the step, params are whole again and hold their new values. Outside ``unsharded()`` it does nothing.

    Args:
        domains: the main one first.
        problem: why this rank cannot take the step.
    """
    found, exact = list(_unsharded(domains)), [each for each in domains if each.exact is not None]
    if found or exact:
        view = {"step() in unsharded()": True}
        agree(StepDigest(view, lambda: view, problem), domains[0].mesh.world)
    with ExitStack() as stack:
        for domain in exact:
            stack.enter_context(put_away(domain))
        for each in found:
            stack.enter_context(each.resharded())
        yield

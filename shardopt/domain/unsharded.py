"""What params show for a while: whole weights at stage 3, or the moving average of the weights."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from ..arguments import flag
from ..errors import ShardoptError
from ..rules import Rule
from .agreement import agree_on_call
from .averaged import averaged, has_average
from .domain import Domain


@contextmanager
def unsharded(domains: Sequence[Domain], rule: Rule, ema: object) -> Iterator[None]:
    """Collective where params are sharded or averages are shown: see :meth:`ShardedOptimizer.unsharded`.

    Args:
        domains: the main one first; none before the first step.
    """
    domain, averages = next(iter(domains), None), list[Domain]()
    asked: bool | None = None
    with suppress(TypeError):  # which is raised below, on all ranks
        asked = flag(ema, "ema")

    def read() -> dict[str, Any]:
        if flag(ema, "unsharded(ema=)"):
            averages.extend(_averaging(domains, rule))
        return {"ema": asked}

    # Below stage 3 a rank that asks for its weights has them, and need not wait for anybody.
    if domain is None or (domain.sharded is None and (rule.average is None or asked is False)):
        read()
    else:
        agree_on_call("unsharded()", read, domain.mesh.world, domain.device)
    with ExitStack() as stack:
        for each in averages:
            stack.enter_context(averaged(each))
        if not averages and domain is not None and domain.sharded is not None:
            stack.enter_context(domain.sharded.unsharded())
        yield


def _averaging(domains: Sequence[Domain], rule: Rule) -> list[Domain]:
    """Those that have an average. Experts that no token came to have none yet, on some ranks of the model."""
    if rule.average is None:
        raise ShardoptError(
            "unsharded(ema=True) was called and no average of the weights is kept: construct the optimizer with "
            "ema=0.999, say; it begins with the next step."
        )
    check_weights(domains, "unsharded(ema=True)")
    found = [each for each in domains if has_average(each)]
    if not found:
        raise ShardoptError("unsharded(ema=True) was called before the first step: there is no average yet.")
    return found


def check_weights(domains: Sequence[Domain], call: str) -> None:
    """Raises ShardoptError where params show the average of the weights."""
    if any(domain.is_averaged for domain in domains):
        raise ShardoptError(
            f"{call} inside of `with optimizer.unsharded(ema=True):`, where the params are the average of the "
            "weights: it would take them for the weights, which come back behind it. Leave the context first."
        )


def check_gathered_by_nobody(domains: Sequence[Domain]) -> None:
    """Raises ShardoptError inside of ``unsharded()``, where a step would be undone."""
    if any(domain.sharded is not None and domain.sharded.shown for domain in domains):
        raise ShardoptError(
            "step() inside of `with optimizer.unsharded():` at stage 3: the whole params that are shown there "
            "would be out of date, and be written over the update behind it. Leave the context first."
        )

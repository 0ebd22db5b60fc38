"""Which optimizers can train with uneven inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..domain.dtensors import any_dtensor
from ..errors import ShardoptError

if TYPE_CHECKING:
    from ..engine import Engine


def check_can_join(engine: Engine) -> None:
    """Raises ShardoptError if a rank that has run out of batches could not follow the others."""
    options, takeover, why = engine.options, engine.takeover, None
    if options.release_gradients:
        why = (
            "release_gradients=True takes the steps inside of backward, and a rank that has run out runs none. "
            "Construct the optimizer without it"
        )
    elif (
        options.norm_group is not None
        or any(group.get("process_group") is not None for group in engine.groups)
        or any_dtensor(engine.params)
    ):
        why = (
            "the model is composed with tensor, pipeline or expert parallelism, whose ranks need each other's batches. "
            "Omit join()"
        )
    elif takeover is not None and takeover.coverage.averages_for_others():
        why = (
            "params of the module are in an optimizer that is not shardopt's, in whose steps such a rank takes no "
            "part. Put them into a param group"
        )
    elif takeover is not None and takeover.coverage.is_shared:
        why = (
            "several optimizers took the module over, and a rank that has run out can follow one. Use one with several "
            "param groups"
        )
    if why is not None:
        raise ShardoptError(
            f"join() was asked to let ranks run out of batches, and {why}, or give all ranks equally many batches. "
            "Otherwise ranks that have a batch would wait for one that has none."
        )

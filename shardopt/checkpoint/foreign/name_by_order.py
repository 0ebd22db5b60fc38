"""Names the params of an optimizer that was saved without names."""

from collections.abc import Mapping, Sequence

from ...errors import CheckpointError

Shape = tuple[int, ...]


def name_by_order(groups: Sequence[Sequence[Shape | None]], candidates: Mapping[str, Shape]) -> list[list[str]]:
    """Returns names for the params of each group.

    The params of a group are in the order of the model, as ``model.parameters()`` or a comprehension over it yields
    them. How groups divide the model is clear only if no shape occurs in two groups.

    Args:
        groups: the shape of each param; None for a param without a state.
        candidates: params of the model, in its order.

    Raises:
        CheckpointError: no names fit, or several do.
    """
    shapes = [set(group) for group in groups]
    for index, one in enumerate(shapes):
        for other in shapes[index + 1 :]:
            if one & other or (None in one | other):
                raise _unclear(f"two groups have params of the shape {sorted(one & other, key=str) or 'unknown'}")
    named = []
    for group in groups:
        fitting = [(name, shape) for name, shape in candidates.items() if None in group or shape in group]
        ways = _ways(group, [shape for _, shape in fitting])
        if ways[len(group)][len(fitting)] != 1:
            raise _unclear(
                f"{len(group)} params fit {len(fitting)} tensors of the model in {ways[len(group)][len(fitting)]} ways"
            )
        named.append([fitting[index][0] for index in _only_way(group, [shape for _, shape in fitting], ways)])
    return named


def _ways(group: Sequence[Shape | None], shapes: Sequence[Shape]) -> list[list[int]]:
    """``[i][j]``: in how many ways the first ``i`` params are found, in order, among the first ``j`` shapes."""
    ways = [[1] * (len(shapes) + 1)]
    for param in group:
        row = [0]
        for at, shape in enumerate(shapes):
            row.append(row[at] + (ways[-1][at] if param is None or param == shape else 0))
        ways.append(row)
    return ways


def _only_way(group: Sequence[Shape | None], shapes: Sequence[Shape], ways: Sequence[Sequence[int]]) -> list[int]:
    found, at = [], len(shapes)
    for index in range(len(group), 0, -1):
        while ways[index][at] == ways[index][at - 1]:
            at -= 1
        at -= 1
        found.append(at)
    return found[::-1]


def _unclear(what: str) -> CheckpointError:
    return CheckpointError(
        "give --names FILE, one name a line, for each group of optimizer.param_groups, for each of its params: the "
        f"optimizer knows its params by number only, and {what}. Nothing was written."
    )

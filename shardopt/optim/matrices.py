"""Which params a rule of whole matrices takes, and which params of a module AdamW should take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..domain.hyperparameters import plain_numbers
from ..domain.matrix_placement import matrix_placement_of
from ..errors import ShardoptError
from ..partition.layout import BLOCK
from ..rules.matrix import STACK, MatrixRule, check_runs, matrices_of, scalars_of_matrices
from ..tensors.strides import dense_strides

if TYPE_CHECKING:
    from ..config import Options
    from ..rules import Rule

# Names of the last layer of a model, for models without an embedding of the same size.
_HEADS = ("lm_head", "head", "output", "out", "classifier", "score", "unembed", "fc_out")


def check_matrix_options(rule: Rule, options: Options) -> None:
    """Raises ShardoptError for options that a rule of whole matrices cannot follow."""
    if not any(isinstance(each, MatrixRule) for each in rules_in(rule)):
        return
    if options.release_gradients:
        raise ShardoptError(
            f"omit release_gradients=True: {rule.name!r} needs every matrix whole, and gradients are released bucket "
            "by bucket in mid-backward, when slices of a matrix are on other ranks."
        )


def rules_in(rule: Rule) -> list[Rule]:
    """Returns the rules that an optimizer may use: one, or those among which param groups choose."""
    choices: Mapping[str, Rule] = getattr(rule, "choices", {})
    return list(choices.values()) or [rule]


def check_matrices(rule: Rule, group: Mapping[str, Any]) -> None:
    """Checks the params of a group whose rule is one of whole matrices.

    Raises:
        ValueError: a param holds no matrices, or another number than the group says.
        ShardoptError: a param is a DTensor whose slices no rank can assemble, or its matrices take step sizes of their
            own, which no kernel could tell apart.
    """
    if not isinstance(rule.of(group), MatrixRule):
        return
    matrices = group.get("matrices")
    for param in group["params"]:
        if matrices is None and param.ndim != 2:  # with torch's message
            name, size = rule.of(group).name.capitalize(), param.size()
            raise ValueError(f"{name} only supports 2D parameters whereas we found a parameter with size: {size}")
        shapes = matrices_of(param.shape, matrices)
        placement = matrix_placement_of(param, is_stack=matrices == STACK)
        if len(set(shapes)) > 1:
            _check_unequal(rule.of(group), group, param, shapes, placement is not None)


def _check_unequal(
    rule: Rule, group: Mapping[str, Any], param: torch.Tensor, shapes: Sequence[tuple[int, int]], is_cut: bool
) -> None:
    numbers = plain_numbers(group)
    variant = rule.variant(numbers)
    assert variant.around is not None
    with suppress(KeyError):  # the user may add a key for a rule of their own later
        runs = scalars_of_matrices(shapes, lambda shape: rule.evaluate(variant, {**numbers, "shape": shape}, 1, {})[0])
        lie_in_rows = not is_cut and dense_strides(param)[-2:] == (param.shape[1], 1)
        check_runs(runs, BLOCK, lie_in_rows, len(variant.around[0].scalars))


# -- which params of a module are matrices of hidden layers ------------------------------------------------------------


def apart_from_matrices(module: nn.Module) -> set[torch.Tensor]:
    """Returns the weights of embeddings and heads: 2D, but not of hidden layers.

    A head is what ``get_output_embeddings()`` returns (Hugging Face), a Linear with as many outputs as an embedding has
    rows, or one that is called lm_head, head, output, out, classifier, score, unembed or fc_out. In a module without
    embeddings it is the last Linear too.
    """
    embeddings = [each for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    return {
        *(each.weight for each in embeddings),
        *_heads(module, {each.num_embeddings for each in embeddings}),
    }


def _heads(module: nn.Module, rows: set[int]) -> Iterator[torch.Tensor]:
    output = getattr(module, "get_output_embeddings", None)
    found = output() if callable(output) else None
    if isinstance(found, nn.Module):
        yield from found.parameters()
    linears = {name: each for name, each in module.named_modules() if isinstance(each, nn.Linear)}
    for name, each in linears.items():
        if each.out_features in rows or name.rpartition(".")[2] in _HEADS:
            yield each.weight
    if linears and not rows:
        yield list(linears.values())[-1].weight


def split_params(group: Mapping[str, Any], apart: set[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Splits the params of a group into matrices of hidden layers and all others. Named params keep their names."""
    params = group["params"]
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    hidden: list[Any] = []
    others: list[Any] = []
    for each in listed:
        param = each[1] if isinstance(each, tuple) else each
        is_hidden = isinstance(param, torch.Tensor) and param.ndim == 2 and param not in apart
        (hidden if is_hidden else others).append(each)
    return hidden, others

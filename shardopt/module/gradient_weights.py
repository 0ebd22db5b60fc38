"""The mean that is meant: over the tokens of all ranks and micro-batches, where ranks have unequal numbers of them.

A mean over ranks of each rank's mean over its tokens counts the tokens of a short batch more. With weights::

    gradient of the step = sum(tokens * gradient) / sum(tokens)        over ranks and micro-batches

Each gradient is multiplied as autograd is about to accumulate it, whatever becomes of it then: from there on it is a
sum like any other. Experts have gradients of other ranks' tokens, in which no weight can be told apart any more: with
them the gradients of what forward returned are multiplied, on their way into the model, and those of all params follow.
Each rank's tokens travel in its word of the report that ends a round, and their total is what sums are divided by when
they are read. Without a weight there is no hook, and no word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from ..errors import DisagreementError, ShardoptError, StateError
from .hooks import call_while_alive
from .running import roots_of_backward

if TYPE_CHECKING:
    from ..domain.param import ParamRecord

_ADVICE = "call gradient_weight() on every rank before each backward of the step, or before none"
_ADVICE_TO_EXPERTS = (
    "call gradient_weight() on every rank before each forward of the step, or before none, and return from that "
    "forward all that the loss is made of, as the model has experts"
)

Gradients = tuple[torch.Tensor | None, ...]


class Word(NamedTuple):
    """What a rank tells of its weights in one round: one number of the report.

    Attributes:
        is_weighted: it called ``gradient_weight()`` since the last round.
        is_mean: the sums are to be divided by all tokens.
        has_missed: a backward of the step ran without a weight.
        is_out: it has run out of batches, in a ``join()``.
    """

    is_weighted: bool = False
    is_mean: bool = True
    has_missed: bool = False
    is_out: bool = False
    tokens: int = 0

    def number(self) -> int:
        return int(self.is_weighted or self.is_out) and (
            1 | self.is_mean << 1 | self.has_missed << 2 | self.is_out << 3 | self.tokens << 4
        )

    @staticmethod
    def of(number: int) -> Word:
        return Word(bool(number & 1), bool(number & 2), bool(number & 4), bool(number & 8), number >> 4)


class GradientWeights:
    """The weights of one optimizer's gradients: this rank's since the last round, and the total of all ranks.

    Attributes:
        total: the tokens of all ranks in the sums that params show; None: there are no sums, or they have no weights.
        weighs_outputs: gradients are weighed where they enter the model, as it has experts.
        in_use: a weight was given, since the optimizer was constructed.
    """

    def __init__(self) -> None:
        self.total: int | None = None
        self.weighs_outputs = self.in_use = False
        self._outputs: set[Any] = set()  # the nodes of what forwards returned since the weight was given
        self._is_mean = True
        self._own, self._has_called, self._has_missed = 0, False, False  # since the last round
        self._is_out = False  # of batches, in this round
        self._next: int | None = None  # tokens of the backward that comes, or runs
        self._runs = False
        # The node is kept: autograd would make another one, without the hook.
        self._hooks: dict[torch.Tensor, tuple[Any, Any]] = {}

    def attach(self, entries: Iterable[ParamRecord]) -> None:
        """Puts a hook on each of these params that trains and has none."""
        for entry in entries:
            param = entry.outer
            if param not in self._hooks and param.requires_grad:
                with torch._C.DisableTorchFunctionSubclass():  # of a param whose values are released
                    node: Any = torch.autograd.graph.get_gradient_edge(param).node
                # Held weakly: what lies behind a node's hook no collection of garbage finds.
                self._hooks[param] = node, node.register_prehook(call_while_alive(GradientWeights._weigh, self))

    def detach(self) -> None:
        """Removes all hooks."""
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def forget(self) -> None:
        """Begins anew: there are no gradients."""
        self.total = None
        self.end_backward()
        self._own, self._has_called, self._has_missed = 0, False, False

    def run_out(self) -> None:
        """Takes part in a round of weighted gradients without a batch."""
        self._is_out = self.in_use = True

    # -- a backward ------------------------------------------------------------------------------------------------

    def begin(self, entries: Sequence[ParamRecord], has_experts: bool) -> None:
        """Weighs the gradients of these params from the next backward on; does nothing while it does so already."""
        if not self.is_on:
            self.forget()
            self.in_use, self.weighs_outputs = True, has_experts
            self.attach(entries)
            self._has_missed = any(map(_has_unreduced, entries))

    def give(self, tokens: int, is_mean: bool) -> None:
        """Gives the weight of the next backward.

        Raises:
            StateError: the last one was not used, or sums and means would be mixed.
        """
        if self._next is not None:
            raise StateError(
                "run a backward after each gradient_weight(), or zero_grad() to begin anew: the weight "
                f"{self._next} of the last call was not used, and both would count for one gradient."
            )
        if is_mean is not self._is_mean and (self._has_called or self.total is not None):
            raise StateError(
                f"give average={self._is_mean} for all micro-batches of a step: found average={is_mean} beside it, and "
                "one gradient cannot be a sum and a mean."
            )
        self._is_mean, self._next, self._has_called = is_mean, tokens, True
        self._own += tokens

    def weigh_outputs(self, output: Any) -> Any:
        """Returns what a forward returned, with tensors whose nodes weigh their gradients; None: it stays as it is."""
        tokens = self._next
        if tokens is None or not self.weighs_outputs:
            return None
        weigh = call_while_alive(GradientWeights._weigh_output, self)

        def weighed(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            view = tensor.view_as(tensor)
            assert view.grad_fn is not None
            view.grad_fn.register_prehook(partial(weigh, tokens))
            self._outputs.add(view.grad_fn)
            return view

        return tree_map_only(torch.Tensor, weighed, output)

    def _weigh_output(self, tokens: int, grads: Gradients) -> Gradients:
        """Multiplies the gradient of what a forward returned."""
        if not self._runs:
            self._begin_backward()
            self._has_missed = self._has_missed or self._is_passed_by()
        return _multiplied(grads, tokens)

    def _is_passed_by(self) -> bool:
        """True if the loss depends on params by another way than through what a forward returned."""
        params, seen = {node for node, _ in self._hooks.values()}, set[Any]()
        nodes = [root.grad_fn for root in roots_of_backward()]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen or node in self._outputs:
                continue
            if node in params:
                return True
            seen.add(node)
            nodes += [each for each, _ in node.next_functions]
        return False

    def _weigh(self, grads: Gradients) -> Gradients | None:
        """Multiplies a gradient on its way to ``param.grad``."""
        tokens = self._next
        if tokens is None or (self.weighs_outputs and not self._runs):
            self._has_missed = True
            return None
        if self.weighs_outputs:
            return None
        if not self._runs:
            self._begin_backward()
        return _multiplied(grads, tokens)

    def _begin_backward(self) -> None:
        self._runs = True
        ended: Callable[[], None] = call_while_alive(GradientWeights.end_backward, self)
        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def end_backward(self) -> None:
        """Ends the backward that has the weight."""
        self._next, self._runs = None, False
        self._outputs.clear()

    # -- a round ---------------------------------------------------------------------------------------------------

    def begin_round(self, shows_sums: bool, is_fresh: bool) -> None:
        """Compares the weights with the sums that params show, ahead of a round.

        Args:
            is_fresh: these sums are zeros.
        """
        if not shows_sums:
            self.total = None
        elif self.total is None and not is_fresh:
            self._has_missed = True

    @property
    def is_on(self) -> bool:
        """True if this rank knows that sums of this round are weighted."""
        return self._has_called or self._is_out or self.total is not None

    @property
    def divisor(self) -> int:
        """The number by which the sums are divided that params show."""
        return (self.total or 1) if self._is_mean else 1

    @property
    def word(self) -> int:
        """This rank's word in the report of a round."""
        return Word(self._has_called, self._is_mean, self._has_missed, self._is_out, self._own).number()

    def settle(self, words: Sequence[int]) -> None:
        """Adds what all ranks told at the end of a round.

        Raises:
            DisagreementError: some ranks gave no weight, or one for a part of the step; on every rank.
        """
        advice = _ADVICE_TO_EXPERTS if self.weighs_outputs else _ADVICE
        told = {rank: Word.of(number) for rank, number in enumerate(words)}
        there = {rank: word for rank, word in told.items() if not word.is_out}
        without = [rank for rank, word in there.items() if not word.is_weighted]
        if without:
            raise DisagreementError(
                f"{advice}: rank {without[0]} gave no weight for this backward, and gradients of other ranks, or of "
                "earlier backwards, have weights. Call zero_grad(), and run the step again."
            )
        missed = [rank for rank, word in there.items() if word.has_missed]
        if missed:
            raise DisagreementError(
                f"{advice}: rank {missed[0]} ran a backward of this step without one, and its gradients would count "
                "as those of one token. Call zero_grad(), and run the step again."
            )
        if len({word.is_mean for word in there.values()}) > 1:
            sums = [rank for rank, word in there.items() if not word.is_mean]
            raise DisagreementError(
                f"give the same average= on every rank: gradient_weight() was given average=False on ranks {sums} "
                "alone, and one gradient cannot be a sum and a mean. Call zero_grad(), and run the step again."
            )
        self._is_mean = all(word.is_mean for word in there.values())
        self.total = (self.total or 0) + sum(word.tokens for word in there.values())
        self._own, self._has_called, self._has_missed, self._is_out = 0, False, False, False
        self.end_backward()

    def check(self) -> None:
        """Raises ShardoptError if the step's gradients are a mean over no tokens, as all ranks know."""
        if self.total == 0 and self._is_mean:
            raise ShardoptError(
                "call zero_grad() and go on with the next batch: gradient_weight() was given 0 tokens for every "
                "micro-batch on every rank, so there is no mean to take a step with. Nothing changed."
            )


def _has_unreduced(entry: ParamRecord) -> bool:
    """True if the param shows a gradient, or a part of one, that no round has reduced."""
    own = entry.gradient_slice
    return own is not None and entry.grad is not None and bool(own.unreduced or own.pending is not None)


def _multiplied(grads: Gradients, tokens: int) -> Gradients:
    # Not a product with zero, which keeps a NaN.
    return tuple(None if grad is None else grad * tokens if tokens else torch.zeros_like(grad) for grad in grads)

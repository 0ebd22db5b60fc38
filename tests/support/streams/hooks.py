"""Autograd as on a GPU: the hooks of params run on the streams of their leaves, which it joins before it calls back."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from .book import Book, span
from .stream import Stream


class _Engine:
    """Torch's own engine, but for what it calls back."""

    def __init__(self, engine: Any, book: Book, leaves: list[Stream]):
        self._engine, self._book, self._leaves = engine, book, leaves

    def queue_callback(self, callback: Callable[[], None]) -> None:
        def joined() -> None:
            for each in self._leaves:
                self._book.stream.wait_stream(each)
            callback()

        self._engine.queue_callback(joined)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(frozen=True)
class _Both:
    """The handle of what joins the stream of a leaf, and of the hook that leaves it: one alone would stay there."""

    joining: Any
    hook: Any

    def remove(self) -> None:
        self.joining.remove()
        self.hook.remove()


@contextmanager
def on_streams(book: Book, count: int) -> Iterator[None]:
    """Within, the leaves of new hooks are on so many streams, one after the other."""
    leaves = [Stream(book, f"leaf stream {number}") for number in range(count)]
    register, engine = Tensor.register_post_accumulate_grad_hook, torch.autograd.Variable._execution_engine
    seen: list[None] = []

    def on_leaf(param: Tensor, hook: Callable[[Tensor], None]) -> Any:
        leaf = leaves[len(seen) % count]
        seen.append(None)

        there = ExitStack()

        def before(gradient: Tensor) -> None:
            leaf.wait_stream(book.stream)  # that computed the gradient
            gradient.record_stream(leaf)  # as autograd does where streams differ
            there.enter_context(book.on(leaf))  # autograd accumulates gradients there

        def after(of: Tensor) -> None:
            with there:
                if type(of.grad) is Tensor:  # autograd may have copied it
                    book.act("AccumulateGrad", [], [span(of.grad)])
                hook(of)

        joining = param.register_hook(before)
        with torch._C.DisableTorchFunctionSubclass():
            return _Both(joining, register(param, after))

    with ExitStack() as stack:
        stack.enter_context(patch.object(Tensor, "register_post_accumulate_grad_hook", on_leaf))
        stack.enter_context(patch.object(torch.autograd.Variable, "_execution_engine", _Engine(engine, book, leaves)))
        yield

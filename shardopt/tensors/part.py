"""A part: a tensor with the full shape of a param outside and this rank's slice inside.

The states in ``state_dict()`` are parts wherever more than one rank holds them. A part answers functions for which its
slice or its description is enough. A function that reads the rest (saving, above all) fetches the other ranks' slices
from them, in the background and without a call of theirs. A function that would write is refused by name.
``full_tensor()`` gathers faster, but every rank must call it.

A part is not a ``DTensor``: slices are ranges of elements, of uneven length, which no placement of a DTensor describes.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import StateError
from .fetched_view import Guarded, as_views, writes_to

if TYPE_CHECKING:
    from .whole_memory import WholeMemory

# Functions of single elements: they mean the same for the slice alone and for the whole.
_ELEMENTWISE = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}

# Memory of whole tensors whose address was asked for, by what fetches them. The parts of tied weights must have one
# address: a writer that reads memory (safetensors) would save two copies. This is a table of the process because the
# parts of one param come from several calls of state_dict() and have nothing in common but an equal ``fetch``. It is
# weak: the parts own the memory. See test_files_without_pickle.
_WHOLES: "weakref.WeakValueDictionary[Callable[[], torch.Tensor], WholeMemory]" = weakref.WeakValueDictionary()


class Part(Guarded, torch.Tensor):
    """A rank's slice of one state of one param.

    Attributes:
        local: 1D, the elements ``[start, start + local.numel())`` of the whole in storage order; may be empty.
        start: index of the first local element.
        words: what the values are, equal on ranks that hold slices of one whole.
        fingerprint: 0-d int64, of the whole tensors that they were made of; None if there were none.
        is_shown: it shows what lies elsewhere, which a write reaches.
        draws: names the next noise that is drawn like this part; None if nobody counts.
    """

    words: str = "part"
    fingerprint: torch.Tensor | None = None
    is_shown = False
    draws: Callable[[], str | None] | None = None

    start: int
    _local: torch.Tensor
    _gather: Callable[[torch.Tensor], torch.Tensor] | None
    _fetch: Callable[[], torch.Tensor] | None = None
    _write: Callable[[torch.Tensor], None] | None = None
    _gather_slices: Callable[[torch.Tensor], torch.Tensor] | None = None  # of a snapshot: what it keeps of the record
    _is_alone: bool = False
    _whole: "WholeMemory | None" = None  # of its own, once its address was asked for

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        start: int,
        like: torch.Tensor,
        gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
        fetch: Callable[[], torch.Tensor] | None = None,
        write: Callable[[torch.Tensor], None] | None = None,
        gather_slices: Callable[[torch.Tensor], torch.Tensor] | None = None,
        is_alone: bool = False,
    ) -> Self:
        """Makes a part with the size and strides of ``like``.

        Args:
            local: 1D, this rank's slice.
            start: index of the first local element in storage order.
            gather: collective; makes the whole of every rank's slice.
            dtype: of the part; by default that of ``local``.
            fetch: reads the other ranks' slices, and returns the whole in host memory.
            write: collective; answers ``copy_()`` of a whole tensor, of which it keeps this rank's slice.
            gather_slices: collective; makes the whole of what every rank passes as its slice, for copies of the part.
            is_alone: one rank holds the whole.
        """
        part = cls._wrapper(like, dtype or local.dtype, local.device)
        part.start, part._local, part._gather, part._write = start, local, gather, write
        if fetch is not None:
            part._fetch = fetch
        part._gather_slices, part._is_alone = gather_slices, is_alone
        return part

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__()

    @classmethod
    def _wrapper(cls, like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Self:
        wrapper: Self = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=dtype, device=device
        )
        # Without it, C functions that bypass the class (torch.utils.dlpack.to_dlpack) would return address 0 and crash
        # (test_a_part_has_no_address).
        torch._C._set_throw_on_mutable_data_ptr(wrapper)
        return wrapper

    @property
    def local(self) -> torch.Tensor:
        """This rank's slice: 1D, empty where it has none."""
        return self._local

    def elements(self) -> torch.Tensor:
        """Returns this rank's slice in the part's dtype, on its device: 1D; to be read, as it may be memory."""
        return self.local.to(self.device, self.dtype)

    def holds(self, start: int, stop: int) -> bool:
        """True if this rank's slice has the elements ``[start, stop)`` of the whole."""
        return start == stop or (self.start <= start and stop <= self.start + self.local.numel())

    def full_tensor(self) -> torch.Tensor:
        """Collective: returns the whole. Every rank must make this call, for the same parts in the same order."""
        if self._gather is None:
            raise StateError(
                "take a part from optimizer.state_dict() and gather that: this part is a copy, apart from its "
                "optimizer."
            )
        return self._gather(self.local)

    def read_whole(self) -> torch.Tensor:
        """Returns the whole in host memory; this rank alone reads it from the others.

        Raises:
            StateError: the part is a copy, or the moment that it shows has passed.
            CommunicationError: another rank is gone.
        """
        if self._fetch is None:
            raise refusal("read_whole()")
        kept = self._whole
        return self._fetch() if kept is None or not kept.is_filled else kept.filled()

    # What torch refuses for any subclass.

    def tolist(self) -> Any:
        return self._readable("tolist()").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a read-only array of the whole: a write to it would be lost."""
        array = self._readable("numpy()").numpy(force=force)
        array.flags.writeable = False
        return array

    def _readable(self, asked: str) -> torch.Tensor:
        if self._fetch is None:
            raise self._refused(asked)
        return self.read_whole()

    # Writers of files without pickle (safetensors) read memory. For them this rank alone makes a copy of the whole, in
    # host memory. It lives as long as the part: writers take two tensors at one address for one tensor, and freed
    # memory would be used again. The storage of what nobody has read yet has an address and a size, and no values.

    def data_ptr(self) -> int:
        return self._memory("data_ptr()").filled().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._memory("untyped_storage()").storage

    def _typed_storage(self) -> torch.TypedStorage:
        self._memory("untyped_storage()").filled()
        found: torch.TypedStorage = super()._typed_storage()  # type: ignore[no-untyped-call]
        return found

    def _memory(self, asked: str) -> "WholeMemory":
        if self._whole is None:
            if self._fetch is None:
                raise refusal(asked)
            self._whole = _WHOLES.get(self._fetch)
        if self._whole is None:
            assert self._fetch is not None
            from .whole_memory import WholeMemory  # few ask

            self._whole = _WHOLES[self._fetch] = WholeMemory(self._fetch, self)
        return self._whole

    # Methods that use the address of a tensor's memory without a check that there is any: they would crash.

    def _call_for_each(self, name: str, arguments: tuple[Any, ...]) -> Any:
        raise self._refused(f"{name}()")

    def const_data_ptr(self) -> int:
        raise self._refused("const_data_ptr()")

    def __dlpack__(self, *arguments: Any, **keywords: Any) -> Any:
        raise self._refused("__dlpack__()")

    def _take(self, values: torch.Tensor, call: str) -> None:
        raise self._refused_write(call)

    def __setitem__(self, index: Any, value: Any) -> None:
        # torch would write to what an index returns: a copy of the whole, so that the values would be dropped. A
        # gradient has views.
        if type(self) is Part:
            raise self._refused_write("a write to an index")
        super().__setitem__(index, value)

    def _refused_write(self, call: str) -> StateError:
        return self._refused(call)

    def _refused(self, call: str) -> StateError:
        return refusal(call)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"local=[{self.start}:{self.start + self.local.numel()}])"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if self._gather_slices is None:
            return Part(self.local.clone(), self.start, self, dtype=self.dtype)
        return self._snapshot(self.local.clone(), self.dtype)

    def _snapshot(self, local: torch.Tensor, dtype: torch.dtype) -> "Part":
        """Returns a part of copied values: it can be fetched while the ranks' slices stay, and gathered at any time."""
        fetch, gather = self._fetch, self._gather_slices
        if gather is not None and self._is_alone:
            fetch = partial(_on_host, local, self.size(), self.stride())
        elif fetch is not None:
            fetch = partial(fetch_as, fetch, dtype, gather is not None)
        return Part(local, self.start, self, gather, dtype, fetch, None, gather, self._is_alone)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saves the whole, as a plain tensor."""
        if self._fetch is not None:
            return self._fetch().__reduce_ex__(protocol)
        raise StateError(
            "call optimizer.consolidate_state_dict(to=0) on every rank first: then optimizer.state_dict() on rank 0 "
            f"holds plain tensors that torch.save can write. {self!r} holds this rank's slice only, and a file of it "
            "would silently lack the rest."
        )

    # The protocol of torch's distributed checkpoint for tensors of which each rank holds a slice. dcp is imported on
    # demand: ``import shardopt`` does not import torch's checkpoints.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from .dcp import write_items

        return write_items(self, self.local, self.start, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        from .dcp import chunk_list

        return chunk_list(self, self.local, self.start)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        from .dcp import shard_at

        return shard_at(self, self.local, self.start, index)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        kinds: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        return cls._answer(function, tuple(arguments), dict(keywords or {}))

    @classmethod
    def _answer(cls, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if function is torch.ops.aten.copy_.default and _is_write(*arguments[:2]):
            arguments[0]._write(arguments[1])
            return arguments[0]
        if function not in _ELEMENTWISE:
            return _of_whole(function, arguments, keywords)
        part = next(argument for argument in arguments if isinstance(argument, Part))
        local = tree_map_only(Part, lambda each: each.local, (arguments, keywords))
        local[1].pop("memory_format", None)  # the slice is 1D
        dtype, own = local[1].get("dtype") or part.dtype, function(*local[0], **local[1])
        if function in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            return part._snapshot(own, dtype)
        again = part._gather_slices, part._is_alone
        return Part(own, part.start, part, part._gather, dtype, part._fetch, None, *again)


def is_cut_alike(tensor: torch.Tensor, like: Part) -> bool:
    """True if a tensor is a part of the same elements."""
    if not isinstance(tensor, Part) or tensor.shape != like.shape or tensor.stride() != like.stride():
        return False
    return tensor is like or (tensor.start, tensor.elements().numel()) == (like.start, like.elements().numel())


def _is_write(part: Any, source: Any) -> bool:
    """True if a whole tensor is to be copied to a part that can be written."""
    return isinstance(part, Part) and part._write is not None and not isinstance(source, Part)


def fetch_as(fetch: Callable[[], torch.Tensor], dtype: torch.dtype, can_gather: bool) -> torch.Tensor:
    """Returns the whole behind a copy; an error says what else can be done with the copy."""
    try:
        return fetch().to(dtype)
    except StateError as error:
        if not can_gather:
            raise
        raise StateError(
            "load this copy (load_state_dict() takes each rank's slice), or call copy.full_tensor() on every rank; to "
            "read it on one rank later, make it of v.full_tensor() in place of v. It holds this rank's slice, and the "
            "other ranks' slices have changed since."
        ) from error


def _on_host(local: torch.Tensor, size: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    """Returns a copy of the whole, in host memory, of a slice that is all of it."""
    return local.cpu().clone().as_strided(size, stride)


def _of_whole(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Answers functions that only read: fetches the whole from the other ranks. The result is on the part's device.

    A view of what was fetched refuses writes.
    """
    parts = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Part)]
    if writes_to(Part, function, arguments, keywords) or any(part._fetch is None for part in parts):
        raise refusal(function)
    arguments, keywords = tree_map_only(Part, lambda part: part.read_whole().to(part.device), (arguments, keywords))
    return as_views(function, function(*arguments, **keywords))


def refusal(function: Any) -> StateError:
    """Returns the error for a function that a part cannot answer."""
    return StateError(
        "call part.full_tensor() on every rank, or read part.local, this rank's slice; params are read and written in "
        "`with optimizer.unsharded():`. "
        f"Here {function} was called on a part, a tensor of which this rank holds a slice only, and the result would "
        "silently lack the rest."
    )

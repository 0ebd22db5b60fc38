"""A bucket: one flat buffer that params of one device and dtype are views of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..tensors.arriving_guard import GatherHandle, mark_arriving
from ..tensors.strides import dense_strides, with_own_storage
from ..tensors.unsharded_guard import own_class, released_class
from .memory import Memory
from .readable import Readable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from .layout import BucketLayout


class Bucket:
    """Holds params as views of ``flat``, so that gathered values reach the model without a copy.

    A param keeps its strides if they are dense (transposed, channels-last): it lies in storage order. Only the tensor
    behind ``param.data`` is replaced; the ``nn.Parameter`` object, its gradient and its version counter stay.

    Unless the bucket is freed between uses (stage 3), each param has a storage of its own within the bucket's memory.
    Tools that take params of one storage for tied weights (Accelerate saves one of them and omits the others) then see
    that they are not tied, and a file of one param holds only that param.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        layout: BucketLayout,
        fresh: Collection[torch.Tensor],
        is_resharded: bool,
        outers: Sequence[torch.nn.Parameter],
        dtype: torch.dtype | None = None,
        beside: Mapping[torch.nn.Parameter, Sequence[Any]] | None = None,
        is_rounded: bool = False,
    ):
        """
        Args:
        fresh: params that have no values yet.
        is_resharded: True if the bucket is freed between uses. If all of its params are fresh, it starts freed.
        outers: the params as the model has them: DTensors where ``params`` are their local tensors.
        dtype: of the bucket, to which params are cast; None: their own.
        beside: a param -> what else shows its values: a wrapper around it, or views of it.
        is_rounded: ranks keep their slices elsewhere, in fp32.
        """
        self.params, self.outers = tuple(params), tuple(outers)
        self.beside = [(beside or {}).get(outer, ()) for outer in self.outers]
        self._views = [[each for each in every if not hasattr(each, "__tensor_flatten__")] for every in self.beside]
        self._classes = [(type(outer), released_class(type(outer), is_rounded)) for outer in self.outers]
        self._present = list(range(len(self.params)))  # indices of params that were not removed
        self._readables: dict[tuple[int, ...], Readable] = {}  # by the indices of their params
        self._shown: list[Readable] = []  # those that may be read
        self.whole = self.readable(tuple(self._present))
        self.whole.show()
        self._gather_handle = GatherHandle()
        self.layout, self._is_resharded = layout, is_resharded
        first = params[0]
        self.memory = Memory(layout.numel, dtype or first.dtype, first.device)
        self.flat = self.memory.tensor  # 1D; padding stays zero
        self._shapes = tuple((param.size(), dense_strides(param)) for param in self.params)
        try:
            self._adopt_params(fresh, is_resharded)
        except BaseException:
            self.release()
            raise
        if is_resharded and all(param in fresh for param in self.params):
            self.drop()

    @torch.no_grad()
    def _adopt_params(self, fresh: Collection[torch.Tensor], is_resharded: bool) -> None:
        for index, param in enumerate(self.params):
            view = self.view(self.flat, index, param)
            if not is_resharded:  # memory that is freed must have one storage
                view = with_own_storage(view)
            if param not in fresh:
                view.copy_(param)
            self._point(index, view)  # frees the old storage: at most one bucket has two copies at a time

    def _point(self, index: int, values: torch.Tensor) -> None:
        """Makes a param, and the DTensor whose local tensor it is, show these values."""
        param, outer = self.params[index], self.outers[index]
        for each in (param, *self._views[index]):
            each.data = values
        if outer is not param:
            from ..tensors.local_tensor import set_local  # DTensors are few

            set_local(outer, param.detach())

    @property
    def nbytes(self) -> int:
        """The bytes of the whole bucket, whether it is allocated or not."""
        return self.memory.nbytes

    @property
    def resident_bytes(self) -> int:
        return self.memory.nbytes if self.memory.is_allocated else 0

    def drop(self, keeps_pages: bool = False) -> bool:
        """Frees the memory. Params, and what autograd saved of them, stay views of the same empty storage.

        Args:
            keeps_pages: see :meth:`Memory.free`; ``memory`` is whose pages another bucket may take.

        Returns:
            True if pages stay.
        """
        if self._shown:
            self.guard()
        return self.memory.free(keeps_pages)

    def guard(self) -> None:
        """Guards params: a read of one is an error."""
        Readable.hide_all(self._shown)

    def readable(self, indices: tuple[int, ...]) -> Readable:
        """Returns these params as some that code may read together."""
        if indices not in self._readables:
            every = [(self.params[at], self.outers[at], *self._classes[at]) for at in indices]
            every += [
                (self.params[at], each, own_class(each), released_class(own_class(each)))
                for at in indices
                for each in self.beside[at]
            ]
            self._readables[indices] = Readable(every, self._shown)
        return self._readables[indices]

    def start_arriving(self, wait: Callable[[], None], is_exact: bool = False) -> None:
        """Guards params whose values are under way: the first call that needs some of them calls ``wait``.

        Args:
            is_exact: these are the fp32 values that those of the bucket were rounded from.
        """
        self._gather_handle.wait = wait
        for index in self._present:
            mark_arriving(self.outers[index], self._classes[index][0], self._gather_handle, is_exact)

    def end_arriving(self) -> None:
        """Lets params be read without a wait: their values have arrived."""
        for index in self._present:
            self.outers[index].__class__ = self._classes[index][0]
        self._gather_handle.wait = None

    @property
    def present(self) -> Sequence[int]:
        """The indices of the params that are in the bucket."""
        return self._present

    @property
    def _unresized(self) -> list[int]:
        """The indices of params that have their shapes: a script may have given one other data, to enlarge it."""
        return [index for index in self._present if self.params[index].size() == self.shape_of(index)]

    def show_values(self, buffer: torch.Tensor | None) -> None:
        """Makes params views of a buffer that is laid out as the bucket; None: of the bucket again."""
        for index in self._unresized:
            view = self.view(self.flat if buffer is None else buffer, index, self.params[index])
            self._point(index, view if buffer is None and self._is_resharded else with_own_storage(view))

    def take_values(self, buffer: torch.Tensor) -> None:
        """Copies to a buffer what was assigned to ``param.data`` since the params became views of it."""
        for index in self._unresized:
            view = self.view(buffer, index, self.params[index])
            if self.params[index].data_ptr() != view.data_ptr():
                view.copy_(self.params[index])

    @property
    def is_viewed(self) -> bool:
        """True if another tensor (what ``detach()`` or ``state_dict()`` returned) uses the storage of a param."""
        params, alone = (self.params[index] for index in self._present), _uses(_ALONE)
        return any(_uses(param) > alone for param in params if param.numel())

    def remove_param(self, outer: torch.nn.Parameter) -> None:
        """Gives one of ``outers`` a storage of its own; its place stays empty. The bucket must be allocated."""
        place = next(index for index in self._present if self.outers[index] is outer)
        self._give_storage(place)
        self._present.remove(place)
        for indices, each in self._readables.items():
            if place in indices:
                each.remove(outer)

    def _give_storage(self, index: int) -> None:
        with torch.no_grad():
            self._point(index, self.params[index].detach().clone(memory_format=torch.preserve_format))

    @property
    def holders(self) -> int:
        """The number of tensors that use the memory."""
        return _uses(self.flat)

    def move_params_out(self) -> None:
        """Moves the params to new memory, without their values. Other views keep the old memory."""
        self.memory = Memory(self.layout.numel, self.dtype, self.device)
        self.flat = self.memory.tensor
        with torch.no_grad():
            for index in self._present:
                self._point(index, self.view(self.flat, index, self.params[index]))

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    def shard(self, rank: int) -> torch.Tensor:
        """Returns the slice of ``flat`` that ``rank`` owns, 1D."""
        return self.flat[self.layout.shard_slice(rank)]

    def view(self, buffer: torch.Tensor, index: int, like: torch.Tensor) -> torch.Tensor:
        """Returns a param's view in a buffer laid out as ``flat``, with its shape and storage order."""
        return buffer.as_strided(like.size(), dense_strides(like), self.layout.offsets[index] + buffer.storage_offset())

    def holds(self, index: int) -> bool:
        """True if the param is still the view that this bucket made."""
        param = self.params[index]
        shape, strides = self._shapes[index]
        address = self.flat.data_ptr() + self.layout.offsets[index] * self.flat.element_size()
        return (
            (param.data_ptr() == address or not param.numel())
            and param.dtype is self.dtype
            and param.device == self.device
            and param.size() == shape
            and param.stride() == strides
        )

    def shape_of(self, index: int) -> torch.Size:
        """The shape of a param as it was bound."""
        return self._shapes[index][0]

    def keeps_dims(self, index: int) -> bool:
        """True if the param has the number of dimensions that it was bound with."""
        return self.params[index].dim() == len(self._shapes[index][0])

    def is_source(self, index: int) -> bool:
        """True if a tensor of the param's shape, dtype and device was assigned to ``param.data``."""
        if not self.memory.is_allocated or self.holds(index):
            return False
        param, (shape, _) = self.params[index], self._shapes[index]
        return param.size() == shape and param.dtype is self.dtype and param.device == self.device

    @torch.no_grad()
    def take_source(self, index: int) -> bool:
        """Takes the values of a tensor that was assigned to ``param.data``, if it is one that the bucket could be.

        The param lies in the bucket again, and later writes to that tensor do not reach it. Returns whether it was one.
        """
        param = self.params[index]
        if not self.is_source(index):
            return False
        values = param.clone()  # it may be the param's own memory, in another order
        self.drop_source(index)
        param.data.copy_(values)
        torch.autograd.graph.increment_version([param])  # as by a write in place, which ranks compare
        return True

    def drop_source(self, index: int) -> None:
        """Makes a param that a tensor was assigned to lie in the bucket again, with the values of before."""
        shape, strides = self._shapes[index]
        view = self.flat.as_strided(shape, strides, self.layout.offsets[index] + self.flat.storage_offset())
        self._point(index, view if self._is_resharded else with_own_storage(view))

    def take_sources(self) -> None:
        """Calls :meth:`take_source` for every param."""
        for index in self._present:
            self.take_source(index)

    def release(self, exact: torch.Tensor | None = None) -> None:
        """Gives every param a storage of its own again; params of a freed bucket have no values and keep none.

        Args:
            exact: the values to give them, 1D, laid out as the bucket; None: those of the bucket.
        """
        if not self.memory.is_allocated:
            self.whole.show()
        if self._gather_handle.wait is not None:  # it will never arrive: another rank died
            self.end_arriving()
        for index in self._present:
            if self.holds(index) and exact is not None:
                param = self.params[index]
                self._point(index, self.view(exact, index, param).clone(memory_format=torch.preserve_format))
            elif self.holds(index) and self.memory.is_allocated:
                self._give_storage(index)


_ALONE = torch.empty(1)  # no other tensor uses its storage


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))

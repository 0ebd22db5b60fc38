"""A bucket: one flat buffer that params of one device and dtype are views of."""

from collections.abc import Collection, Sequence

import torch

from ..tensors.strides import dense_strides, with_own_storage
from ..tensors.unsharded_guard import released_class
from .layout import BucketLayout
from .memory import Memory


class Bucket:
    """Holds params as views of ``flat``, so that what is gathered into it needs no copy to reach the model.

    A param keeps its strides when they are dense (transposed, channels-last): it lies in storage order. Only the tensor
    behind ``param.data`` is exchanged; the ``nn.Parameter`` object, its gradient and its version counter stay.

    Unless the bucket is released between uses, each param has a storage of its own in the bucket's memory. Whoever
    takes params of one storage for tied weights (Accelerate keeps one of them in a file and leaves the others out) then
    sees that they are not, and a file of one param holds that one only.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        layout: BucketLayout,
        fresh: Collection[torch.Tensor] = (),
        is_released: bool = False,
    ):
        """``fresh`` params have no values yet: a bucket of such that will be released is so from the start."""
        self.params = tuple(params)
        self._classes = [(type(param), released_class(type(param))) for param in params]
        self._present = list(range(len(self.params)))  # those that have not left
        self.layout = layout
        first = params[0]
        self._memory = Memory(layout.numel, first.dtype, first.device)
        self.flat = self._memory.tensor  # 1D, padding stays zero
        self._shapes = tuple((param.size(), dense_strides(param)) for param in self.params)
        try:
            self._take_in(fresh, is_released)
        except BaseException:
            self.release()
            raise
        if is_released and all(param in fresh for param in self.params):
            self.drop()

    @torch.no_grad()
    def _take_in(self, fresh: Collection[torch.Tensor], is_released: bool) -> None:
        for index, param in enumerate(self.params):
            view = self.view(self.flat, index, param)
            if not is_released:  # memory that is given back must have one owner
                view = with_own_storage(view)
            if param not in fresh:
                view.copy_(param)
            param.data = view  # only now may the old storage go: one bucket at a time is there twice

    @property
    def nbytes(self) -> int:
        """Of the whole bucket, here or not."""
        return self._memory.nbytes

    @property
    def resident_bytes(self) -> int:
        return self._memory.nbytes if self._memory.is_allocated else 0

    def drop(self) -> None:
        """Gives the memory back. Params, and what autograd saved of them, stay views of the same empty storage."""
        self.hide()
        self._memory.free()

    def hide(self) -> None:
        """Params must not be read any more."""
        for index in self._present:
            self.params[index].__class__ = self._classes[index][1]

    def allocate(self) -> None:
        """Memory for the whole bucket again, at another address perhaps; it holds anything."""
        self._memory.allocate()

    def show(self) -> None:
        """The values are whole: params may be read again."""
        for index in self._present:
            self.params[index].__class__ = self._classes[index][0]

    def versions(self) -> list[tuple[torch.nn.Parameter, int]]:
        """How often each param, which is here, was written in place."""
        return [(self.params[index], self.params[index]._version) for index in self._present]

    def remove_param(self, param: torch.nn.Parameter) -> None:
        """Gives one param, which is here, storage of its own; its place stays empty."""
        with torch.no_grad():
            param.data = param.detach().clone(memory_format=torch.preserve_format)
        self._present.remove(next(index for index in self._present if self.params[index] is param))

    def lends_memory_to(self, tensor: torch.Tensor) -> bool:
        """Whether it is a param, or a view of one."""
        return bool(tensor.untyped_storage()._cdata == self.flat.untyped_storage()._cdata)

    @property
    def holders(self) -> int:
        """How many tensors lie in the memory."""
        return int(torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata))

    def move_params_out(self) -> None:
        """The params, which are here, move to other memory, without their values; other views keep this one."""
        self._memory = Memory(self.layout.numel, self.dtype, self.device)
        self.flat = self._memory.tensor
        with torch.no_grad():
            for index in self._present:
                self.params[index].data = self.view(self.flat, index, self.params[index])

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    def shard(self, rank: int) -> torch.Tensor:
        """The slice of ``flat`` that ``rank`` owns, 1D."""
        return self.flat[self.layout.shard_slice(rank)]

    def view(self, buffer: torch.Tensor, index: int, like: torch.Tensor) -> torch.Tensor:
        """The param of ``index`` in a buffer laid out as ``flat``, with its shape and storage order."""
        return buffer.as_strided(like.size(), dense_strides(like), self.layout.offsets[index] + buffer.storage_offset())

    def holds(self, index: int) -> bool:
        """Whether the param of ``index`` is still the view that it was made."""
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

    def release(self) -> None:
        """Gives every param storage of its own again; in a bucket that is not there, none has values to take along."""
        if not self._memory.is_allocated:
            self.show()
        with torch.no_grad():
            for index, param in enumerate(self.params):
                if index in self._present and self.holds(index) and self._memory.is_allocated:
                    param.data = param.detach().clone(memory_format=torch.preserve_format)

"""Writes what a save plan lists: each rank writes its ranges, then rank 0 publishes the checkpoint.

A checkpoint that is written in the background cannot use the process group, which training uses meanwhile. So every
rank leaves a small file when it is done or has failed, and the ranks that wait look for these files. If no file grows
for as long as one wait may take, a rank is gone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import CheckpointError
from ..tensors.safetensors_format import header
from ..version import __version__
from . import files, publish
from .elements import contiguous_strides
from .manifest import checked, to_bytes
from .reader import file_chunks_of_range
from .records import CheckpointInfo, FileInfo, Manifest, SavedRange, Tensors
from .safetensors_file import SafetensorsWriter
from .typed_json import from_json, to_json

# Advice by the error of the system.
_ADVICE = {
    errno.ENOSPC: "free space, or save to another disk",
    errno.EDQUOT: "free space, as the quota of this user is used up, or save to another disk",
    errno.EFBIG: "save to a file system that allows larger files (ulimit -f)",
    errno.EROFS: "save to a file system that is not mounted read-only",
    errno.EACCES: "save to a directory that this user may write to",
    errno.EPERM: "save to a directory that this user may write to",
    errno.EMFILE: "raise the number of open files (ulimit -n)",
    errno.ENFILE: "close files, as the system has too many open",
    errno.EIO: "look at the system's log, which reports a fault of the disk, or save to another disk",
}

if TYPE_CHECKING:
    from .plan_save import SavePlan, WriteItem
    from .publish import NewCheckpoint
    from .records import TensorInfo, TensorKey

_MOST_OF_A_PART = 1 << 30
_SHORTEST, _LONGEST = 0.001, 0.25  # seconds between two looks


@dataclass(frozen=True)
class RankPart:
    """What one rank wrote: its entries of the manifest, which rank 0 reads."""

    name: str
    file: FileInfo
    tensors: Tensors


class RankWriter:
    """Writes one rank's file of one checkpoint; rank 0 then publishes the checkpoint. Ranks communicate by files only.

    See [Note: What a crash leaves] for the order of what it does.
    """

    def __init__(self, target: NewCheckpoint, plan: SavePlan, keep: int | None):
        self.target, self._plan, self._keep = target, plan, keep
        # Read now: the script may destroy its process group while a thread writes.
        self._rank, self._size, self._seconds = plan.world.rank, plan.world.size, plan.world.seconds
        self._path = target.saving / f"rank-{self._rank:05d}.safetensors"

    def run(self) -> None:
        """
        Raises:
            CheckpointError: on this rank or another one.
        """
        try:
            part = self._write()
            if self._keep is not None:
                self._read_back(part)
            self._leave("json", json.dumps(to_json(part)).encode())  # once the rank's file is durable: what it holds
            if self._rank == 0:
                publish.publish(self.target, to_bytes(checked(self._manifest(self._parts()))))
                if self._keep is not None:
                    publish.rotate(self.target.root, self._keep, self.target.published)
            else:
                self._wait(lambda _: files.is_directory(self.target.published), "publishing the checkpoint")
        except BaseException as error:
            with suppress(OSError):
                files.remove(self._path)  # makes room on a full disk, also for the file below
            with suppress(Exception):  # the first error is raised
                self._leave("failed", f"{type(error).__name__}: {error}".encode())
            if isinstance(error, Exception):
                raise as_checkpoint_error(error, self._path, self.target.published)  # noqa: B904 (it has its cause)
            raise
        finally:
            self.target.release()

    def _write(self) -> RankPart:
        """Writes this rank's file. Returns its entries of the manifest."""
        # The widest dtypes first, so that all are aligned in the file.
        items = sorted(self._plan.items, key=lambda item: -item.tensor.dtype.itemsize)
        described = [(item.label, item.tensor.dtype, _shape_in_file(item)) for item in items]
        identity = {"format": "shardopt checkpoint", "token": self.target.token, "rank": str(self._rank)}
        head = header(described, identity)
        tensors: dict[TensorKey, TensorInfo] = {}
        with SafetensorsWriter(files.create(self._path), head) as writer:
            for item in items:
                checks = self._plan.must_be_finite and item.key.name not in self._plan.codes
                offset, sums = writer.add(_finite(item) if checks else item.chunks())
                written = SavedRange(item.start, item.stop, self._path.name, offset, sums)
                tensors[item.key] = replace(item.tensor, ranges=(written,))
            file = writer.finish()
        return RankPart(self._path.name, file, tensors)

    def _read_back(self, part: RankPart) -> None:
        """Raises CheckpointError unless the disk returns what was written."""
        file = files.open_file(self._path)
        try:
            files.forget_pages(file)
            head = bytearray(part.file.header_bytes)
            files.read_into(file, memoryview(head), 0)
            whole = FileInfo(files.size(file), len(head), hashlib.sha256(head).hexdigest()) == part.file
            for key, tensor in part.tensors.items():
                for chunk in file_chunks_of_range(key, tensor, tensor.ranges[0], 0, tensor.numel):
                    buffer = memoryview(bytearray(chunk.nbytes))
                    files.read_into(file, buffer, chunk.offset)
                    whole = whole and zlib.crc32(buffer) == chunk.checksum
        finally:
            files.close(file)
        if not whole:
            raise CheckpointError(
                f"save to another disk: {self._path} reads back with other bytes than were written, so the disk or "
                "memory is faulty. Older checkpoints were kept."
            )

    def _manifest(self, parts: Sequence[RankPart]) -> Manifest:
        """Rank 0: returns the manifest of what all ranks wrote; a missing range shows in its check."""
        tensors: dict[TensorKey, TensorInfo] = dict(self._plan.tensors)
        for part in parts:
            for key, tensor in part.tensors.items():
                before = tensors.get(key, replace(tensor, ranges=()))
                tensors[key] = replace(before, ranges=(*before.ranges, *tensor.ranges))
        plan = self._plan
        info = CheckpointInfo(
            token=self.target.token,
            sequence=self.target.sequence,
            step=self.target.step,
            world=self._size,
            shardopt=__version__,
            torch=str(torch.__version__),
            gradients=plan.gradients,
            extra=plan.extra,
            module_extra=plan.module_extra,
            imported=plan.imported,
        )
        return Manifest(info, plan.params, plan.optimizers, {part.name: part.file for part in parts}, tensors)

    # -- files by which ranks communicate ----------------------------------------------------------------------------

    def _leave(self, suffix: str, data: bytes) -> None:
        """Leaves a file for the other ranks."""
        path = self.target.saving / f"rank-{self._rank:05d}.{suffix}"
        new = path.with_name(f"{path.name}-new")
        files.write_file(new, data)
        files.rename(new, path)  # a rank that finds the file finds all of it
        try:
            files.sync_directory(self.target.saving)
        except FileNotFoundError:
            # Rank 0 has found the file meanwhile, synced the directory, and published it under its other name.
            if not files.is_directory(self.target.published):
                raise

    def _parts(self) -> list[RankPart]:
        """Rank 0: waits for the files of all ranks. Returns each rank's entries of the manifest."""
        wanted = [f"rank-{rank:05d}.json" for rank in range(self._size)]
        self._wait(lambda names: all(name in names for name in wanted), "writing its file")
        left = {name: files.read_file(self.target.saving / name, _MOST_OF_A_PART) for name in wanted}
        return [from_json(RankPart, json.loads(data), name) for name, data in left.items()]

    def _wait(self, is_there: Callable[[dict[str, int]], bool], what: str) -> None:
        last, since, pause = None, time.monotonic(), _SHORTEST
        while True:
            # In this order: the directory may be renamed in between.
            try:
                there = files.sizes(self.target.saving)
            except FileNotFoundError:
                there = {}  # published, or gone
            if is_there(there):
                return
            self._raise_failure(there)
            if there != last:
                last, since = there, time.monotonic()
            if time.monotonic() - since > self._seconds:
                raise CheckpointError(
                    f"look for a rank that died or sees another file system: a rank has not ended {what}, and "
                    f"nothing has grown in {self.target.saving} for {self._seconds:.0f} s. This checkpoint was "
                    "abandoned; the last one is whole."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _raise_failure(self, there: dict[str, int]) -> None:
        for name in there:
            if name.endswith(".failed"):
                text = files.read_file(self.target.saving / name, _MOST_OF_A_PART).decode(errors="replace")
                raise CheckpointError(
                    f"rank {int(name[5:10])} failed while saving; there is no new checkpoint, the last one is whole: "
                    f"{text}"
                )
        if not there and not files.is_directory(self.target.published):
            raise CheckpointError(
                f"save again: {self.target.saving} is gone and nothing was published, because rank 0 gave up or "
                "somebody removed the directory. The last checkpoint is whole."
            )


def _finite(item: WriteItem) -> Iterator[torch.Tensor]:
    """Yields the chunks. Raises CheckpointError where a param, master or state holds an Inf or a NaN."""
    at = item.start
    for chunk in item.chunks():
        if item.key.section == "params" and chunk.is_floating_point() and chunk.numel():
            known = chunk.float() if chunk.element_size() == 1 else chunk  # torch compares no float8
            low, high = torch.aminmax(known)  # one pass; a NaN is both
            if not (torch.isfinite(low) and torch.isfinite(high)):
                wrong = at + int(torch.isfinite(known).logical_not().nonzero()[0])
                raise CheckpointError(
                    "go back to an older checkpoint, or save with allow_nonfinite=True to look at this one: "
                    f"{item.key} holds {float(chunk[wrong - at])} at element {wrong} (in storage order). Nothing was "
                    "published."
                )
        at += chunk.numel()
        yield chunk


def _shape_in_file(item: WriteItem) -> tuple[int, ...]:
    """Returns the tensor's shape if this item is all of it and contiguous, as other readers expect; else a 1D shape."""
    tensor = item.tensor
    whole = item.numel == tensor.numel and tuple(tensor.strides) == contiguous_strides(tensor.shape)
    return tensor.shape if whole else (item.numel,)


def as_checkpoint_error(error: Exception, path: Path, published: Path | None = None) -> CheckpointError:
    """Returns the system's error with advice and what became of the checkpoint, whose path is ``published``."""
    if isinstance(error, CheckpointError):
        return error
    outcome = "No checkpoint was published, those before it are whole"
    if published is not None and files.is_directory(published):
        outcome = f"{published} is whole all the same, only `latest` or the removal of older ones is not done"
    advice = _ADVICE.get(getattr(error, "errno", None) or 0, "fix the cause, or save to another directory")
    converted = CheckpointError(
        f"{advice}, and call save_checkpoint() again: {path}: {type(error).__name__}: {error}. {outcome}."
    )
    converted.__cause__ = error
    return converted

"""Follows a plan of a save: each rank writes its ranges, rank 0 publishes what all have written.

A checkpoint that is written in the background cannot use the process group, in which training goes on. So every rank
leaves a small file when it is done or has failed, and whoever waits looks for those; no file growing for as long as one
wait may take means that a rank is gone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CheckpointError
from ..version import __version__
from . import files, publish
from .elements import contiguous_strides
from .manifest import checked, to_bytes
from .reader import chunks_of_range
from .records import File, Manifest, Range, tensors_from_json, tensors_to_json
from .tensor_file import Writer, header

# What to do about an error of the system. Others have no advice of their own.
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
    from .plan_save import Piece, SavePlan
    from .publish import Site
    from .records import Key, Tensor, Tensors

_MOST_OF_A_PART = 1 << 30
_SHORTEST, _LONGEST = 0.001, 0.25  # seconds between two looks


class RankWriter:
    """Writes one rank's file of one checkpoint; on rank 0 publishes the checkpoint. Meets other ranks by files only.

    See [Note: What a crash leaves] for the order of what it does.
    """

    def __init__(self, site: Site, lock: int | None, plan: SavePlan, keep: int | None):
        self.site, self._lock, self._plan, self._keep = site, lock, plan, keep
        # Read now: while a thread writes, the script may destroy its process group.
        self._rank, self._size, self._seconds = plan.world.rank, plan.world.size, plan.world.seconds
        self._path = site.saving / f"rank-{self._rank:05d}.safetensors"

    def run(self) -> None:
        """
        Raises:
            CheckpointError: on this rank or another one.
        """
        try:
            part = self._write()
            if self._keep is not None:
                self._read_back(part)
            self._tell("json", json.dumps(part).encode())  # the file is durable, and this is what is in it
            if self._rank == 0:
                publish.publish(self.site, to_bytes(checked(self._manifest(self._parts()))))
                if self._keep is not None:
                    publish.rotate(self.site.root, self._keep, self.site.published)
            else:
                self._wait(lambda _: files.is_directory(self.site.published), "publishing the checkpoint")
        except BaseException as error:
            with suppress(OSError):
                files.remove(self._path)  # a full disk has room again, for the file of the next line too
            with suppress(Exception):  # the first error is raised
                self._tell("failed", f"{type(error).__name__}: {error}".encode())
            if isinstance(error, Exception):
                raise as_checkpoint_error(error, self._path, self.site.published)  # noqa: B904 (it has its cause)
            raise
        finally:
            if self._lock is not None:
                files.release(self._lock)

    def _write(self) -> dict[str, Any]:
        """Streams this rank's file. Returns what is in it, for the manifest."""
        # The widest dtypes first, so that all are aligned in the file.
        pieces = sorted(self._plan.pieces, key=lambda piece: -piece.tensor.dtype.itemsize)
        described = [(piece.label, piece.tensor.dtype, _shape_in_file(piece)) for piece in pieces]
        identity = {"format": "shardopt checkpoint", "token": self.site.token, "rank": str(self._rank)}
        head = header(described, identity)
        writer = Writer(files.create(self._path), head)
        tensors: Tensors = {}
        try:
            for piece in pieces:
                offset, sums = writer.add(_checked(piece) if self._plan.must_be_finite else piece.chunks())
                placed = Range(piece.start, piece.stop, self._path.name, offset, sums)
                tensors[piece.key] = replace(piece.tensor, ranges=(placed,))
            file = writer.finish()
        finally:
            writer.close()
        return {
            "name": self._path.name,
            "file": [file.nbytes, file.header_bytes, file.header_sha256],
            "tensors": tensors_to_json(tensors),
        }

    def _read_back(self, part: Mapping[str, Any]) -> None:
        """Raises CheckpointError unless the disk gives back what was written."""
        file = files.open_file(self._path)
        try:
            files.forget_pages(file)
            nbytes, header_bytes, sha = part["file"]
            head = bytearray(header_bytes)
            files.read_into(file, memoryview(head), 0)
            whole = files.size(file) == nbytes and hashlib.sha256(head).hexdigest() == sha
            for key, tensor in tensors_from_json(part["tensors"]).items():
                for chunk in chunks_of_range(key, tensor, tensor.ranges[0], 0, tensor.numel):
                    buffer = memoryview(bytearray(chunk.nbytes))
                    files.read_into(file, buffer, chunk.offset)
                    whole = whole and zlib.crc32(buffer) == chunk.checksum
        finally:
            files.close(file)
        if not whole:
            raise CheckpointError(
                f"save to another disk: {self._path} was written and reads back otherwise, so the disk or memory is "
                "faulty. Older checkpoints were kept."
            )

    def _manifest(self, parts: Sequence[Mapping[str, Any]]) -> Manifest:
        """Rank 0: returns the manifest of what all ranks wrote, which proves that nothing is missing."""
        tensors: dict[Key, Tensor] = dict(self._plan.tensors)
        for part in parts:
            for key, tensor in tensors_from_json(part["tensors"]).items():
                before = tensors.get(key, replace(tensor, ranges=()))
                tensors[key] = replace(before, ranges=(*before.ranges, *tensor.ranges))
        info = {
            "token": self.site.token,
            "sequence": self.site.sequence,
            "step": self.site.step,
            "world": self._size,
            "shardopt": __version__,
            "torch": str(torch.__version__),
            **self._plan.own,
        }
        written = {part["name"]: File(*part["file"]) for part in parts}
        shared = self._plan.shared
        return Manifest(info, shared["params"], shared["optimizers"], written, tensors)

    # -- how ranks learn of each other ------------------------------------------------------------------------------

    def _tell(self, suffix: str, data: bytes) -> None:
        path = self.site.saving / f"rank-{self._rank:05d}.{suffix}"
        new = path.with_name(f"{path.name}-new")
        files.write_file(new, data)
        files.rename(new, path)  # who finds it finds all of it
        try:
            files.sync_directory(self.site.saving)
        except FileNotFoundError:
            # Rank 0 has found the file meanwhile, and has synced and published the directory under its other name.
            if not files.is_directory(self.site.published):
                raise

    def _parts(self) -> list[dict[str, Any]]:
        """Rank 0: waits for what every rank wrote and returns them."""
        wanted = [f"rank-{rank:05d}.json" for rank in range(self._size)]
        self._wait(lambda names: all(name in names for name in wanted), "writing its file")
        return [json.loads(files.read_file(self.site.saving / name, _MOST_OF_A_PART)) for name in wanted]

    def _wait(self, is_there: Callable[[dict[str, int]], bool], what: str) -> None:
        last, since, pause = None, time.monotonic(), _SHORTEST
        while True:
            # In this order: the directory is renamed in between, perhaps.
            try:
                there = files.sizes(self.site.saving)
            except FileNotFoundError:
                there = {}  # published, or gone
            if is_there(there):
                return
            self._raise_failure(there)
            if there != last:
                last, since = there, time.monotonic()
            if time.monotonic() - since > self._seconds:
                raise CheckpointError(
                    f"look for a rank that died or sees another file system: it has not ended {what}, and nothing has "
                    f"grown in {self.site.saving} for {self._seconds:.0f} s. This checkpoint was given up; the "
                    "last one is whole."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _raise_failure(self, there: dict[str, int]) -> None:
        for name in there:
            if name.endswith(".failed"):
                text = files.read_file(self.site.saving / name, _MOST_OF_A_PART).decode(errors="replace")
                raise CheckpointError(
                    f"rank {int(name[5:10])} failed while saving; there is no new checkpoint, the last one is whole: "
                    f"{text}"
                )
        if not there and not files.is_directory(self.site.published):
            raise CheckpointError(
                f"{self.site.saving} is gone and nothing was published: rank 0 gave up, or others removed it. The "
                "last checkpoint is whole."
            )


def _checked(piece: Piece) -> Iterator[torch.Tensor]:
    """Raises CheckpointError where a param, master or state holds an Inf or a NaN."""
    at = piece.start
    for chunk in piece.chunks():
        if piece.key.section == "params" and chunk.is_floating_point() and chunk.numel():
            low, high = torch.aminmax(chunk)  # one pass; a NaN is both
            if not (torch.isfinite(low) and torch.isfinite(high)):
                wrong = at + int(torch.isfinite(chunk).logical_not().nonzero()[0])
                raise CheckpointError(
                    "go back to an older checkpoint, or save with allow_nonfinite=True to look at this one: "
                    f"{piece.key} holds {float(chunk[wrong - at])} at element {wrong} (in storage order). Nothing was "
                    "published."
                )
        at += chunk.numel()
        yield chunk


def _shape_in_file(piece: Piece) -> tuple[int, ...]:
    """Returns the tensor's shape if all of it is here and contiguous, as other readers expect; else a 1D shape."""
    tensor = piece.tensor
    whole = piece.numel == tensor.numel and tuple(tensor.strides) == contiguous_strides(tensor.shape)
    return tensor.shape if whole else (piece.numel,)


def as_checkpoint_error(error: Exception, path: Path, published: Path | None = None) -> CheckpointError:
    """Returns the system's error with what it means for the checkpoints; ``published``: the path of the new one."""
    if isinstance(error, CheckpointError):
        return error
    outcome = "No checkpoint was published, those before it are whole"
    if published is not None and files.is_directory(published):
        outcome = f"{published} is whole all the same, only `latest` or the removal of older ones is not done"
    advice = _ADVICE.get(getattr(error, "errno", None) or 0, "mend the cause, or save to another directory")
    converted = CheckpointError(
        f"{advice}, and call save_checkpoint() again: {path}: {type(error).__name__}: {error}. {outcome}."
    )
    converted.__cause__ = error
    return converted

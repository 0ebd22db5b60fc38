"""Follows a plan of a save: each rank writes its ranges, rank 0 publishes what all have written."""

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..version import __version__
from . import files, publish
from .manifest import checked, to_bytes
from .meeting import FileSignals
from .plan_save import Piece, SavePlan
from .publish import Site
from .reader import chunks_of_range
from .records import (
    File,
    Key,
    Manifest,
    Range,
    Tensor,
    Tensors,
    tensors_from_json,
    tensors_to_json,
)
from .tensor_file import Writer, header


class RankWriter:
    """Writes one rank's file of one checkpoint; on rank 0 publishes the checkpoint. Meets other ranks by files only.

    See [Note: What a crash leaves] for the order of what it does.
    """

    def __init__(self, site: Site, lock: int | None, plan: SavePlan, signals: FileSignals, keep: int | None):
        self.site, self._lock, self._plan, self._signals, self._keep = site, lock, plan, signals, keep
        self._path = site.saving / f"rank-{signals.rank:05d}.safetensors"

    def run(self) -> None:
        """
        Raises:
            CheckpointError: on this rank or another one.
        """
        try:
            part = self._write()
            if self._keep is not None:
                self._read_back(part)
            self._signals.done(part)
            if self._signals.rank == 0:
                publish.publish(self.site, to_bytes(checked(self._manifest(self._signals.parts()))))
                if self._keep is not None:
                    publish.rotate(self.site.root, self._keep, self.site.published)
            else:
                self._signals.published()
        except BaseException as error:
            with suppress(OSError):
                files.remove(self._path)  # a full disk has room again, for the file of the next line too
            with suppress(Exception):  # the first error is raised
                self._signals.failed(error)
            if isinstance(error, Exception):
                raise as_checkpoint_error(error, self._path, self.site.published)  # noqa: B904 (it has its cause)
            raise
        finally:
            if self._lock is not None:
                files.release(self._lock)

    def _write(self) -> dict[str, Any]:
        """Streams this rank's file. Returns what is in it, for the manifest."""
        pieces = self._plan.pieces
        described = [(piece.label, piece.tensor.dtype, _shape_in_file(piece)) for piece in pieces]
        identity = {"format": "shardopt checkpoint", "token": self.site.token, "rank": str(self._signals.rank)}
        writer = Writer(self._path, header(described, identity))
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
            "world": self._signals.size,
            "shardopt": __version__,
            "torch": str(torch.__version__),
            **self._plan.own,
        }
        written = {part["name"]: File(*part["file"]) for part in parts}
        shared = self._plan.shared
        return Manifest(info, shared["params"], shared["optimizers"], written, tensors)


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
    contiguous = torch.empty(tensor.shape, device="meta").stride()
    whole = piece.numel == tensor.numel and tuple(tensor.strides) == tuple(contiguous)
    return tensor.shape if whole else (piece.numel,)


def as_checkpoint_error(error: Exception, path: Path, published: Path | None = None) -> CheckpointError:
    """Returns the system's error with what it means for the checkpoints; ``published``: the path of the new one."""
    if isinstance(error, CheckpointError):
        return error
    outcome = "No checkpoint was published, those before it are whole"
    if published is not None and files.is_directory(published):
        outcome = f"{published} is whole all the same, only `latest` or the removal of older ones is not done"
    converted = CheckpointError(
        f"free space, or save to another directory, and call save_checkpoint() again: {path}: {type(error).__name__}: "
        f"{error}. {outcome}."
    )
    converted.__cause__ = error
    return converted

"""Reads pickles without running any of their code. Used by ``python -m shardopt import`` alone.

torch's restricted loader reads torch's own files. It cannot read the index of a distributed checkpoint, which is a
pickle too, so there is a loader here: it maps the classes in the tables below to inert stand-ins, and refuses others.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...tensors.safetensors_format import DTYPES
from ..manifest import MAX_BYTES


class Inert:
    """Stands in for an object of a foreign class: holds its arguments and state, and does nothing."""

    def __new__(cls, *arguments: Any) -> "Inert":
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict) and all(isinstance(key, str) for key in state):
            self.__dict__.update(state)
        else:
            self.content = state


# Classes in DeepSpeed's files beside tensors. Only the stage is used, which is the argument of its enum.
_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)

_DCP = "torch.distributed.checkpoint."
_METADATA: dict[str, object] = {
    **{
        f"{_DCP}metadata.{name}": Inert
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    },
    f"{_DCP}filesystem._StorageInfo": Inert,
    "pathlib.PosixPath": Inert,
    "pathlib._local.PosixPath": Inert,
    "torch.Size": tuple,
    "torch.serialization._get_layout": str,
    "collections.OrderedDict": OrderedDict,
    **{str(dtype): dtype for dtype in DTYPES.values()},
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        found = _METADATA.get(f"{module}.{name}")
        if found is None:
            raise CheckpointError(f"it names {module}.{name}, which no index of a checkpoint needs")
        return found


def read_index(path: Path) -> Any:
    """Returns the ``.metadata`` of a distributed checkpoint, with inert objects in place of torch's.

    Raises:
        CheckpointError: the file is not an index, or names other classes.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError("it is larger than any index")
        return _Restricted(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to mean
        raise CheckpointError(
            "give the folder that torch.distributed.checkpoint.save() wrote: "
            f"{path} cannot be read as its index: {error}. Nothing of it was run, nothing was written."
        ) from error


def read_file(path: Path) -> Any:
    """Returns what ``torch.save`` wrote; large tensors stay in the file until they are read.

    Raises:
        CheckpointError: the file is damaged, or names classes that are neither torch's own nor in the tables.
    """
    if not path.is_file():
        raise CheckpointError(f"give the files that were saved: {path} is not a file. Nothing was imported.")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"save it again, or give another file: {path} is not a file that torch.save() wrote whole (or it is older "
            "than torch 1.6). Nothing was imported."
        )
    return _restricted(path, str(path), mmap=True)


def read_item(path: Path, offset: int, length: int) -> Any:
    """Returns what ``torch.save`` wrote into a range of a file.

    Raises:
        CheckpointError: as :func:`read_file`.
    """
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(length)
    if len(data) != length:
        raise CheckpointError(
            f"copy the checkpoint again: {path} was truncated: it ends at byte {offset + len(data)}, its index needs "
            f"{offset + length}. Nothing was imported."
        )
    return _restricted(io.BytesIO(data), f"{path}, bytes {offset} to {offset + length},", mmap=False)


def _restricted(source: str | Path | io.BytesIO, where: str, mmap: bool) -> Any:
    try:
        with torch.serialization.safe_globals([(Inert, name) for name in _DEEPSPEED]):
            return torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0] if "Unsupported" not in str(error) else _unsupported(str(error))
        raise CheckpointError(
            "load it with the library that saved it, and save its tensors alone: "
            f"{where} cannot be read: {reason}. Only tensors, numbers, text and containers of these are read, because "
            "other classes can run code. Nothing was imported."
        ) from error


def _unsupported(message: str) -> str:
    """Returns the line of torch's long message that names the class."""
    return next((line.strip() for line in message.splitlines() if "Unsupported" in line), message[:200])

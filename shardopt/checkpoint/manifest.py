"""The manifest: what a checkpoint holds and where each element of it lies, as a frozen table that checks itself."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import CheckpointError
from .records import File, Key, Tensor, check_apart, count, tensors_from_json, tensors_to_json
from .schema import check_schema

VERSION = 1
MAX_BYTES = 1 << 30  # of a manifest: beyond this it is not even read
FILE_NAME = re.compile(r"rank-\d{5}\.safetensors")
_HEAD = '{"sha256": "%s",\n"manifest": '


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but the elements.

    Attributes:
        info: JSON: token, sequence, step, world, versions, and the encoded ``extra``.
        params: by name: aliases (names that are tied to it), optimizer (its index, or None), step, carried, has_state.
        optimizers: rule, whether it counts steps, groups (params by name, encoded values).
    """

    info: Mapping[str, Any]
    params: Mapping[str, Any]
    optimizers: Sequence[Any]
    files: Mapping[str, File]
    tensors: Mapping[Key, Tensor]

    def __post_init__(self) -> None:
        wrong = [name for name in self.files if not FILE_NAME.fullmatch(name)]
        if wrong:
            raise CheckpointError(f"the manifest names the file {wrong[0]!r}, which no rank can have written.")
        for key, tensor in self.tensors.items():
            tensor.check(key, self.files)
        check_apart(self.tensors)
        check_schema(self)

    def of(self, section: str) -> Iterator[tuple[Key, Tensor]]:
        return ((key, tensor) for key, tensor in self.tensors.items() if key.section == section)

    @cached_property
    def kinds(self) -> dict[str, dict[str, Tensor]]:
        """By param: kind ("param", "master" or a state) -> its tensor; without the scales of blocks."""
        found: dict[str, dict[str, Tensor]] = {}
        for key, tensor in self.of("params"):
            if not key.is_of_scales:
                found.setdefault(key.name, {})[key.kind] = tensor
        return found

    def to_bytes(self) -> bytes:
        """JSON that begins with the digest of the rest of it."""
        content = {
            "version": VERSION,
            "info": self.info,
            "params": self.params,
            "optimizers": self.optimizers,
            "files": {name: [each.nbytes, each.header_bytes, each.header_sha256] for name, each in self.files.items()},
            "tensors": tensors_to_json(self.tensors),
        }
        body = json.dumps(content, allow_nan=False).encode() + b"}\n"
        return (_HEAD % hashlib.sha256(body).hexdigest()).encode() + body

    @staticmethod
    def from_bytes(data: bytes, where: str) -> "Manifest":
        """Raises CheckpointError for anything but the bytes that :meth:`to_bytes` gave."""
        head = len(_HEAD % ("0" * 64))
        body = data[head:]
        if data[:head] != (_HEAD % hashlib.sha256(body).hexdigest()).encode():
            raise CheckpointError(
                f"{where} does not match its own digest: it was truncated or changed, and nothing was loaded. Load an "
                "older checkpoint of the same directory; `python -m shardopt verify` tells which are whole."
            )
        try:
            content = json.loads(body[:-2], parse_constant=_no_constant)
            if content["version"] != VERSION:
                raise CheckpointError(
                    f"{where} has format version {content['version']}, this shardopt reads version {VERSION}: update "
                    "shardopt, or save again with the version that wrote it."
                )
            files = {name: File(count(one), count(two), str(sha)) for name, (one, two, sha) in content["files"].items()}
            tensors = tensors_from_json(content["tensors"])
            return Manifest(content["info"], content["params"], content["optimizers"], files, tensors)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{where} is no manifest that shardopt wrote: {error!r}. Nothing was loaded. Load another checkpoint."
            ) from error


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number that shardopt writes")

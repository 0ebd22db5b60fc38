"""The manifest as bytes: a digest, then JSON. A manifest is checked whenever it is written or read."""

import hashlib
import json
import re

from ..errors import CheckpointError
from .records import Manifest, check_apart
from .schema import check_schema
from .typed_json import from_json, to_json

WHOLE, IN_BOXES = 1, 2  # format versions: the second has params that are saved in boxes
MAX_BYTES = 1 << 30  # a larger manifest is not read
FILE_NAME = re.compile(r"rank-\d{5}\.safetensors")
_HEAD = '{"sha256": "%s",\n"manifest": '


def checked(manifest: Manifest) -> Manifest:
    """Returns the manifest. Raises CheckpointError if shardopt cannot have written it."""
    wrong = [name for name in manifest.files if not FILE_NAME.fullmatch(name)]
    if wrong:
        raise CheckpointError(
            f"load another checkpoint: the manifest names the file {wrong[0]!r}, which no rank writes."
        )
    for key, tensor in manifest.tensors.items():
        tensor.check(key, manifest.files)
    check_apart(manifest.tensors)
    check_schema(manifest)
    return manifest


def to_bytes(manifest: Manifest) -> bytes:
    """Returns JSON whose first line is the digest of the rest."""
    is_in_boxes = any(about.blocks is not None for about in manifest.params.values())
    content = {"version": IN_BOXES if is_in_boxes else WHOLE, **to_json(manifest)}
    body = json.dumps(content, allow_nan=False).encode() + b"}\n"
    return (_HEAD % hashlib.sha256(body).hexdigest()).encode() + body


def from_bytes(data: bytes, where: str) -> Manifest:
    """Returns the checked manifest. Raises CheckpointError for bytes that :func:`to_bytes` did not return."""
    head = len(_HEAD % ("0" * 64))
    body = data[head:]
    if data[:head] != (_HEAD % hashlib.sha256(body).hexdigest()).encode():
        raise CheckpointError(
            "load an older checkpoint of the same directory; `shardopt verify` shows which are whole: "
            f"{where} does not match its own digest: it was truncated or changed. Nothing was loaded."
        )
    try:
        content = json.loads(body[:-2], parse_constant=_no_constant)
        if content["version"] not in (WHOLE, IN_BOXES):
            raise CheckpointError(
                "update shardopt, or save again with the version that wrote this checkpoint: "
                f"{where} has format version {content['version']}, this shardopt reads {WHOLE} and {IN_BOXES}."
            )
        return checked(from_json(Manifest, content))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"load another checkpoint: {where} is not a manifest that shardopt wrote: {error!r}. Nothing was loaded."
        ) from error


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number that shardopt writes")

"""Saves the weights alone, as ``save_pretrained()`` lays them out: safetensors files below a size, and their index.

Other libraries read the directory. Weights come as a stream, so no rank ever holds the model: rank 0 writes each as it
comes. Files take their names once all of them are whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..arguments import path, whole
from ..domain.agreement import agree_on_call, agreed
from ..domain.dtensors import is_dtensor
from ..domain.param_names import without_wrappers
from ..errors import CheckpointError
from ..optim.optimizer import ShardedOptimizer
from ..partition.layout import split_into_buckets
from ..tensors.inner_tensors import is_wrapper
from ..tensors.safetensors_format import NAME_OF_DTYPE, header
from . import files
from .export import new_file
from .names import unwrapped
from .records import CHUNK_BYTES
from .safetensors_file import SafetensorsWriter

if TYPE_CHECKING:
    from ..engine import Engine
    from ..states.merged_weights import Merge


def save_weights(
    directory: str | os.PathLike[str],
    optimizer: ShardedOptimizer,
    *,
    dtype: torch.dtype | None = None,
    bytes_per_file: int = 5_000_000_000,
    merge: Merge | None = None,
    prefix: str = "",
) -> None:
    """Saves whole weights and saved buffers for other libraries, as ``model.save_pretrained()`` does. Collective.

    Writes ``model.safetensors``, or several files and ``model.safetensors.index.json``, on rank 0 of the optimizer's
    ranks. No rank holds the model: weights are gathered a bucket at a time, as by ``optimizer.weights()``. Tied ones
    are saved once. To resume a training, use ``save_checkpoint()``.

    Args:
        directory: made if missing; files of the same names are replaced once the new ones are whole.
        optimizer: of the module.
        dtype: of what is of floating point; None: its own.
        bytes_per_file: the most bytes of weights in a file, but for a single larger one.
        merge: merges adapters, as ``optimizer.weights(merge=)`` does.
        prefix: is taken off the names that begin with it: ``"base_model.model."`` of PEFT's models.

    Raises:
        CheckpointError: weights are of a kind that the format does not have; nothing was written.
        OSError: rank 0 could not write; the other ranks raise a DisagreementError or a StateError.
        TypeError, ValueError: an argument has another type or is out of range.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(f"save_weights(optimizer=) takes one of shardopt's, found {type(optimizer).__name__}.")
    engine, given, metadata = optimizer.engine, dict[str, Path](), dict[str, torch.Tensor]()

    def read() -> dict[str, Any]:
        given["directory"] = Path(path(directory, "save_weights(directory=)"))
        metadata.update(optimizer.weights_metadata(dtype, merge=merge))
        if not isinstance(prefix, str):
            raise TypeError(f"save_weights(prefix=) takes the text that names begin with, found {prefix!r:.80}.")
        if engine.options.norm_group is not None or len(engine.domains) > 1:
            raise CheckpointError(
                "call save_checkpoint(), then `python -m shardopt export`: ranks of this model hold different params "
                "(stages of a pipeline, experts), and one rank's weights are not all of them. Nothing was written."
            )
        unknown = [name for name, each in metadata.items() if each.dtype not in NAME_OF_DTYPE]
        if unknown:
            raise CheckpointError(
                f"save {unknown[0]!r} yourself: its dtype is {metadata[unknown[0]].dtype}, which safetensors files do "
                "not have. Nothing was written."
            )
        wrapped = next((name for name in _wrapped(engine) if name in metadata), None)
        if wrapped is not None:
            raise CheckpointError(
                f"give save_weights(merge=) a function that makes plain tensors of {wrapped!r}, or save_checkpoint(): "
                "its values lie in several tensors inside of it, and safetensors files hold plain ones. Nothing was "
                "written."
            )
        return {"bytes_per_file": whole(bytes_per_file, "save_weights(bytes_per_file=)", least=1)}

    engine.turn.check("save_weights()")
    engine.end_stream("save_weights()")
    most = agree_on_call("save_weights()", read, engine.ranks())["bytes_per_file"]
    with agreed("save_weights()", engine.ranks()):
        _write(given["directory"], engine, metadata, most, dtype, merge, prefix)


def _wrapped(engine: Engine) -> Iterator[str]:
    """Yields the names of params that are quantized weights with other tensors inside."""
    module = None if engine.takeover is None else unwrapped(engine.takeover.module)
    for name, param in () if module is None else module.named_parameters():
        if is_wrapper(param) and not is_dtensor(param):
            yield without_wrappers(name)


def _write(
    directory: Path,
    engine: Engine,
    metadata: Mapping[str, torch.Tensor],
    most: int,
    dtype: torch.dtype | None,
    merge: Merge | None,
    prefix: str,
) -> None:
    from ..calls.whole_params import weights

    # Closed ahead of the ranks' meeting: an error keeps what its frames refer to.
    with closing(weights(engine, min(most, 256 << 20), dtype, None, merge)) as stream:
        if engine.ranks().rank:
            for _ in stream:
                pass
        else:
            _write_stream(directory, stream, metadata, most, prefix)


def _write_stream(
    directory: Path,
    stream: Iterator[tuple[str, torch.Tensor]],
    metadata: Mapping[str, torch.Tensor],
    most: int,
    prefix: str,
) -> None:
    files.make_directories(directory)
    names, count = list(metadata), 0
    parts = split_into_buckets([metadata[name].nbytes for name in names], most)
    name_of: dict[str, str] = {}
    with ExitStack() as made:  # no file takes its name before all of them are whole
        for number, part in enumerate(parts, 1):
            few = len(parts) == 1
            target = "model.safetensors" if few else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            own = [names[at] for at in part]
            shown = {name: name.removeprefix(prefix) for name in own}
            name_of.update(dict.fromkeys(shown.values(), target))
            head = header([(shown[name], metadata[name].dtype, metadata[name].shape) for name in own], {"format": "pt"})
            _, file = made.enter_context(new_file(directory / target))
            with SafetensorsWriter(file, head) as writer:
                for name in own:
                    found, weight = next(stream)
                    assert found == name
                    writer.add(_chunks(weight))
                    count += weight.nbytes
                    del weight
                writer.finish()
        for _ in stream:  # its end, which all ranks reach together
            raise AssertionError
    if len(parts) > 1:
        index = {"metadata": {"total_size": count}, "weight_map": name_of}
        with new_file(directory / "model.safetensors.index.json") as (_, file), open(file, "wb") as opened:
            opened.write(json.dumps(index, indent=2).encode())
    files.sync_directory(directory)


def _chunks(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = weight.contiguous().view(-1)
    return (each.cpu() for each in flat.split(max(CHUNK_BYTES // max(flat.element_size(), 1), 1)) if each.numel())

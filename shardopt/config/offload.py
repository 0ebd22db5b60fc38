"""Where masters, states, gradients and params are kept between steps, in one frozen dataclass."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..arguments import flag, number, path, whole, word
from ..option import check_fields, option


def _memory_or_directory(value: Any, what: str) -> Any:
    path(value, f"{what} ('cpu' or a directory)")
    is_bare = isinstance(value, str) and value != "cpu" and os.sep not in value
    if is_bare and not os.path.isdir(value):
        raise ValueError(
            f"give 'cpu', an absolute path, or '{os.curdir}{os.sep}{value}': {what}={value!r} is neither 'cpu' nor a "
            "directory that exists."
        )
    return value


def _path_of_params(value: Any, what: str) -> Any:
    path(value, f"{what} ('cpu', the directory of states, or None)")
    return value


def _fraction(value: Any, what: str) -> Any:
    if isinstance(value, str) and value == "auto":
        return value
    return number(value, what, above=0, most=1, or_none=" or 'auto'")


def _tier(where: object) -> str:
    """Returns what ranks compare: each rank may have its own directory."""
    return "host" if where == "cpu" else "disk"


@dataclass(frozen=True)
class Offload:
    """Where masters, states, gradients and params are kept between steps. It changes no bit of the result.

    ``"cpu"`` is host memory, anything else a directory, in which each rank makes a file of its own: the file holds two
    copies of the rank's masters and states, and is removed with the optimizer.

    Attributes:
        states: masters and states: ``"cpu"`` or a directory.
        gradients: sums of gradients, at stage 2 and 3: ``"cpu"``, or None: on the device. A sum is copied from the GPU
            as soon as it is reduced, and back for a later backward that adds to it, or for an update on the GPU. Not on
            a mesh of (replicate, shard).
        params: this rank's slices at stage 3, those of frozen params too: ``"cpu"``, the directory of ``states``, or
            None: on the device. In a directory, params are read whenever their module runs, and sent in messages.
        step: where the update of params on a GPU runs: on the ``"gpu"``, through which states stream; on the ``"cpu"``,
            to which gradients are copied and from which params are copied back; ``"auto"`` measures both in the first
            steps and keeps the faster one (``opt.timings()`` shows which). With states on a disk it is the CPU.
        fraction: of the bytes of masters and states that is offloaded. The rest stays on the device: that of the first
            buckets of backward, whole ones. ``"auto"`` offloads all of them, and after the second step takes back as
            much as every rank's device has room for.
        early_bytes: of copies of states and params, which a backward updates as soon as a bucket is reduced; the step
            takes them if nothing changed what they were made of, else it updates as it does without. With the module,
            and states in host memory. 0: the step makes all updates. ``opt.timings()`` counts what it took.
        pin_memory: True to register host memory with the GPU, where there is one.
    """

    states: str | os.PathLike[str] = option(
        "cpu", 'masters and states: `"cpu"` or a directory', _memory_or_directory, compared=_tier
    )
    gradients: Literal["cpu"] | None = option(
        None,
        'sums of gradients, at stage 2 and 3: `"cpu"`; None: on the device',
        partial(word, choices=("cpu",), or_none=" or None"),
    )
    params: str | os.PathLike[str] | None = option(
        None,
        'slices of params at stage 3: `"cpu"` or the directory of `states`; None: on the device',
        _path_of_params,
        compared=_tier,
    )
    step: Literal["auto", "cpu", "gpu"] = option(
        "auto",
        'where the update of params on a GPU runs: `"gpu"`, `"cpu"`, or `"auto"`, the faster one',
        partial(word, choices=("auto", "cpu", "gpu")),
        local="each rank updates its own slice, with the same bits on a CPU and a GPU",
    )
    fraction: float | Literal["auto"] = option(
        1.0,
        "the part of masters and states that is offloaded, by bytes, in whole buckets: the first ones of backward stay "
        'on the device; `"auto"`: as many stay as there is room for after the second step',
        _fraction,
    )
    early_bytes: int = option(
        0,
        "bytes of copies of states and params that a backward updates for the step to take, as soon as a bucket is "
        "reduced ([early updates](offload.md#early-updates)); 0: none",
        partial(whole, least=0),
        local="each rank updates its own slice, early or not, with the same bits",
    )
    pin_memory: bool = option(
        True, "register host memory with the GPU, where there is one", flag, local="it is this rank's host memory"
    )

    def __post_init__(self) -> None:
        check_fields(self, "Offload.")
        if self.params not in (None, "cpu") and (self.states == "cpu" or Path(self.params or "") != self.directory):
            raise ValueError(
                f"give both the same directory, found Offload.params={os.fspath(self.params or '')!r} and "
                f"Offload.states={os.fspath(self.states)!r}: a disk takes params together with masters and states, "
                "so that a step that fails changes neither; in two places one could fail alone."
            )

        if self.early_bytes and self.states != "cpu":
            raise ValueError(
                f"give Offload.states='cpu', or omit Offload.early_bytes={self.early_bytes}: a file keeps what a step "
                "writes only once all ranks have written theirs, and a backward cannot write to it, found "
                f"Offload.states={os.fspath(self.states)!r}."
            )

    @property
    def directory(self) -> Path | None:
        """The directory of the files; None in memory."""
        return None if self.states == "cpu" else Path(self.states)

"""The rare options, in one frozen dataclass."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ..arguments import flag, number, parts_of_model, texts, whole, word
from ..option import check_fields, option

MIB = 1 << 20
_YEARS = 10 * 365 * 86400.0  # stands for "no limit": deadlines are nanoseconds in 64 bits


def _seconds(value: object, what: str) -> float:
    own = " (seconds), or None for the process group's own"
    return min(number(value, what, above=0, or_none=own), _YEARS)


def _who_holds(value: Any, what: str) -> bool | int | str | tuple[str, ...]:
    if isinstance(value, str) and value == "host":
        return "host"
    if isinstance(value, str):
        raise TypeError(
            f'{what} takes a number of ranks, True, False, "host", or several patterns of names, as '
            f'("layers.*",), found {value!r}.'
        )
    if isinstance(value, Sequence | AbstractSet):
        return texts(value, what, '("layers.*",)')
    if isinstance(value, bool):
        return value
    return whole(value, what, least=0, or_none=', True, False, "host", or patterns of names')


def _number_or_lists(value: Any, what: str) -> int | dict[str, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        return whole(value, what, least=0, or_none=", a dict of names of units, or None")
    names = texts(value.keys(), what, '{"layers.0": ("layers.1",)}')
    return {name: texts(value[name], f"{what}[{name!r}]", '("layers.1",)') for name in names}


def _class_name(module: Any) -> str:
    kind = module if isinstance(module, type) else type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True)
class Tuning:
    """The rare options. Only ``broadcast_buffers``, ``compress_from``, ``seed``, ``nonfinite``, ``by_host`` (the order
    of sums) and, for writes through ``param.data``, ``compare_masters`` change bits of the result.

    Attributes:
        bucket_bytes: largest bytes of params in one bucket; a single larger param has a bucket of its own, and at stage
            3 the sharded params of a unit have one. Smaller buckets overlap better and need less memory while gradients
            are reduced; each costs one launch and one message to every rank. None: 32 MiB, but 2 MiB for a module on
            CPUs, where messages cost little and the gradient of a param that fills a bucket is reduced where it lies.
        keep_below: stage 3: params of fewer elements than this stay whole on every rank, as at stage 2: norms, biases
            and small embeddings weigh little, and gathering each would cost a message.
        keep: stage 3: patterns of names of params and modules that stay whole on every rank, as at stage 2, whatever
            their size: ``("lm_head", "*.norm")``. Names are those of ``model.named_parameters()``, ``*`` stands for any
            text. For params that another module's forward reads. Masters, states and gradients are sharded all the
            same.
        live_bytes: stage 3: budget of gathered bytes, for what is gathered ahead and what is kept from forward to
            backward. The unit in use may exceed it, and no unit travels twice in one forward or one backward because of
            it; 0: nothing is gathered ahead or kept. None: the unit in use and two ahead, or the unit in use alone
            where ranks read each other's memory (``prefetch`` and ``reshard_after_forward`` say more).
        units: stage 3: what a unit is, in place of what is found: module classes, modules, patterns of module names.
            Each module named is a unit with all its params; the outermost counts. What remains has a unit for each
            module with params of its own. The model itself, as ``units=(model,)``, is one unit: one gather, and one
            graph of ``torch.compile``.
        reshard_after_forward: stage 3: False: units stay gathered from the forward to the backward, which needs their
            memory and saves their second gather. Or patterns of names of units: the others stay. Or a number of ranks,
            which divides those that share params: each rank keeps one part in so many of each unit, 1 / number of its
            bytes, from a gather until slices change, and the backward's gather runs among that many ranks that follow
            each other. ``"host"``: the ranks of a host, of which all hosts have as many.
        prefetch: stage 3, where params travel: how many units are gathered ahead of the one in use; or a dict from the
            name of a unit to the names of those whose gather starts with its use, in forward and backward. None: as
            many as the budget allows.
        timeout: seconds that one wait for the other ranks may take, at most ten years (``math.inf`` is that); None: the
            process group's own timeout, but five minutes for a gather of stage 3 by messages. NCCL's own reductions and
            gathers always have the group's timeout.
        neighbours: let CPU ranks of one machine read each other's params out of memory, where the system allows it,
            instead of sending them through sockets.
        by_host: of CPU ranks on several hosts, of which each has as many: sums of gradients are taken within a host,
            and one rank of each host exchanges them; updated params cross to each host once. Sums are then in the order
            (ranks of host 0) + (ranks of host 1) + ... See docs/traffic.md.
        overlap_gather: stages 1 and 2 with the module, where params travel: ``step()`` returns while updated params are
            on their way, and each bucket is waited for when the next forward needs it. What reads a param elsewhere
            waits for all of them. What C++ reads without telling Python (``torch.func.grad(f)(param)``, a scripted
            function, an extension, a CUDA graph, another stream) finds NaN outside of the forward of the param's own
            module: it belongs in ``with optimizer.unsharded():``. See docs/stages.md.
        broadcast_buffers: of a module without DDP around it: every rank's buffers (running statistics) become those of
            the first rank: at binding, before a forward in training and at the end of each step. False: each rank keeps
            its own. Around a module that is wrapped in DDP, DDP's own option says so.
        chunk_bytes: of one state that is read from a disk, updated and written at a time; 4 chunks of all states are
            in memory.
        nonfinite: what a step does when a gradient holds an Inf or a NaN: ``"skip"`` it on all ranks together with a
            warning (nothing changes, step counts included), ``"raise"`` on all ranks before anything changed, or
            ``"propagate"`` as torch does (and save the reading of the gradients that looking for it takes). Where
            gradients are released, buckets may be updated before it is met in another one: then the first two are an
            error on all ranks, after which the training restarts from a checkpoint.
        compress_from: elements of a param (all of it, not of a shard) from which on ``state_format`` holds; smaller
            ones keep their states in fp32: biases and norms weigh little and matter much.
        seed: of stochastic rounding, and of noise that is drawn for a gradient or a state that is a part.
        compare_masters: of low-precision params with fp32 masters: an update compares each master with its param, and a
            param that something else wrote counts. False: only what moved a version counter does, or what reads or
            saves masters finds; other writes, through ``param.data``, are undone by the next step. See
            docs/what-you-hold.md.
        compare_gathered: at stage 3 a forward that a backward follows compares this rank's slice of each gathered unit,
            before it is dropped, with what was gathered, as an evaluation does; a write through ``param.data`` in
            between is then an error. It reads the slice twice. False: such a write is lost without a word.
    """

    bucket_bytes: int | None = option(
        None,
        "largest bytes of params in one bucket; None: 32 MiB, 2 MiB for a module on CPUs",
        partial(whole, least=1, or_none=", or None to leave it open"),
    )
    keep_below: int = option(
        65_536, "stage 3: params of fewer elements stay whole on every rank", partial(whole, least=0)
    )
    keep: Sequence[str] = option(
        (),
        "stage 3: patterns of names of params and modules that stay whole ([how](stage-3.md#kept-whole-by-name))",
        partial(texts, example='("lm_head", "*.norm")'),
    )
    live_bytes: int | None = option(
        None,
        "stage 3: budget of gathered bytes; None: the unit in use, and two ahead where params travel",
        partial(whole, least=0, or_none=", or None for the unit in use and two ahead"),
    )
    units: Sequence[type[nn.Module] | nn.Module | str] = option(
        (),
        "stage 3: what a unit is: module classes, modules, patterns of module names; none: found from the model",
        parts_of_model,
        compared=lambda given: [each if isinstance(each, str) else _class_name(each) for each in given],
    )
    reshard_after_forward: bool | int | Literal["host"] | Sequence[str] = option(
        True,
        "stage 3: False: units stay gathered until the backward; or patterns of names: the other units stay; or how "
        'many ranks, or `"host"`, [hold them between them](stage-3.md#held-by-fewer-ranks)',
        _who_holds,
    )
    prefetch: int | Mapping[str, Sequence[str]] | None = option(
        None,
        "stage 3, where params travel: units gathered ahead, or a dict from a unit to those that follow it",
        _number_or_lists,
    )
    timeout: float | None = option(
        None,
        "seconds of one wait for other ranks; None: the process group's timeout (5 minutes for a gather of stage 3)",
        _seconds,
        local="it is how long this rank waits",
    )
    neighbours: bool = option(
        True, "CPU ranks of one machine read each other's params out of memory where the system allows it", flag
    )
    by_host: bool = option(
        False,
        "CPU ranks, several on each of several hosts: gradients and updated params cross to each host once "
        "([how](traffic.md#by-host))",
        flag,
    )
    overlap_gather: bool = option(
        False,
        "stages 1, 2 with the module, where params travel: they arrive during the next forward "
        "([what it takes](stages.md#params-that-arrive-during-the-next-forward))",
        flag,
    )
    broadcast_buffers: bool = option(
        True,
        "of a module without DDP: all ranks train with the first one's buffers "
        "([when](migration.md#from-distributeddataparallel))",
        flag,
    )
    chunk_bytes: int = option(
        4 * MIB,
        "of one state that is read from a disk, updated and written at a time",
        partial(whole, least=1),
        local="chunks are read, updated and written by this rank alone",
    )
    nonfinite: Literal["skip", "raise", "propagate"] = option(
        "skip",
        'a step whose gradients hold an Inf or a NaN: `"skip"` it, `"raise"`, or `"propagate"` as torch does',
        partial(word, choices=("skip", "raise", "propagate")),
    )
    compress_from: int = option(
        4096, "elements of a param from which on `state_format` holds; smaller ones keep fp32", partial(whole, least=0)
    )
    seed: int = option(0, "of stochastic rounding, and of noise of gradients", partial(whole, least=-(2**63)))
    compare_masters: bool = option(
        True,
        "an update compares fp32 masters with their params ([what is lost without](what-you-hold.md#params))",
        flag,
    )
    compare_gathered: bool = option(
        False,
        "stage 3: a training forward finds [writes through `.data`](what-you-hold.md#params), as an evaluation does",
        flag,
    )

    def __post_init__(self) -> None:
        check_fields(self, "Tuning.")
        if self.by_host and not self.neighbours:
            raise ValueError(
                "omit neighbours=False or by_host=True: Tuning(by_host=True) sums gradients in memory that ranks of a "
                "host read, and neighbours=False lets no rank read another's."
            )

    def bucket_bytes_of(self, device: torch.device, has_module: bool) -> int:
        """The bytes to use where they were left open."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        return 2 * MIB if has_module and device.type == "cpu" else 32 * MIB

    @property
    def deadline(self) -> timedelta | None:
        """``timeout`` as a process group takes it."""
        return None if self.timeout is None else timedelta(seconds=self.timeout)

"""What the user may say, validated when it is said, frozen afterwards."""

import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .arguments import flag, number, parts_of_model, path, texts, whole, word
from .option import Flag, check_fields, option

__all__ = ["Offload", "OptionKeywords", "Options", "Stage", "Tuning"]

MIB = 1 << 20
_YEARS = 10 * 365 * 86400.0  # what "no limit" comes to: deadlines are kept in nanoseconds of 64 bits


def _seconds(value: object, what: str) -> float:
    own = " (seconds), or None for the process group's own"
    return min(number(value, what, above=0, or_none=own), _YEARS)


def _flag_or_texts(value: Any, what: str) -> bool | tuple[str, ...]:
    if isinstance(value, str | Sequence | AbstractSet):
        return texts(value, what, '("layers.*",)')
    return flag(value, what, " or patterns of names")


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
    """The rare knobs. None of them changes a bit of the result, but for ``compress_from`` and ``seed``.

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
            module with params of its own.
        reshard_after_forward: stage 3: False: units stay gathered from the forward to the backward, which needs their
            memory and saves their second gather. Or patterns of names of units: the others stay.
        prefetch: stage 3, where params travel: how many units are gathered ahead of the one in use; or a dict from the
            name of a unit to the names of those whose gather starts with its use, in forward and backward. None: as
            many as the budget allows.
        timeout: seconds that one wait for the other ranks may take, at most ten years (``math.inf`` is that); None: the
            process group's own timeout, but five minutes for a gather of stage 3 by messages. NCCL's own reductions and
            gathers always have the group's timeout.
        neighbours: let CPU ranks of one machine read each other's params out of memory, where the system allows it,
            instead of sending them through sockets.
        overlap_gather: stages 1 and 2 with the module, where params travel: ``step()`` returns while updated params are
            on their way, and each bucket is waited for when the next forward needs it. What reads a param elsewhere
            waits for all of them. What C++ reads without telling Python (``torch.func.grad(f)(param)``, a scripted
            function, an extension, a CUDA graph, another stream) finds NaN outside of the forward of the param's own
            module: it belongs in ``with optimizer.unsharded():``. See docs/stages.md.
        chunk_bytes: of one state that is read from a disk, updated and written at a time; 4 chunks of all states are
            in memory.
        nonfinite: what a step does when a gradient holds an Inf or a NaN: ``"skip"`` it on all ranks together with a
            warning (nothing changes, step counts included), ``"raise"`` on all ranks before anything changed, or
            ``"propagate"`` as torch does (and save the reading of the gradients that looking for it takes). Where
            gradients are released, buckets may be updated before it is met in another one: then the first two are an
            error on all ranks, after which the training goes on from a checkpoint.
        compress_from: elements of a param (all of it, not of a shard) from which on ``state_format`` holds; smaller
            ones keep their states in fp32: biases and norms weigh little and matter much.
        seed: of stochastic rounding.
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
        "stage 3: patterns of names of params and modules that stay whole ([how](stages.md#kept-whole-by-name))",
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
    reshard_after_forward: bool | Sequence[str] = option(
        True,
        "stage 3: False: units stay gathered until the backward; or patterns of names: the other units stay",
        _flag_or_texts,
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
    overlap_gather: bool = option(
        False,
        "stages 1, 2 with the module, where params travel: they arrive during the next forward "
        "([what it takes](stages.md#params-that-arrive-during-the-next-forward))",
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
    seed: int = option(0, "of stochastic rounding", partial(whole, least=-(2**63)))

    def __post_init__(self) -> None:
        check_fields(self, "Tuning.")

    def bucket_bytes_of(self, device: torch.device, has_module: bool) -> int:
        """The bytes to use where they were left open."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        return 2 * MIB if has_module and device.type == "cpu" else 32 * MIB

    @property
    def deadline(self) -> timedelta | None:
        """``timeout`` as a process group takes it."""
        return None if self.timeout is None else timedelta(seconds=self.timeout)


Stage = Literal[0, 1, 2, 3]
Master = Literal["fp32", "split", "split24", "none"]
StateFormat = Literal["fp32", "bf16", "int8"]  # from exact to coarse
GradientFormat = Literal["fp32", "bf16"]


def _memory_or_directory(value: Any, what: str) -> Any:
    path(value, f"{what} ('cpu' or a directory)")
    is_bare = isinstance(value, str) and value != "cpu" and os.sep not in value
    if is_bare and not os.path.isdir(value):
        raise ValueError(
            f"{what}={value!r} is neither 'cpu' nor a directory that exists. Give 'cpu', an absolute path, or "
            f"'{os.curdir}{os.sep}{value}'."
        )
    return value


def _path_of_params(value: Any, what: str) -> Any:
    path(value, f"{what} ('cpu', the directory of states, or None)")
    return value


def _tier(where: object) -> str:
    """Ranks may have directories of their own."""
    return "host" if where == "cpu" else "disk"


@dataclass(frozen=True)
class Offload:
    """What is kept where between steps. None of it changes a bit of the result.

    ``"cpu"`` is host memory, anything else a directory: each rank makes its own file in it, which holds two copies of
    its masters and states, and removes it with the optimizer.

    Attributes:
        states: masters and states: ``"cpu"`` or a directory.
        gradients: sums of gradients, at stage 2 and 3: ``"cpu"``, or None: on the device. From a GPU each goes down as
            soon as it is reduced, and comes up for a later backward that adds to it, or for an update on the GPU. Not
            on a mesh of (replicate, shard).
        params: this rank's slices at stage 3, those of frozen params too: ``"cpu"``, the directory of ``states``, or
            None: on the device. From a directory they are read whenever their module runs, and travel in messages.
        step: where the update of params on a GPU runs: on the ``"gpu"``, through which states stream; on the ``"cpu"``,
            to which gradients come down and from which params go up; ``"auto"`` measures both in the first steps and
            goes on with the faster one (``opt.timings()`` shows which). From a disk it is the CPU.
        pin_memory: whether host memory is registered with the GPU, where there is one.
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
    pin_memory: bool = option(
        True, "register host memory with the GPU, where there is one", flag, local="it is this rank's host memory"
    )

    def __post_init__(self) -> None:
        check_fields(self, "Offload.")
        if self.params not in (None, "cpu") and (self.states == "cpu" or Path(self.params or "") != self.directory):
            raise ValueError(
                f"Offload.params={os.fspath(self.params or '')!r} and Offload.states={os.fspath(self.states)!r}: on a "
                "disk params are written in one go with their masters and states, so that a step that fails leaves "
                "both as they were; in two places one could fail alone. Give both the same directory."
            )

    @property
    def directory(self) -> Path | None:
        """Where files are made; None in memory."""
        return None if self.states == "cpu" else Path(self.states)

    @property
    def params_tier(self) -> str:
        """Of slices at stage 3: "device", "host" or "disk"."""
        if self.params is None:
            return "device"
        return "host" if self.params == "cpu" else "disk"


def _module(value: object, what: str) -> object:
    if value is not None and not isinstance(value, nn.Module):
        raise TypeError(f"{what} takes an nn.Module, found {type(value).__name__}.")
    modules = () if value is None else value.named_modules()
    scripted = next((name for name, each in modules if isinstance(each, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise TypeError(
            f"give module.parameters(), or the module before torch.jit made it: {scripted or 'the module'} is a "
            f"ScriptModule, which calls no hooks of shardopt; {what} would miss its gradients."
        )
    return value


def _stage(value: object, what: str) -> int:
    stages = f"{what} (0: replicate, 1: shard masters and states, 2: gradients too, 3: params too)"
    return whole(value, stages, least=0, most=3)


def check_process_group(group: object, what: str) -> None:
    """Raises TypeError or ValueError unless ranks that share states can be read off it."""
    if group is not None and not isinstance(group, dist.ProcessGroup | DeviceMesh):
        raise TypeError(
            f"{what} takes a ProcessGroup that this rank is a member of, or a DeviceMesh, found {group!r}: construct "
            "the optimizer on members only (new_group returns a number elsewhere)."
        )
    if isinstance(group, DeviceMesh) and group.ndim > 2:
        raise ValueError(
            f"a DeviceMesh of {group.ndim} dimensions says nothing about which of them share the states: slice it to "
            "two, (replicate, shard), or one."
        )


def _process_group(value: object, what: str) -> object:
    check_process_group(value, what)
    return value


def check_norm_group(value: object, what: str) -> object:
    """Raises TypeError unless ranks that train one model can be read off it."""
    if not isinstance(value, dist.ProcessGroup | DeviceMesh):
        raise TypeError(
            f"{what} takes a ProcessGroup that this rank is a member of, or a DeviceMesh, found {value!r}: the other "
            "ranks' gradients would be left out of the norm. Give all ranks that train the model: "
            "torch.distributed.group.WORLD, or a group of them."
        )
    return value


def _state_format(value: object, what: str) -> object:
    if not isinstance(value, str | Mapping):
        raise TypeError(f"{what} takes a format or a mapping of states to formats, found {value!r}.")
    for each in [value] if isinstance(value, str) else value.values():
        word(each, what, get_args(StateFormat), or_none=", or a mapping that names one a state")
    return value


def _decay(value: object, what: str) -> float:
    return number(value, f"{what} (the decay of a moving average)", least=0, below=1, or_none=", or None for none")


def _reduce_dtype(value: object, what: str) -> object:
    if not any(value is each for each in (torch.float32, torch.bfloat16, torch.float16)):
        raise ValueError(
            f"{what} must be torch.float32, bfloat16 or float16, or None for the gradient's own, found {value!r}."
        )
    return value


def _offload(value: object, what: str) -> object:
    if not isinstance(value, str | os.PathLike | Offload):
        raise TypeError(f"{what} takes 'cpu', a directory or a shardopt.Offload, found {value!r}.")
    _in_full(value)  # an empty path is refused now
    return value


def _in_full(value: Any) -> Offload:
    return value if isinstance(value, Offload) else Offload(value)


def _tuning(value: object, what: str) -> object:
    if value is None:
        return Tuning()
    if not isinstance(value, Tuning):
        raise TypeError(f"{what} takes a shardopt.Tuning, found {type(value).__name__}.")
    return value


def _is_given(_: object) -> bool:
    return True


@dataclass(frozen=True)
class Options:
    """How an optimizer is sharded.

    Attributes:
        module: plain or DDP module whose gradients are reduced here (2 units of traffic a step where DDP and a
            sharded step take 3), and whose params are sharded at stage 3. Needed from stage 2 on.
        stage: 0 replicates everything; 1 gives each rank an equal slice of the masters and states; 2 of the gradients
            too; 3 of the params too.
        process_group: the ranks that share the states: those that gradients are averaged over. None: the DDP module's
            group, the default group, or no communication where there is none. A 2D ``DeviceMesh`` (replicate, shard)
            shards within its second dimension and keeps a copy for each coordinate of its first. A param group can
            have one of its own, as a key: experts that fewer ranks share than the rest of the model. It holds all
            copies of the group's params (but for those of DTensors): other ranks hold something else.
        norm_group: all ranks that train one model, where these are more than ``process_group`` holds: those of the
            other stages of a pipeline. The norm and the decision to skip a step are theirs together. None: the ranks
            of ``process_group`` and, where params are DTensors, of their mesh.
        master: the masters of bf16 params: ``"fp32"``, all of the master in 4 bytes; ``"split"``, the half that
            the param lacks, exact in 2; ``"split24"``, 8 bits of it, in 1; ``"none"``: no master, and the param is
            rounded stochastically, by a counter keyed by seed, step, param and element. fp16 params take ``"fp32"``.
        state_format: of states: ``"fp32"``, ``"bf16"`` or ``"int8"`` (blocks of 256), as far as the rule tolerates it,
            or one for each state by name. Params of fewer than ``Tuning.compress_from`` elements keep fp32.
        gradient_format: of the sums of gradients that a rank keeps of its slices, where the module is handed over:
            ``"fp32"``, in which micro-batches add up exactly, or ``"bf16"`` for bf16 params (fp32 ones keep fp32), in 2
            bytes less: each synchronised backward is summed over ranks in fp32, added to what is kept in fp32, and
            rounded once, which is off by half a bf16 ulp at most.
        ema: decay of a moving average of the weights, kept as one more state and read by ``unsharded(ema=True)``.
        max_grad_norm: clip gradients to this global 2-norm inside the step.
        release_gradients: update each bucket in backward, as soon as its gradients are reduced, and keep none of them:
            4 bytes a param less, at stage 1 over several ranks 4/N. Takes the module, stage 0 or 1 and one backward a
            step; what looks at all gradients before the update (clipping, a GradScaler, accumulation, skipping a step
            for an Inf or NaN in some of them) is refused by name. See docs/stages.md.
        reduce_dtype: in which gradients travel; they are summed in fp32 in any case (by NCCL: in this dtype). None:
            the gradient's own.
        offload: where masters and states are kept between steps: ``"cpu"``, a directory, or an :class:`Offload`. None:
            on the device.
        tuning: the rare options.
    """

    module: nn.Module | None = option(
        None,
        "the plain or DDP module, whose gradients shardopt then reduces; implied when the first argument is a module",
        _module,
        compared=_is_given,
    )
    stage: Stage = option(
        1,
        "what is sharded: 0 nothing, 1 masters and states, 2 gradients too, 3 params too; from 2 on it takes the "
        "module",
        _stage,
    )
    process_group: dist.ProcessGroup | DeviceMesh | None = option(
        None,
        "the ranks that share the states; None: DDP's group, the default group, or no communication. A 2D "
        "`DeviceMesh` (replicate, shard): hybrid sharding",
        _process_group,
        local="None and the group that it stands for are the same ranks; their numbers are compared when they bind",
    )
    norm_group: dist.ProcessGroup | DeviceMesh | None = option(
        None,
        "all ranks that train one model, where other ranks hold other params (stages of a pipeline): the norm and "
        "skipped steps are theirs together",
        check_norm_group,
        compared=_is_given,
    )
    master: Master = option(
        "fp32",
        'the masters of bf16 params (fp32 ones have none, whatever it says): `"fp32"`; `"split"`: the '
        'half that the param lacks, exact in 2 bytes; `"split24"`: 8 bits of it; `"none"`: stochastic rounding',
        partial(word, choices=get_args(Master)),
        flag=Flag("of bf16 params", "master"),
    )
    state_format: StateFormat | Mapping[str, StateFormat] = option(
        "fp32",
        'of states: `"fp32"`, `"bf16"`, `"int8"` in blocks of 256, or one for each by name',
        _state_format,
        flag=Flag("of states", "states"),
    )
    gradient_format: GradientFormat = option(
        "fp32",
        'of the sums of gradients of bf16 params, where the module is handed over: `"fp32"`, or `"bf16"`, rounded once '
        "a backward",
        partial(word, choices=get_args(GradientFormat)),
        flag=Flag("of sums of bf16 params' gradients, where the module is handed over", "gradients"),
    )
    ema: float | None = option(
        None,
        "decay of a moving average of the weights, kept on the shards; `unsharded(ema=True)` shows it",
        _decay,
        flag=Flag("keep a moving average of the weights", "ema", 0.999),
    )
    max_grad_norm: float | None = option(
        None,
        "clipping to a global 2-norm, fused into the step; its bits do not depend on the number of ranks",
        partial(number, above=0, or_none=", or None for no clipping"),
    )
    release_gradients: bool = option(
        False,
        "update each bucket in backward, as soon as it is reduced, and keep no gradient: stages 0 and 1 with the "
        "module, one backward a step ([what it takes](stages.md#gradients-released))",
        flag,
        flag=Flag("keep none, where that can be: at stage 0 and 1, not offloaded", "released gradients"),
    )
    reduce_dtype: torch.dtype | None = option(
        None, "in which gradients travel; they are summed in fp32 (by NCCL: in this dtype)", _reduce_dtype
    )
    offload: str | os.PathLike[str] | Offload | None = option(
        None,
        'where masters and states are kept between steps: `"cpu"`, a directory (a path, not a bare name), or '
        "[`Offload(...)`](options.md)",
        _offload,
        compared=_in_full,
    )
    tuning: Tuning = option(
        Tuning(), "bucket size, timeout, what to do about Inf and NaN ([all of it](options.md))", _tuning
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stage >= 2 and self.module is None:
            raise ValueError(
                f"stage {self.stage} shards gradients while backward runs, which takes the module: hand it over, as "
                f"first argument (ShardedAdamW(model, stage={self.stage})) or beside param groups (module=model)."
            )
        if self.gradient_format != "fp32" and self.module is None:
            raise ValueError(
                f"gradient_format={self.gradient_format!r} was given without the module: shardopt keeps no gradients "
                "then, so it would have no effect. Hand the module over, or leave it out: param.grad has the param's "
                "dtype."
            )
        if self.reduce_dtype is not None and self.module is None:
            raise ValueError(
                "reduce_dtype was given without the module: shardopt does not reduce gradients then, so it would have "
                "no effect. Hand the module over, or use a communication hook of DDP."
            )
        self._check_offload()
        if self.release_gradients:
            self._check_release()

    def _check_offload(self) -> None:
        rests = self.rests
        if rests is not None and rests.gradients is not None and self.stage < 2:
            raise ValueError(
                f"Offload(gradients={rests.gradients!r}) was given at stage {self.stage}, where gradients lie where "
                "backward puts them, so it would have no effect. Give stage=2 or 3, or leave it out."
            )
        if rests is not None and rests.params is not None and self.stage < 3:
            raise ValueError(
                f"Offload(params={os.fspath(rests.params)!r}) was given at stage {self.stage}, where params are whole "
                "on every rank, so it would have no effect. Give stage=3, or leave it out."
            )

    def _check_release(self) -> None:
        asked = "release_gradients=True was given"
        if self.module is None:
            raise ValueError(
                f"{asked} without the module: buckets are updated while backward runs, which nobody would notice. Hand "
                "it over, as first argument (ShardedAdamW(model, release_gradients=True)) or beside param groups "
                "(module=model)."
            )
        if self.stage > 1:
            raise ValueError(
                f"{asked} at stage {self.stage}: from stage 2 on sums of gradients are kept to be added to, and at "
                "stage 3 params lie in slices that backward gathers and drops. Released gradients need no sharding: "
                "give stage=1, or omit release_gradients."
            )
        if self.norm_group is not None:
            raise ValueError(
                f"{asked} with norm_group: a step is taken in each backward, and a pipeline has one for each micro-"
                "batch, whose updates the other stages could not skip together. Omit release_gradients."
            )
        if self.max_grad_norm is not None:
            raise ValueError(
                f"{asked} with max_grad_norm={self.max_grad_norm!r}: the norm of all gradients is known when the last "
                "of them is reduced, and most buckets are updated by then. Omit one of the two."
            )
        if self.gradient_format != "fp32":
            raise ValueError(
                f"{asked} with gradient_format={self.gradient_format!r}: no sum of gradients is kept in any format, so "
                "it would have no effect. Omit gradient_format."
            )
        if self.rests is not None and self.rests.directory is not None:
            raise ValueError(
                f"{asked} with states offloaded to {os.fspath(self.rests.directory)!r}: whether a disk could keep a "
                "step is decided by all ranks together, for all buckets at once, and buckets are updated one by one. "
                'With params on CPUs give offload="cpu"; otherwise omit one of the two.'
            )

    @property
    def rests(self) -> Offload | None:
        """What ``offload`` says, in its long form; None: everything on the device."""
        return None if self.offload is None else _in_full(self.offload)


class OptionKeywords(TypedDict, total=False):
    """The fields of :class:`Options` once more, for type checkers, which read ``**options`` off no dataclass.

    What an editor shows of a keyword is written here by ``scripts/options.py``.
    """

    module: nn.Module | None
    """The plain or DDP module, whose gradients shardopt then reduces; implied when the first argument is a module."""
    stage: Literal[0, 1, 2, 3]
    """What is sharded: 0 nothing, 1 masters and states, 2 gradients too, 3 params too; from 2 on it takes the module.
    """
    process_group: dist.ProcessGroup | DeviceMesh | None
    """The ranks that share the states; None: DDP's group, the default group, or no communication. A 2D ``DeviceMesh``
    (replicate, shard): hybrid sharding.
    """
    norm_group: dist.ProcessGroup | DeviceMesh | None
    """All ranks that train one model, where other ranks hold other params (stages of a pipeline): the norm and skipped
    steps are theirs together.
    """
    master: Literal["fp32", "split", "split24", "none"]
    """The masters of bf16 params (fp32 ones have none, whatever it says): ``"fp32"``; ``"split"``: the half that the
    param lacks, exact in 2 bytes; ``"split24"``: 8 bits of it; ``"none"``: stochastic rounding.
    """
    state_format: StateFormat | Mapping[str, StateFormat]
    """Of states: ``"fp32"``, ``"bf16"``, ``"int8"`` in blocks of 256, or one for each by name."""
    gradient_format: GradientFormat
    """Of the sums of gradients of bf16 params, where the module is handed over: ``"fp32"``, or ``"bf16"``, rounded once
    a backward.
    """
    ema: float | None
    """Decay of a moving average of the weights, kept on the shards; ``unsharded(ema=True)`` shows it."""
    max_grad_norm: float | None
    """Clipping to a global 2-norm, fused into the step; its bits do not depend on the number of ranks."""
    release_gradients: bool
    """Update each bucket in backward, as soon as it is reduced, and keep no gradient: stages 0 and 1 with the module,
    one backward a step.
    """
    reduce_dtype: torch.dtype | None
    """In which gradients travel; they are summed in fp32 (by NCCL: in this dtype)."""
    offload: str | os.PathLike[str] | Offload | None
    """Where masters and states are kept between steps: ``"cpu"``, a directory (a path, not a bare name), or
    ``Offload(...)``.
    """
    tuning: Tuning | None
    """Bucket size, timeout, what to do about Inf and NaN."""

"""All options of an optimizer, checked when they are given, and frozen."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..arguments import flag, number, texts, whole, word
from ..option import Flag, check_fields, option
from .formats import ClipBy, GradientFormat, Master, ParamTraffic, Precision, Stage, StateFormat, Traffic
from .offload import Offload
from .tuning import Tuning


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
    inner = getattr(value, "_orig_mod", None)  # of torch.compile's wrapper, whose forward calls DDP's
    return inner if isinstance(inner, DistributedDataParallel) else value


def _stage(value: object, what: str) -> int:
    stages = f"{what} (0: replicate, 1: shard masters and states, 2: gradients too, 3: params too)"
    return whole(value, stages, least=0, most=3)


def check_process_group(group: object, what: str) -> object:
    """Returns the group. Raises TypeError or ValueError unless it says which ranks share the states."""
    if group is not None and not isinstance(group, dist.ProcessGroup | DeviceMesh):
        raise TypeError(
            "pass what dist.new_group() or init_device_mesh() returned, or None for all ranks; on ranks that are no "
            f"members construct no optimizer (new_group() returns a number there): {what} takes a ProcessGroup or a "
            f"DeviceMesh, found {group!r}."
        )
    if isinstance(group, DeviceMesh) and group.ndim > 2:
        raise ValueError(
            f"slice the DeviceMesh to two dimensions, (replicate, shard), or one: {what} has {group.ndim} dimensions, "
            "and which of them share the states is not known."
        )
    return group


def check_norm_group(value: object, what: str) -> object:
    """Returns the group. Raises TypeError unless it says which ranks train one model."""
    if not isinstance(value, dist.ProcessGroup | DeviceMesh):
        raise TypeError(
            f"{what} takes a ProcessGroup that this rank is a member of, or a DeviceMesh, found {value!r}: the other "
            "ranks' gradients would be missing in the norm. Give all ranks that train the model: "
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
    if isinstance(value, str):
        named = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(value, value), None)
        if isinstance(named, torch.dtype) and value not in get_args(Traffic):
            raise ValueError(f"write {what}={named}: a dtype of torch is given as itself, found {value!r}.")
        return word(value, what, get_args(Traffic), or_none=", a torch dtype, or None for the gradient's own")
    if not any(value is each for each in (torch.float32, torch.bfloat16, torch.float16)):
        raise ValueError(
            f"{what} must be torch.float32, bfloat16 or float16, a word of {get_args(Traffic)}, or None for the "
            f"gradient's own, found {value!r}."
        )
    return value


def _dtype(value: object, what: str, none: str) -> object:
    if not any(value is each for each in (torch.float32, torch.bfloat16, torch.float16)):
        raise ValueError(f"{what} must be torch.float32, bfloat16 or float16, or None {none}, found {value!r}.")
    return value


def _compute_dtype(value: object, what: str) -> object:
    if not any(value is each for each in (torch.bfloat16, torch.float16)):
        raise ValueError(f"{what} must be torch.bfloat16 or float16, or None for the params' own, found {value!r}.")
    return value


def _gather_dtype(value: object, what: str) -> object:
    return word(value, what, get_args(ParamTraffic), or_none=", or None for the param's own")


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
        asked = f"{what}=shardopt.Tuning(**given)" if isinstance(value, dict) else f"{what}=shardopt.Tuning(...)"
        raise TypeError(f"write {asked}: {what} takes a shardopt.Tuning, found {type(value).__name__}.")
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
        clip_by: the norm that ``max_grad_norm`` clips by: ``"own"``, that of the step's own gradients, or
            ``"previous"``, that of the last step that was taken, which ``release_gradients`` needs: the factor is
            ``min(1, max_grad_norm / previous)``. The first step is not clipped, nor is the first one after states are
            loaded that have no norm; one that is Inf or NaN is passed over. It is a key of the param groups,
            ``"previous_grad_norm"``, so that state dicts and checkpoints hold it.
        release_gradients: update each bucket in backward, as soon as its gradients are reduced, and keep none of them:
            4 bytes a param less, over several ranks 4/N from stage 1 on. Takes the module. With gradient
            accumulation the last backward of a step does so, and those before it are under ``no_sync()``. What looks
            at all gradients before the update (clipping, a GradScaler, skipping a step for an Inf or NaN in some of
            them) is refused by name. See docs/stages.md.
        reduce_dtype: in which gradients travel; they are summed in fp32 in any case (by NCCL: in this dtype). None:
            the gradient's own. ``"int8"``: quantized in blocks of 256 elements, one byte and a 64th an element, and
            summed in fp32 over NCCL too; ``"int4"``: half a byte and a 64th. They travel by messages then, also
            between ranks of one machine.
        gather_dtype: in which params travel: updated ones at stages 1 and 2, to a training's passes at stage 3.
            ``"int8"``: quantized in blocks of 256 elements, one byte and a 64th an element; every rank computes with
            what arrives, and the owner of a slice keeps it as it is. None: the param's own.
        error_feedback: add what quantizing took from a gradient to that of the next backward, so that over steps
            nothing is lost: 2 bytes a param on every rank, whatever the number of ranks. None: at stages 0 to 2, where
            ``reduce_dtype`` quantizes.
        compute_dtype: bf16 or fp16, for a module that is handed over with fp32 params: forward and backward run in it.
            When the optimizer binds, the params that train become of this dtype, and their masters have the fp32 values
            that they had: the bits are those of a low-precision model with fp32 masters that starts from these values.
            See docs/precision.md.
        cast_inputs: with ``compute_dtype``: floating inputs of the module are cast to it, in nested dicts, lists,
            tuples and dataclasses too; so are those of a module within it that another method calls.
        output_dtype: with ``compute_dtype``: floating outputs of the module are cast to it. None: they stay as they
            are.
        keep_fp32: with ``compute_dtype``: patterns of names of modules and params that stay fp32: ``("*.norm",)``. The
            inputs of such a module are cast to fp32, its outputs back to ``compute_dtype``.
        cast_buffers: with ``compute_dtype``: patterns of names of modules and buffers, ``("*.rope",)``, whose floating
            buffers are cast to it. Others stay as they are.
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
        check_process_group,
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
    clip_by: ClipBy = option(
        "own",
        'the norm that `max_grad_norm` clips by: `"own"`, that of the gradients of the step, or `"previous"`, that of '
        "the step before, which `release_gradients` needs",
        partial(word, choices=get_args(ClipBy)),
    )
    release_gradients: bool = option(
        False,
        "update each bucket in the last backward of a step, as soon as it is reduced, and keep no gradient; takes the "
        "module ([what it takes](stages.md#gradients-released))",
        flag,
        flag=Flag("keep none, where that can be: with the module, not offloaded", "released gradients"),
    )
    reduce_dtype: torch.dtype | Traffic | None = option(
        None,
        'in which gradients travel; they are summed in fp32 (by NCCL: in this dtype). `"int8"`, `"int4"`: in blocks of '
        "256, decoded and summed in fp32 on every connection ([quantized traffic](traffic.md))",
        _reduce_dtype,
    )
    gather_dtype: ParamTraffic | None = option(
        None,
        'in which params travel, from stage 1 on: `"int8"` in blocks of 256, or None: their own '
        "([quantized traffic](traffic.md#params))",
        _gather_dtype,
    )
    error_feedback: bool | None = option(
        None,
        "add what quantizing gradients took from them to those of the next backward: 2 bytes a param on every rank; "
        "None: at stages 0 to 2, where `reduce_dtype` quantizes ([quantized traffic](traffic.md#error-feedback))",
        flag,
    )
    compute_dtype: torch.dtype | None = option(
        None,
        "forward and backward of a module with fp32 params run in it; masters keep the fp32 values "
        "([where each dtype lies](precision.md))",
        _compute_dtype,
    )
    cast_inputs: bool = option(True, "with `compute_dtype`: cast the module's floating inputs to it", flag)
    output_dtype: torch.dtype | None = option(
        None,
        "with `compute_dtype`: cast the module's floating outputs to it; None: they stay what they are",
        partial(_dtype, none="to leave them what they are"),
    )
    keep_fp32: Sequence[str] = option(
        (),
        "with `compute_dtype`: patterns of names of modules and params that stay fp32, and run in it",
        partial(texts, example='("*.norm",)'),
    )
    cast_buffers: Sequence[str] = option(
        (),
        "with `compute_dtype`: patterns of names of modules and buffers whose floating buffers are cast to it",
        partial(texts, example='("*.rope",)'),
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
                f"hand the module over, or omit gradient_format={self.gradient_format!r}: without the module shardopt "
                "keeps no gradients, so it would have no effect. param.grad has the param's dtype."
            )
        if self.reduce_dtype is not None and self.module is None:
            raise ValueError(
                "hand the module over, or use a communication hook of DDP: without the module shardopt does not reduce "
                "gradients, so reduce_dtype would have no effect."
            )
        self._check_precision()
        if self.error_feedback and not isinstance(self.reduce_dtype, str):
            raise ValueError(
                "give reduce_dtype='int8' or 'int4', or omit error_feedback=True: gradients travel "
                "unquantized, so nothing is taken from them that could be added later, and it would have no effect."
            )
        if self.gather_dtype is not None and self.stage == 0:
            raise ValueError(
                f"give stage=1, 2 or 3, or omit gather_dtype={self.gather_dtype!r}: at stage 0 every rank updates all "
                "params, so none are gathered and it would have no effect."
            )
        if self.tuning.overlap_gather:
            self._check_overlap()
        self._check_offload()
        if self.clip_by == "previous" and self.max_grad_norm is None:
            raise ValueError(
                "give max_grad_norm=1.0, or omit clip_by='previous': without a norm to clip to it would have no effect."
            )
        if self.release_gradients:
            self._check_release()

    def _check_overlap(self) -> None:
        omit, end = "omit Tuning(overlap_gather=True)", "so it would have no effect."
        if self.stage in (0, 3):
            why = "are gathered in forward and backward, ahead of their use (Tuning(prefetch=...))"
            raise ValueError(
                f"give stage=1 or 2, or {omit}: at stage {self.stage} params "
                f"{why if self.stage else 'are updated by every rank'}, not at the end of a step, {end}"
            )
        if self.module is None:
            raise ValueError(
                f"hand the module over, or {omit}: params arrive while its next forward runs, and without it every "
                f"step waits for them, {end}"
            )
        if self.release_gradients:
            raise ValueError(
                f"{omit}, or release_gradients: with released gradients each bucket is gathered in backward, {end}"
            )

    def _check_precision(self) -> None:
        besides = {"cast_inputs": True, "output_dtype": None, "keep_fp32": (), "cast_buffers": ()}
        given = next((name for name, default in besides.items() if getattr(self, name) != default), None)
        if self.compute_dtype is None:
            if given is not None:
                raise ValueError(
                    f"give compute_dtype=torch.bfloat16, or omit {given}={getattr(self, given)!r}: without "
                    "compute_dtype the module runs in the dtype that its params have, and it would have no effect."
                )
        elif self.module is None:
            raise ValueError(
                "hand the module over, as first argument (ShardedAdamW(model, compute_dtype=...)) or beside param "
                f"groups (module=model), or use torch.autocast: compute_dtype={self.compute_dtype} was given without "
                "it, and only its hooks can cast what it is given."
            )
        elif self.master != "fp32":
            raise ValueError(
                f"omit master={self.master!r}, or cast the model to bfloat16 yourself and omit compute_dtype: with "
                f"compute_dtype={self.compute_dtype} the fp32 values that params are handed over with are their "
                "masters, and none of their bits may be dropped."
            )

    def _check_offload(self) -> None:
        given = self.offload_options
        if given is not None and given.gradients is not None and self.stage < 2:
            raise ValueError(
                f"give stage=2 or 3, or omit Offload(gradients={given.gradients!r}): at stage {self.stage} gradients "
                "stay where backward puts them, so it would have no effect."
            )
        if given is not None and given.params is not None and self.stage < 3:
            raise ValueError(
                f"give stage=3, or omit Offload(params={os.fspath(given.params)!r}): at stage {self.stage} params are "
                "whole on every rank, so it would have no effect."
            )
        if given is not None and given.early_bytes:
            self._check_early(given)

    def _check_early(self, given: Offload) -> None:
        asked = f"Offload(early_bytes={given.early_bytes})"
        if self.module is None or self.stage == 0:
            raise ValueError(
                f"hand the module over at stage 1, 2 or 3, or omit {asked}: updates in backward begin with the sum of "
                f"this rank's slice of a bucket, which shardopt does not make at stage {self.stage}"
                f"{' without the module' * (self.module is None)}, so it would have no effect."
            )
        if self.release_gradients:
            raise ValueError(
                f"omit {asked}, or release_gradients: with released gradients each bucket is updated in backward "
                "anyway, and no step takes anything, so it would have no effect."
            )
        if given.params is not None:
            raise ValueError(
                f"omit {asked}, or Offload(params={os.fspath(given.params)!r}): forward and backward read params "
                "where the update would put them before the step."
            )

    def _check_release(self) -> None:
        asked = "release_gradients=True was given"
        if self.module is None:
            raise ValueError(
                "hand the module over, as first argument (ShardedAdamW(model, release_gradients=True)) or beside param "
                f"groups (module=model): {asked} without it, and only its hooks can update buckets in backward."
            )
        if self.norm_group is not None:
            raise ValueError(
                f"omit release_gradients: {asked} with norm_group. A step is taken in each backward, and a pipeline "
                "has one for each micro-batch, whose updates the other stages could not skip together."
            )
        if self.max_grad_norm is not None and self.clip_by == "own":
            raise ValueError(
                f"give clip_by='previous', or omit one of the two: {asked} with max_grad_norm={self.max_grad_norm!r}. "
                "The norm of all gradients is known when the last of them is reduced, and most buckets are updated by "
                "then. That of the step before is known."
            )
        if self.gradient_format != "fp32":
            raise ValueError(
                f"omit gradient_format={self.gradient_format!r}: {asked}, so no sum of gradients is kept and it would "
                "have no effect."
            )
        if self.offload_options is not None and self.offload_options.gradients is not None:
            raise ValueError(
                f"omit Offload(gradients={self.offload_options.gradients!r}): {asked}, so no sum of gradients is kept "
                "and it would have no effect."
            )

    @property
    def reduces_always(self) -> bool:
        """True if each backward reduces, ``no_sync()`` or not, as each rank keeps sums of its slices alone."""
        return self.stage >= 2 and not self.release_gradients

    @property
    def precision(self) -> Precision | None:
        """The options of mixed precision; None: the module runs in the dtypes of its params."""
        if self.compute_dtype is None:
            return None
        return Precision(self.compute_dtype, self.cast_inputs, self.output_dtype, self.keep_fp32, self.cast_buffers)

    @property
    def feeds_back(self) -> bool:
        """True if what quantizing takes from gradients is kept for the next backward."""
        return self.feeds_back_at(self.stage)

    def feeds_back_at(self, stage: int) -> bool:
        """True if it would be kept at this stage."""
        asked = stage < 3 if self.error_feedback is None else self.error_feedback
        return asked and isinstance(self.reduce_dtype, str)

    @property
    def offload_options(self) -> Offload | None:
        """The option ``offload`` as an :class:`Offload`; None: everything stays on the device."""
        return None if self.offload is None else _in_full(self.offload)

"""What the user may say, validated when it is said, frozen afterwards."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .arguments import flag, number, path, set_frozen, texts, whole, word

__all__ = ["Offload", "OptionKeywords", "Options", "Tuning"]

MIB = 1 << 20
_YEARS = 10 * 365 * 86400.0  # what "no limit" comes to: deadlines are kept in nanoseconds of 64 bits


@dataclass(frozen=True)
class Tuning:
    """The rare knobs. None of them changes a bit of the result, but for ``compress_from`` and ``seed``.

    Attributes:
        bucket_bytes: largest bytes of params in one bucket; a single larger param has a bucket of its own. Smaller
            buckets overlap better and need less memory while gradients are reduced and params gathered; each costs one
            launch and one message to every rank. None: 32 MiB, but 2 MiB for a module on CPUs, where messages cost
            little and the gradient of a param that fills a bucket is reduced where it lies.
        timeout: seconds that one wait for the other ranks may take, at most ten years (``math.inf`` is that); None: the
            process group's own timeout.
        keep_below: stage 3: params of fewer elements than this stay whole on every rank, as at stage 2: norms, biases
            and small embeddings weigh little, and gathering each would cost a message.
        keep: stage 3: patterns of names of params and modules that stay whole on every rank, as at stage 2, whatever
            their size: ``("lm_head", "*.norm")``. Names are those of ``model.named_parameters()``, ``*`` stands for any
            text. For params that another module's forward reads. Masters, states and gradients are sharded all the
            same.
        live_bytes: stage 3: most bytes of gathered params that stay on a rank while no module needs them.
        neighbours: let CPU ranks of one machine read each other's params out of memory, where the system allows it,
            instead of sending them through sockets.
        chunk_bytes: of one state that is read from a disk, updated and written at a time; 4 chunks of all states are
            in memory.
        nonfinite: what a step does when a gradient holds an Inf or a NaN: ``"skip"`` it on all ranks together with a
            warning (nothing changes, step counts included), ``"raise"`` on all ranks before anything changed, or
            ``"propagate"`` as torch does (and save the reading of the gradients that looking for it takes). Where
            gradients are released, buckets may be updated before it is met in another one: then the first two are an
            error on all ranks, behind which there is only a checkpoint.
        compress_from: elements of a param (all of it, not of a shard) from which on ``state_format`` holds; smaller
            ones keep their states in fp32: biases and norms weigh little and matter much.
        seed: of what is rounded by chance.
    """

    bucket_bytes: int | None = None
    keep_below: int = 65_536
    keep: Sequence[str] = ()
    live_bytes: int = 8 * MIB
    timeout: float | None = None
    neighbours: bool = True
    chunk_bytes: int = 4 * MIB
    nonfinite: Literal["skip", "raise", "propagate"] = "skip"
    compress_from: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "keep_below": whole(self.keep_below, "Tuning.keep_below", least=0),
            "keep": texts(self.keep, "Tuning.keep", '("lm_head", "*.norm")'),
            "live_bytes": whole(self.live_bytes, "Tuning.live_bytes", least=0),
            "neighbours": flag(self.neighbours, "Tuning.neighbours"),
            "chunk_bytes": whole(self.chunk_bytes, "Tuning.chunk_bytes", least=1),
            "nonfinite": word(self.nonfinite, "Tuning.nonfinite", ("skip", "raise", "propagate")),
            "compress_from": whole(self.compress_from, "Tuning.compress_from", least=0),
            "seed": whole(self.seed, "Tuning.seed", least=-(2**63)),
        }
        if self.bucket_bytes is not None:
            open_ = ", or None to leave it open"
            checked["bucket_bytes"] = whole(self.bucket_bytes, "Tuning.bucket_bytes", least=1, or_none=open_)
        if self.timeout is not None:
            own = " (seconds), or None for the process group's own"
            checked["timeout"] = min(number(self.timeout, "Tuning.timeout", above=0, or_none=own), _YEARS)
        set_frozen(self, checked)

    def bucket_bytes_of(self, device: torch.device, has_module: bool) -> int:
        """The bytes to use where they were left open."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        return 2 * MIB if has_module and device.type == "cpu" else 32 * MIB

    @property
    def deadline(self) -> timedelta | None:
        return None if self.timeout is None else timedelta(seconds=self.timeout)


Master = Literal["fp32", "split", "split24", "none"]
StateFormat = Literal["fp32", "bf16", "int8"]
GradientFormat = Literal["fp32", "bf16"]


class OptionKeywords(TypedDict, total=False):
    """The keywords that every optimizer takes beyond torch's; :class:`Options` says what they mean."""

    module: nn.Module | None
    stage: int
    process_group: dist.ProcessGroup | DeviceMesh | None
    norm_group: dist.ProcessGroup | DeviceMesh | None
    master: "Master"
    state_format: "StateFormat | Mapping[str, StateFormat]"
    gradient_format: "GradientFormat"
    ema: float | None
    max_grad_norm: float | None
    release_gradients: bool
    reduce_dtype: torch.dtype | None
    offload: "str | os.PathLike[str] | Offload | None"
    tuning: Tuning


@dataclass(frozen=True)
class Offload:
    """What rests where between steps. Nothing of it changes a bit of the result.

    ``"cpu"`` is host memory, anything else a directory: each rank makes a file of its own in it, which takes two copies
    of its masters and states and goes with the optimizer. What is not offered yet is refused.

    Attributes:
        states: masters and states: ``"cpu"`` or a directory.
        gradients: sums of gradients, at stage 2 and 3: ``"cpu"``, or None: on the device. From a GPU each goes down as
            soon as it is reduced, and comes up for a later backward that adds to it, or for an update on the GPU. Not
            on a mesh of (replicate, shard).
        params: this rank's slices at stage 3, those of frozen params too: ``"cpu"``, the directory of ``states``, or
            None: on the device. From a directory they are read whenever their module runs, and travel in messages.
        step: where the update of params on a GPU runs: on the ``"gpu"``, through which states stream; on the ``"cpu"``,
            to which gradients come down and from which params go up; ``"auto"`` measures both in the first steps and
            goes on with the faster one (``opt.timings()`` tells which). From a disk it is the CPU.
        pin_memory: whether host memory is registered with the GPU, where there is one.
    """

    states: str | os.PathLike[str] = "cpu"
    gradients: Literal["cpu"] | None = None
    params: str | os.PathLike[str] | None = None
    step: Literal["auto", "cpu", "gpu"] = "auto"
    pin_memory: bool = True

    def __post_init__(self) -> None:
        path(self.states, "Offload.states ('cpu' or a directory)")
        is_bare = isinstance(self.states, str) and self.states != "cpu" and os.sep not in self.states
        if is_bare and not os.path.isdir(self.states):
            raise ValueError(
                f"Offload.states={self.states!r} is neither 'cpu' nor a directory that exists. Give 'cpu', an absolute "
                f"path, or '{os.curdir}{os.sep}{self.states}'."
            )
        checked: dict[str, object] = {
            "step": word(self.step, "Offload.step", ("auto", "cpu", "gpu")),
            "pin_memory": flag(self.pin_memory, "Offload.pin_memory"),
        }
        if self.gradients is not None:
            checked["gradients"] = word(self.gradients, "Offload.gradients", ("cpu",), or_none=" or None")
        set_frozen(self, checked)
        if self.params is not None:
            path(self.params, "Offload.params ('cpu', the directory of states, or None)")
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
        master: what is kept behind bf16 params: ``"fp32"``, all of the master in 4 bytes; ``"split"``, the half that
            the param lacks, exact in 2; ``"split24"``, 8 bits of it, in 1; ``"none"``: nothing, the param is rounded up
            or down by chance, from a counter keyed by seed, step, param and element. fp16 params take ``"fp32"``.
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
        offload: where masters and states rest between steps: ``"cpu"``, a directory, or an :class:`Offload`. None:
            on the device.
        tuning: the rare knobs.
    """

    module: nn.Module | None = None
    stage: int = 1
    process_group: dist.ProcessGroup | DeviceMesh | None = None
    norm_group: dist.ProcessGroup | DeviceMesh | None = None
    master: Master = "fp32"
    state_format: StateFormat | Mapping[str, StateFormat] = "fp32"
    gradient_format: GradientFormat = "fp32"
    ema: float | None = None
    max_grad_norm: float | None = None
    release_gradients: bool = False
    reduce_dtype: torch.dtype | None = None
    offload: str | os.PathLike[str] | Offload | None = None
    tuning: Tuning = Tuning()

    def __post_init__(self) -> None:
        stages = "stage (0: replicate, 1: shard masters and states, 2: gradients too, 3: params too)"
        set_frozen(self, {"stage": whole(self.stage, stages, least=0, most=3)})
        if self.module is not None and not isinstance(self.module, nn.Module):
            raise TypeError(f"module takes an nn.Module, found {type(self.module).__name__}.")
        if self.stage >= 2 and self.module is None:
            raise ValueError(
                f"stage {self.stage} shards gradients while backward runs, which takes the module: hand it over, as "
                f"first argument (ShardedAdamW(model, stage={self.stage})) or beside param groups (module=model)."
            )
        self._check_formats()
        if self.max_grad_norm is not None:
            off = ", or None for no clipping"
            set_frozen(self, {"max_grad_norm": number(self.max_grad_norm, "max_grad_norm", above=0, or_none=off)})
        check_process_group(self.process_group, "process_group")
        if self.norm_group is not None and not isinstance(self.norm_group, dist.ProcessGroup | DeviceMesh):
            raise TypeError(
                f"norm_group takes a ProcessGroup that this rank is a member of, or a DeviceMesh, found "
                f"{self.norm_group!r}: the other ranks' gradients would be left out of the norm. Give all ranks that "
                "train the model: torch.distributed.group.WORLD, or a group of them."
            )
        if self.norm_group is not None and self.module is not None:
            raise ValueError(
                "norm_group was given with the module: gradients would be reduced at each of a pipeline's micro-"
                "batches, whose forwards and backwards are interleaved. Give module.parameters() instead of the module "
                "(stage 1), and average gradients over process_group, by DDP around the pipeline stage or all_reduce."
            )
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        if self.reduce_dtype is not None and not any(self.reduce_dtype is each for each in dtypes):
            raise ValueError(
                f"reduce_dtype must be torch.float32, bfloat16 or float16, or None for the gradient's own, found "
                f"{self.reduce_dtype!r}."
            )
        if self.reduce_dtype is not None and self.module is None:
            raise ValueError(
                "reduce_dtype was given without the module: shardopt does not reduce gradients then, so it would have "
                "no effect. Hand the module over, or use a communication hook of DDP."
            )
        if not isinstance(self.offload, str | os.PathLike | Offload | None):
            raise TypeError(f"offload takes 'cpu', a directory or a shardopt.Offload, found {self.offload!r}.")
        self._check_offload()
        if not isinstance(self.tuning, Tuning):
            raise TypeError(f"tuning takes a shardopt.Tuning, found {type(self.tuning).__name__}.")
        set_frozen(self, {"release_gradients": flag(self.release_gradients, "release_gradients")})
        if self.release_gradients:
            self._check_release()

    def _check_formats(self) -> None:
        word(self.master, "master", get_args(Master))
        asked = self.state_format
        if not isinstance(asked, str | Mapping):
            raise TypeError(f"state_format takes a format or a mapping of states to formats, found {asked!r}.")
        for each in [asked] if isinstance(asked, str) else asked.values():
            word(each, "state_format", get_args(StateFormat), or_none=", or a mapping that names one a state")
        word(self.gradient_format, "gradient_format", get_args(GradientFormat))
        if self.gradient_format != "fp32" and self.module is None:
            raise ValueError(
                f"gradient_format={self.gradient_format!r} was given without the module: shardopt keeps no gradients "
                "then, so it would have no effect. Hand the module over, or leave it away: param.grad has the param's "
                "dtype."
            )
        if self.ema is not None:
            what = "ema (the decay of a moving average)"
            set_frozen(self, {"ema": number(self.ema, what, least=0, below=1, or_none=", or None for none")})

    def _check_offload(self) -> None:
        rests = self.rests  # an empty path is refused now
        if rests is not None and rests.gradients is not None and self.stage < 2:
            raise ValueError(
                f"Offload(gradients={rests.gradients!r}) was given at stage {self.stage}, where gradients lie where "
                "backward puts them, so it would have no effect. Give stage=2 or 3, or leave it away."
            )
        if rests is not None and rests.params is not None and self.stage < 3:
            raise ValueError(
                f"Offload(params={os.fspath(rests.params)!r}) was given at stage {self.stage}, where params are whole "
                "on every rank, so it would have no effect. Give stage=3, or leave it away."
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
                "give stage=1, or leave release_gradients away."
            )
        if self.max_grad_norm is not None:
            raise ValueError(
                f"{asked} with max_grad_norm={self.max_grad_norm!r}: the norm of all gradients is known when the last "
                "of them is reduced, and most buckets are updated by then. Leave one of the two away."
            )
        if self.gradient_format != "fp32":
            raise ValueError(
                f"{asked} with gradient_format={self.gradient_format!r}: no sum of gradients is kept in any format, so "
                "it would have no effect. Leave gradient_format away."
            )
        if self.rests is not None and self.rests.directory is not None:
            raise ValueError(
                f"{asked} with states offloaded to {os.fspath(self.rests.directory)!r}: whether a disk could keep a "
                "step is decided by all ranks together, for all buckets at once, and buckets are updated one by one. "
                'With params on CPUs give offload="cpu"; else leave one of the two away.'
            )

    @property
    def rests(self) -> Offload | None:
        """What ``offload`` says, in its long form; None: everything on the device."""
        return self.offload if self.offload is None or isinstance(self.offload, Offload) else Offload(self.offload)


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

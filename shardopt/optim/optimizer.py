"""The base class: an optimizer that schedulers, scalers, DDP scripts and frameworks use as one of torch's."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch

from ..arguments import number, whole
from ..arguments import path as directory_path
from ..config import Options
from ..errors import StateError
from ..option import keywords_in_words
from ..uncompiled import uncompiled
from .joinable import JoinableOptimizer, take_along
from .param_groups import Params, check_added, check_given, copied, matched, read_arguments

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..config import OptionKeywords
    from ..domain.timings import Timings
    from ..engine import Engine
    from ..rules import Rule
    from ..states.merged_weights import Merge, MergedStream
    from ..states.weight_stream import WeightStream
    from ..units.schedule import Schedule
    from ..units.unit_view import UnitView
    from .reports import Handle, Writer
    from .state_view import StateView

Optimizer = TypeVar("Optimizer", bound="ShardedOptimizer")
Closure = Callable[[], Any]


# What Dynamo says of a train step that is compiled as a whole where its graph may not break.
_UNCOMPILED = (
    "call optimizer.{}() after the compiled function, or compile without fullgraph=True: a step of a sharded optimizer "
    "runs kernels of its own and tells other ranks, which no graph holds"
)


class ShardedOptimizer(torch.optim.Optimizer, JoinableOptimizer):
    """Runs any rule as a ``torch.optim.Optimizer`` whose master weights and states are sharded over ranks.

    The classes of :mod:`shardopt.optim` are this one with torch's names and arguments. Use it directly for a rule of
    your own::

        opt = ShardedOptimizer(model.parameters(), {"lr": 1e-3, "beta": 0.9}, rule=my_rule)

    Before the first ``step()``, or the first forward of a module that was handed over, nothing is allocated and no rank
    communicates: move, cast, load and wrap the model freely. Every rank of the process group must take every step.

    Args:
        params: tensors, named tensors or param groups, as for ``torch.optim``; or a module, to hand it over.
        defaults: hyper-parameters of groups that do not set their own.
        rule: the arithmetic, made by :func:`shardopt.rules.rule`.
        **options: shardopt's keywords.

    Keywords of :class:`shardopt.config.Options`: module=None, stage=1, process_group=None, norm_group=None,
    master='fp32', state_format='fp32', gradient_format='fp32', ema=None, max_grad_norm=None, clip_by='own',
    release_gradients=False, reduce_dtype=None, gather_dtype=None, error_feedback=None, compute_dtype=None,
    cast_inputs=True, output_dtype=None, keep_fp32=(), cast_buffers=(), offload=None, tuning=Tuning().

    """

    _check_group: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """Checks the arguments that a param group gives, for classes with torch's arguments. Returns them."""

    _given: Mapping[str, Any] = MappingProxyType({})
    """The arguments of the constructor, for classes with torch's arguments."""

    _unread: tuple[str, ...] = ()
    """Keys of param groups that would choose another rule: this optimizer was constructed without them."""

    _fixed: Mapping[str, Any] = MappingProxyType({})
    """Values of param groups that belong to the class: no state dict or checkpoint changes them."""

    def __init__(self, params: Params, defaults: dict[str, Any], *, rule: Rule, **options: Unpack[OptionKeywords]):
        given_params, rule, given = read_arguments(type(self).__name__, params, defaults, rule, options)
        self.engine = _engine(self, rule, given)
        super().__init__(given_params, defaults)
        self._begin()

    @classmethod
    def _groups_of(
        cls, module: torch.nn.Module, defaults: Mapping[str, Any], given: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Returns the param groups that the constructor makes of a module, for planners.

        Args:
            defaults: of param groups.
            given: the other arguments of the constructor.
        """
        return [{**defaults, "params": list(module.parameters())}]

    def _begin(self) -> None:
        """Takes the module over and lists the engine, once the params are known."""
        if self.options.module is not None:
            self.engine.take_over(self.options.module)
        self.engine.enroll()
        take_along()

    @property
    def rule(self) -> Rule:
        """The arithmetic."""
        return self.engine.rule

    @property
    def options(self) -> Options:
        """The constructor's options, with defaults."""
        return self.engine.options

    @property
    def grad_norm(self) -> float | None:
        """Global 2-norm of the last step's gradients before clipping.

        None without ``max_grad_norm`` or ``release_gradients``. NaN if a gradient holds NaN, inf if one holds Inf (with
        ``release_gradients``: inf in both cases).
        """
        return self.engine.grad_norm

    @property
    def updates(self) -> int:
        """Number of ``step()`` calls that changed params, without those that Inf, NaN or a scaler skipped."""
        return self.engine.updates

    def bind(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        init_fn: Callable[[torch.nn.Module], object] | None = None,
    ) -> None:
        """Takes the module over now instead of at its first forward. Collective.

        Call it if the module's own forward never runs (``model.encode(x)``), or to fill a module on the meta device:
        buckets get memory and values one after the other, so that at stage 3 no rank ever holds the whole model.

        Args:
            state_dict: whole tensors by name for params and buffers on the meta device (a memory-mapped file will do).
                Buffers that are not saved may be missing, and are initialized as without it. None initializes all.
            init_fn: fills the params and buffers of the module that it is given, not those of its submodules, in place
                (``model._init_weights`` of Hugging Face). None calls each module's ``reset_parameters()``.

        Raises:
            BindingError: no bucket can hold a param, or values are missing, unknown or superfluous.
            TypeError: ``state_dict`` is not a mapping of names to dense tensors.
            Exception: an initializer raised; other ranks raise DisagreementError. Forwards raise until this call
                succeeds on every rank.
        """
        self.engine.bind(state_dict, init_fn)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context for gradient accumulation at stages 0 and 1: backwards inside do not reduce.

        DDP's own ``no_sync()`` does the same. The last backward before a step must be outside, or
        :meth:`reduce_gradients` follow. From stage 2 on, and without the module, it does nothing: every backward is
        reduced into the shards, which is what saves memory.
        """
        return self.engine.no_sync()

    def rebind(self) -> None:
        """Binds the module anew after its layers were changed: added, removed, resized or replaced. Collective.

        States are kept by the names of params, where shapes agree; all else begins anew, masters with what the params
        hold. New params come into the only param group; if there are several, call :meth:`add_param_group` first. Call
        it between :meth:`step` and the next forward, outside of :meth:`unsharded`; gradients are forgotten.

        Raises:
            ShardoptError: no module was handed over, or its experts have groups of their own. Nothing changed.
            BindingError: a new param could be of several groups. Nothing changed.
            DisagreementError: ranks changed their modules differently. Nothing changed.
        """
        from ..calls import surgery

        surgery.rebind(self.engine)

    def reduce_gradients(self) -> None:
        """Reduces what backwards under :meth:`no_sync` accumulated, or the script assigned. Collective; stages 0 and 1.

        A whole schedule of a pipeline may run under ``no_sync()``; ``param.grad`` is this rank's own until this call,
        and the mean over ``process_group`` after it. From stage 2 on it does nothing: every backward is reduced.

        Raises:
            ShardoptError: no module was given, or a backward did not end.
            DisagreementError: another rank makes another call.
        """
        from ..calls import gradients

        gradients.reduce_gradients(self.engine)

    def gradient_statistics(self, *names: str) -> dict[str, dict[str, float]]:
        """Returns statistics of the mean gradients of all params, by the params' names. Collective: one all-reduce.

        For what logs a model's gradients: asked of ``param.grad`` one by one, each question makes each rank read the
        slices of the others. After backward, before :meth:`step` or after it; params without a gradient are left out::

            for name, found in opt.gradient_statistics("absmax", "mean", "zeros").items():
                log({f"gradients/{name}/absmax": found["absmax"]})

        Args:
            names: of ``"sum"``, ``"mean"``, ``"absmean"``, ``"min"``, ``"max"``, ``"absmax"``, ``"var"``, ``"std"``
                (with Bessel's correction), ``"norm"``, ``"zeros"`` and ``"nonfinite"`` (numbers of elements).

        Raises:
            ValueError: another name.
            ShardoptError: no module was given, or a backward did not end.
            DisagreementError: another rank makes another call, or asks for others.
        """
        from ..calls import gradients

        return gradients.gradient_statistics(self.engine, names)

    def sum_tied(self, param: torch.nn.Parameter, group: dist.ProcessGroup | DeviceMesh) -> None:
        """Sums the gradient of a weight that stages of a pipeline hold copies of (tied embeddings). Collective.

        For each such weight, after the last backward and before :meth:`step`: ``param.grad`` becomes the sum of the
        copies' gradients, on all of them. In the norm of ``norm_group`` the weight counts once. Copies that start alike
        then stay alike, but for ``master="none"``, whose rounding draws other noise on each stage.

        Args:
            param: this stage's copy.
            group: a rank of each stage that holds a copy, ``mesh["pp"].get_group()`` where these are all. Every rank
                that shares the states of ``param`` makes the call, with the group that it is in.

        Raises:
            ShardoptError: ``param`` is not of this optimizer.
            DisagreementError: some ranks have no gradient of it, or one of another shape.
            TypeError: ``group`` is not a process group.
        """
        from ..calls import gradients

        gradients.sum_tied(self.engine, param, group)

    def unsharded(self, ema: bool = False, alone: bool = False) -> AbstractContextManager[None]:
        """Context with whole params on every rank, for ``generate()``, evaluation and export. Collective at both ends.

        Inside, ranks run independently. In-place writes to params stay if all ranks write the same. A ``step()`` on all
        ranks sees them, and leaves the params whole. At stage 3 it binds what is not bound yet. Below it, with
        ``gather_dtype``, params are exact inside until a ``step()``, and then show what 8 bits hold of them.

        Args:
            ema: shows the moving average of the weights instead (``ema=0.999`` at construction). After a write to a
                param the end of the context raises, on all ranks, and the weights are back.
            alone: for ``if rank == 0: evaluate()``. Not collective: one rank reads at stage 3, unit by unit, what the
                others serve, while these wait in their next collective, beyond their deadline, or end. Read params
                between forwards, or run the model; writes, backwards and calls that every rank makes are refused.
                Over messages and shared memory; over NCCL a ShardoptError.
        """
        from ..calls import whole_params

        return whole_params.unsharded(self.engine, ema, alone)

    def gradient_weight(self, tokens: int | torch.Tensor, average: bool = True) -> None:
        """Gives the next backward's gradients a weight: those of the step become the mean over all tokens. Local.

        Call it before each backward of a step, on every rank, with the number of tokens (or samples) that the loss is
        the mean of: micro-batches under :meth:`no_sync` and ranks in a :meth:`join` count too. The gradients of the
        step are then ``sum(tokens * gradient) / sum(tokens)``, those of one process with all the tokens. No tokens
        contribute nothing, not even a NaN. It needs the module, and costs no message. With experts call it before the
        forward, which returns all that the loss is made of.

        Args:
            tokens: whole number, 0 or more, or a tensor of one element that holds it.
            average: False leaves out the division: the sum over all tokens. The same for a whole step.

        Raises:
            StateError: the last weight was not used by a backward.
            DisagreementError: a rank forgot the call, at the end of that backward and on all ranks.
            ShardoptError: from :meth:`step` on all ranks: there were no tokens at all.
        """
        from ..calls import gradients

        gradients.gradient_weight(self.engine, tokens, average)

    def weights(
        self,
        bucket_bytes: int = 256 << 20,
        dtype: torch.dtype | None = None,
        names: Iterable[str] | None = None,
        merge: Merge | None = None,
    ) -> WeightStream | MergedStream:
        """Iterates over ``(name, whole tensor)`` of all params and saved buffers, in the order of the state dict.

        Collective: every rank takes all of them, and they are of one step. Works at every stage; at stage 3 params are
        gathered a bucket at a time, the next one while the last one is used. Tied weights come once, and frozen
        params of other kinds as they are. A rank that leaves the loop ends it on all ranks: those that go on raise a
        StateError within a bucket. So does a ``step()`` or a load on every rank that has not come to the end.

        Args:
            bucket_bytes: of what is gathered at a time. At most two buckets and the largest param take memory.
            dtype: of what is of floating point; None: its own. Values travel in it.
            names: only these, as in :meth:`weights_metadata`.
            merge: a function of a module and of its whole weights, by their names in the module. It returns the tensors
                that go out in their place (adapters merged into what they adapt), or None, and is then asked for the
                modules inside. It is called first with tensors on the meta device, for shapes and dtypes.

        Raises:
            DisagreementError: ranks ask for different weights, or one cannot read its own.
            ShardoptError: params have no names: neither the module nor named params were given.
        """
        from ..calls import whole_params

        return whole_params.weights(self.engine, bucket_bytes, dtype, names, merge)

    def weights_metadata(
        self, dtype: torch.dtype | None = None, names: Iterable[str] | None = None, merge: Merge | None = None
    ) -> dict[str, torch.Tensor]:
        """Returns tensors on the meta device, by name, in the order of :meth:`weights`. Local; nothing is gathered."""
        from ..calls import whole_params

        return whole_params.weights_metadata(self.engine, dtype, names, merge)

    @uncompiled(_UNCOMPILED.format("zero_grad"))
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does what torch's does, and forgets a backward that failed."""
        with self.engine.turn.take("zero_grad()"):
            with torch._C.DisableTorchFunctionSubclass():
                super().zero_grad(set_to_none)
            self.engine.forget_backward()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does. In mid-training the next step binds its params, in buckets of their own.

        Raises:
            ValueError: a param is in another group, or a hyper-parameter is out of range.
            ShardoptError: the group asks for ``capturable``, ``differentiable`` or a process group beside a module.
            TypeError: a param is complex, or a hyper-parameter is not a number.
        """
        check_given(param_group, self.defaults, type(self).__name__)
        with self.engine.turn.take("add_param_group()"):
            super().add_param_group(param_group)
            try:
                check_added(self.param_groups[-1], self.rule, self.engine.check_arguments)
            except Exception:
                self.param_groups.pop()
                raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if GradScaler should hand over its scale and overflow instead of skipping ``step()`` itself."""
        return bool(self.defaults.get("fused"))

    @uncompiled(_UNCOMPILED.format("step"))
    def step(self, closure: Closure | None = None) -> Any:
        """Updates every param that has a gradient. Collective; threads of one process take turns.

        Args:
            closure: re-evaluates the model and returns the loss, on every rank or on none. What one rank's closure
                raises is raised on all (:mod:`shardopt.module.closure`).

        Returns:
            The closure's result.

        Raises:
            ShardoptError: see :mod:`shardopt.errors`. Unless the message says otherwise, nothing changed on any rank.
        """
        return self.engine.step(closure, self._scaling)

    def _scaling(self) -> tuple[float, bool]:
        """Returns the loss scale that a GradScaler handed over, and whether it found an Inf or NaN."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        return 1.0 if scale is None else float(scale), found is not None and bool(found)

    def refresh_masters(self) -> None:
        """Makes loaded masters follow the present weights, though they do not round to them. Local.

        Writes to params need no call: a master follows its param. In ``"split"`` formats it does so to half a unit in
        the last place after a write through ``.data``, and exactly after this call.
        """
        self.engine.refresh_masters()

    @property  # type: ignore[override]
    def state(self) -> StateView:
        """Mapping from param to its state in torch's form; empty before the first step, except where torch's is not.

        Tensors are views of the shard on one rank, else parts. ``state[param] = {...}`` and ``state[param][name] = t``
        load one param's state, and ``del state[param]`` forgets it; every rank must do it.
        Keys that are not tensors are the user's own, as in torch.
        """
        from .state_view import StateInTurn

        if "state" in self.__dict__:  # put there past the property
            with self.engine.turn.take("optimizer.state"):
                self.engine.take_stray()
        return StateInTurn(self.engine)

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        """Loads a dict by param, all of it or, after an error, nothing; an empty one forgets all states."""
        if "param_groups" in self.__dict__:  # torch's constructor assigns one, before there are groups
            self.engine.check_open()
            if not isinstance(value, Mapping):
                raise TypeError(
                    "assign optimizer.state a dict of states by param, or {} to forget all: found "
                    f"{type(value).__name__}, and nothing was loaded."
                )
            self.engine.load_of_params(value, self.engine.groups, "optimizer.state = {...}")

    def state_dict(self) -> dict[str, Any]:
        """Returns ``{"state": {index: {...}}, "param_groups": [...]}``, in torch's format. Local.

        At several ranks its tensors are parts: saving one fetches the rest from the other ranks. Save the dict before
        the next step, and before any rank loads states. A ``copy.deepcopy`` keeps this rank's slices; if every rank
        loads its own copy before the first step of a new optimizer, ranks exchange what each lacks.
        """
        self.engine.check_open()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        from ..states.torch_format import to_state_dict
        from .state_view import StateView

        with self.engine.turn.take("state_dict()"):
            self.engine.settle_states()
            state_dict = to_state_dict(self.engine.groups, StateView(self.engine, in_dict=True))
        return self._hooked(self._optimizer_state_dict_post_hooks, state_dict)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers every state in host memory of rank ``to``. Collective.

        ``state_dict()`` is plain tensors there until the next step. TypeError or ValueError: ``to`` is not a rank.
        """
        self.engine.consolidate(to)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a dict of this class or of the torch class, made by any number of ranks. Each rank takes its part.

        Raises:
            ValueError: the groups do not match (torch's own messages).
            StateError: tensors are missing, unknown or of other shapes, or a group has another rule. Nothing changed.
        """
        self.engine.check_open()
        state_dict = self._hooked(self._optimizer_load_state_dict_pre_hooks, copied(state_dict))
        self.engine.load(state_dict, matched(state_dict["param_groups"], self.param_groups, self.defaults))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _hooked(self, hooks: Mapping[int, Any], state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the dict, or the dict that a hook returned."""
        for hook in hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def offload(self, to: str | os.PathLike[str] = "cpu", params: bool = False) -> None:
        """Moves all master weights and states to host memory or a disk until :meth:`reload`. Collective.

        Steps, state dicts and checkpoints work meanwhile, at the speed of the tier and with the same bits. Does nothing
        before the first step. Params that rest in a file with their masters move with them.

        Args:
            to: ``"cpu"`` for host memory, or a directory for a file in it.
            params: moves slices of params at stage 3 too, and frees what is gathered. Until :meth:`reload` steps and
                forwards raise a StateError; state dicts, :meth:`weights` and checkpoints work. Slices on CPUs go to a
                directory only, with ``Tuning(neighbours=False)``, and not to host memory, where they are.

        Raises:
            OffloadError: the tier cannot hold them. Nothing moved, on any rank.
            TypeError: ``to`` is neither.
        """
        from ..calls import moves

        moves.offload(self.engine, to, params)

    def reload(self, states: bool = True) -> None:
        """Undoes :meth:`offload`: params first. After an OffloadError nothing more moved, on any rank. Collective.

        Args:
            states: False brings params alone back, to evaluate or to sync weights; masters and states stay.
        """
        from ..calls import moves

        moves.reload(self.engine, states)

    def __deepcopy__(self: Optimizer, memo: dict[int, Any]) -> Optimizer:
        """Copies the optimizer with its states; its params are those that ``memo`` maps to, as in torch."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other._given, other._unread = self._given, self._unread
        module = copy.deepcopy(self.options.module, memo)
        other.engine = _engine(other, self.rule, dataclasses.replace(self.options, module=module))
        for group in self.param_groups:
            memo[id(group.get("process_group"))] = group.get("process_group")  # the same ranks
        self.engine.copy_states(other.engine, lambda value: copy.deepcopy(value, memo))
        # torch's copies, too, omit hooks and what schedulers patched onto the instance.
        other.__setstate__(copy.deepcopy({"defaults": self.defaults, "param_groups": self.param_groups}, memo))
        # torch adds flags that a user's own rule does not have.
        other.defaults = {key: other.defaults[key] for key in self.defaults}
        other.engine.default_names = self.engine.default_names
        other._begin()
        return other

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Does what torch's does. ``state["state"]`` is a dict by param: all of it is loaded or, after an error, none.

        Raises:
            StateError: a state does not fit its param, or is of a tensor that no group has. Nothing changed.
        """
        given = dict(state)
        if "state" in given:
            self.engine.check_open()
            self.engine.load_of_params(given.pop("state"), given.get("param_groups", self.engine.groups))
        super().__setstate__(given)

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "save optimizer.state_dict(); in one process copy.deepcopy((model, optimizer)) works too, at stage 3 in "
            "`with optimizer.unsharded():`. A sharded optimizer cannot be copied alone or pickled: its params and "
            "states are views of buffers that the copy would not share."
        )

    def close(self) -> None:
        """Gives every param its own storage, and frees master weights and states. Collective at stage 3.

        It is collective at every stage with ``compute_dtype`` or ``gather_dtype``, whose exact values it gathers.
        The model stays usable; a DDP module reduces its own gradients again. The call waits while another rank reads
        this rank's states, until that rank closes too or reads nothing for a few seconds.
        """
        self.engine.close()

    @property
    def units(self) -> dict[str, UnitView]:
        """The units of stage 3 by name: ``opt.units["layers.0"].unshard()``. Empty below stage 3, and before
        ``bind()`` or the first forward.

        A unit is gathered as a whole: one of the model's repeated blocks, or what ``Tuning(units=...)`` says.
        """
        from ..calls import reports

        return reports.units(self.engine)

    def schedule(self) -> Schedule:
        """Returns which units are gathered during each use of a unit; ``print(opt.schedule())`` shows a table.

        The first step shows the order of uses. A step that uses units in another order makes another schedule. Empty
        below stage 3, and before the first step.
        """
        from ..calls import reports

        return reports.schedule(self.engine)

    def program(self) -> str:
        """Returns what the update of the last step did, an operation a line; ``print(opt.program())`` shows it.

        AdamW's is one pass over the shards. Rules that look at whole params or matrices have more of them, and
        exchanges between them, to which all ranks come in this order. Experts with a ``process_group`` of their own
        have a program of their own. Empty before the first step.
        """
        from ..calls import reports

        return reports.program(self.engine)

    def timings(self) -> Timings:
        """Returns the seconds of each phase of a step, medians of the last 100. The profiler shows the phases too."""
        from ..calls import reports

        return reports.timings(self.engine)

    def log(self, writer: Writer, every: int = 10) -> Handle:
        """Reports this rank's numbers to a writer, every so many steps. Local.

        Numbers by name: ``step``, ``updates``, ``skipped``, ``grad_norm`` where the norm is known, ``seconds/<phase>``,
        ``memory/<kind>/<tier>`` and ``traffic/<kind>`` in bytes, the last ones received in a step.

        Args:
            writer: a ``SummaryWriter`` of TensorBoard (names then begin with ``shardopt/``), or a function of a dict.
            every: number of steps from one report to the next.

        Returns:
            A handle, whose ``remove()`` ends it.

        Raises:
            TypeError: ``writer`` is neither.
            ValueError: ``every`` is below 1.
        """
        from .reports import log

        return log(self, self.engine, writer, whole(every, "every (steps between two reports)", least=1))

    def monitor(self, path: str | os.PathLike[str], every: float = 1.0) -> Handle:
        """Writes what :meth:`log` reports to a small file, which ``shardopt top PATH`` shows. Local.

        Args:
            path: a directory, made if missing; each rank that calls this has a file in it. One directory takes one
                optimizer. If a file cannot be written later, training goes on with a warning.
            every: seconds between two reports, at least.

        Returns:
            A handle, whose ``remove()`` ends it.

        Raises:
            TypeError, ValueError: ``path`` is not a path, or ``every`` is not a number of seconds.
            OSError: the directory cannot be made.
        """
        from .reports import monitor

        directory = Path(directory_path(path, "path"))
        return monitor(self, self.engine, directory, number(every, "every (seconds between two reports)", least=0))

    def memory(self) -> dict[str, dict[str, int]]:
        """Returns bytes on this rank by kind (param, gradient, master, state, buffer) and tier (device, host, disk)."""
        from ..calls import reports

        return reports.memory(self.engine)

    def __repr__(self) -> str:
        from ..calls import reports

        return f"{super().__repr__()[:-1]}Sharded ({reports.describe(self.engine)})\n)"


ShardedOptimizer.__init__.__doc__ = keywords_in_words(Options)  # help() shows it for every class of optimizers


def _engine(optimizer: ShardedOptimizer, rule: Rule, options: Options) -> Engine:
    # Not at the top: the engine loads all that a step needs. test_fresh_process.py limits what an import loads.
    from ..engine import Engine

    return Engine(optimizer, rule, options, optimizer._check_group, optimizer._unread, optimizer._fixed)

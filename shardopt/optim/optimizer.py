"""The face towards torch: an optimizer that schedulers, scalers, DDP scripts and frameworks take for torch's own."""

import copy
import dataclasses
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch

# torch.compiler.disable would import all of Dynamo here; this, which torch.optim uses too, waits for the first call.
from torch._compile import _disable_dynamo

from ..config import OptionKeywords, Options
from ..errors import StateError
from ..rules import Rule
from .joinable import JoinableOptimizer, take_along
from .param_groups import check_added, check_given, copied, matched, read_arguments

if TYPE_CHECKING:
    from ..domain.timings import Timings
    from ..engine import Engine
    from ..states.table import StateView

Optimizer = TypeVar("Optimizer", bound="ShardedOptimizer")
Closure = Callable[[], Any]


class ShardedOptimizer(torch.optim.Optimizer, JoinableOptimizer):
    """Any rule as a ``torch.optim.Optimizer`` whose masters and states are sharded over ranks.

    The classes of :mod:`shardopt.optim` are this one with torch's names and arguments. Use it directly for a rule of
    your own::

        opt = ShardedOptimizer(model.parameters(), {"lr": 1e-3, "beta": 0.9}, rule=my_rule)

    Nothing is allocated and no rank is talked to before the first ``step()``: move, cast, load and wrap the model as
    you like until then. Every rank of the process group must take every step.

    Args:
        params: as for ``torch.optim``: tensors, named tensors or param groups.
        defaults: hyper-parameters of groups that do not set their own.
        rule: the arithmetic, made by :func:`shardopt.rules.rule`.
        **options: see :class:`shardopt.config.Options`.
    """

    _check_group: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """Of a class with torch's arguments: checks those that a param group gives, and returns them."""

    def __init__(self, params: Any, defaults: dict[str, Any], *, rule: Rule, **options: Unpack[OptionKeywords]):
        params, rule, given = read_arguments(type(self).__name__, params, defaults, rule, options)
        self.engine = _engine(self, rule, given)
        super().__init__(params, defaults)
        self._begin()

    def _begin(self) -> None:
        """Params are known: the module is taken over, and others find this optimizer."""
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
        """What the constructor was told, with defaults."""
        return self.engine.options

    @property
    def grad_norm(self) -> float | None:
        """Global 2-norm of the last step's gradients before clipping, where ``max_grad_norm`` or ``release_gradients``
        was given: NaN where one of them is, inf where one is Inf (with ``release_gradients``: where one is either)."""
        return self.engine.grad_norm

    @property
    def updates(self) -> int:
        """Calls of ``step()`` that changed params: those that no Inf, NaN or scaler skipped."""
        return self.engine.updates

    # -- the module ------------------------------------------------------------------------------------------------

    def bind(self, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
        """Takes the module over now, and not at its first forward. Every rank must call it.

        A model that is trained through its submodules or other methods only (``model.encode(x)``), so that its own
        forward never runs, needs this call. Params become views of buckets, masters and states are allocated. A module
        that was built on the meta device is given memory and values here, bucket by bucket: at stage 3 no rank ever
        holds all of it.

        Args:
            state_dict: values for params and buffers on the meta device: whole tensors by their names in the module
                (a memory-mapped file will do). None: each module's own ``reset_parameters()``.

        Raises:
            BindingError: a param that no bucket can hold, or values that are missing, of other names or not asked for.
            TypeError: a value is no dense tensor, or ``state_dict`` has none by name.
            Exception: what a ``reset_parameters()`` raised, and DisagreementError on the other ranks. The module has no
                values then: mend the cause and call this again, on every rank. Forwards are refused until then.
        """
        self.engine.bind(state_dict)

    def no_sync(self) -> AbstractContextManager[None]:
        """Forwards inside are followed by backwards that accumulate each rank's own gradients, without reducing them.

        At stage 0 and 1, as DDP's own ``no_sync()``, which is honoured as well; the last backward before a step must
        be outside. From stage 2 on every backward is reduced into the shards, which is what keeps memory down, and
        without the module nothing is reduced here: then it does nothing.
        """
        return self.engine.no_sync()

    def unsharded(self, ema: bool = False) -> AbstractContextManager[None]:
        """Whole params on every rank: for ``generate()``, evaluation, exporting, code that reads them anywhere.

        Below stage 3 they always are. Every rank must enter and leave, and waits there for the others (for
        ``Tuning.timeout``, then an error says so); inside, ranks may run as they like, for as long as they like. What
        is written to params in place stays written, if every rank writes the same.

        Args:
            ema: show the moving average of the weights (``ema=0.999`` at construction) in their place; behind it they
                are the weights again, and what was written inside is gone.

        Raises:
            DisagreementError: ranks ask for different params.
            TypeError: ``ema`` is neither True nor False.
        """
        return self.engine.unsharded(ema)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; after an error in backward it makes the next one start afresh."""
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)
        self.engine.forget_backward()

    # -- param groups ----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; in mid-training the new params are bound, in buckets of their own, at the next step.

        Raises:
            ValueError: a param is in another group already. (Twice in this one: torch's warning now, an error at the
                first step.)
            ShardoptError: the group asks for what a fused, host-steered update cannot do.
            TypeError: a param is complex, or a hyper-parameter is no number.
            ValueError: a hyper-parameter is out of its range, or makes a scalar of the update Inf or NaN.
        """
        check_given(param_group, self.defaults, self.options, type(self).__name__)
        super().add_param_group(param_group)
        try:
            check_added(self.param_groups[-1], self.rule, self.engine.check_arguments)
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler asks: with it, it hands over scale and overflow instead of calling ``step()`` or not."""
        return bool(self.defaults.get("fused"))

    # -- the step --------------------------------------------------------------------------------------------------

    @_disable_dynamo
    def step(self, closure: Closure | None = None) -> Any:
        """Updates every param that has a gradient. Every rank must make this call; threads of one process take turns.

        Args:
            closure: re-evaluates the model and returns the loss; on every rank or on none. What it raises on one rank
                is raised on all, at once where the module was handed over (:mod:`shardopt.module.closure` says how).

        Returns:
            What the closure returned.

        Raises:
            ShardoptError: see :mod:`shardopt.errors`; unless the message says otherwise, nothing changed on any rank.
        """
        return self.engine.step(closure, self._scaling)

    def _scaling(self) -> tuple[float, bool]:
        """The loss scale that a GradScaler handed over, and whether it found an Inf or NaN."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        return 1.0 if scale is None else float(scale), found is not None and bool(found)

    def refresh_masters(self) -> None:
        """Makes masters follow params that were written through ``.data``, which leaves no trace to notice.

        Params written in place (``load_state_dict``, ``copy_``) are noticed without this call. Local: make it on every
        rank that wrote.
        """
        self.engine.refresh_masters()

    # -- states ----------------------------------------------------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> "StateView":
        """Param -> its state in torch's form. A param that has no state yet has an empty one (Adagrad's all have one).

        Tensors are views of the shard where one rank holds everything, else parts. ``state[param] = ...`` loads one
        param's state, as ``load_state_dict()`` does: on every rank, each takes its part. All else of it is read-only.
        Keys that are no tensors are yours, as in torch: state dicts hold them, checkpoints have ``extra``.
        """
        return self.engine.view()

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        """Only an empty one can be assigned, which is how scripts of torch forget all states."""
        if value:
            raise StateError("optimizer.state lies in shards and cannot be assigned: call load_state_dict().")
        if "param_groups" in self.__dict__:  # torch's constructor assigns one, before there are groups
            self.engine.replace_states({}, {})

    def state_dict(self) -> dict[str, Any]:
        """In torch's format: ``{"state": {index: {...}}, "param_groups": [...]}``. No other rank need call it.

        At several ranks its tensors are parts: saved, they are whole, plain tensors, for which the other ranks are
        asked while they wait or compute. Save before the next step, and before any rank loads states.
        """
        self.engine.check_open()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        return self._hooked(self._optimizer_state_dict_post_hooks, self.engine.state_dict())

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collective: gathers every state on rank ``to``, in host memory; ``state_dict()`` there is then plain tensors.

        Faster than one rank's asking for them, and for those who want plain tensors in memory.
        It holds until the next step. A dict saved from it loads into the torch class, and here at any number of ranks.

        Raises:
            TypeError: ``to`` is no number.
            ValueError: no rank has it.
        """
        self.engine.consolidate(to)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a dict of this class or of the torch class, at any number of ranks; each rank takes its part.

        Raises:
            ValueError: the groups do not match (torch's own messages).
            StateError: tensors are missing, unknown or of other shapes. Nothing was changed.
        """
        self.engine.check_open()
        state_dict = copied(state_dict)
        state_dict = self._hooked(self._optimizer_load_state_dict_pre_hooks, state_dict)
        self.engine.load(
            state_dict, matched(copy.deepcopy(state_dict["param_groups"]), self.param_groups, self.defaults)
        )
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _hooked(self, hooks: Mapping[int, Any], state_dict: dict[str, Any]) -> dict[str, Any]:
        """The dict, or what hooks put in its place."""
        for hook in hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    # -- where states rest -----------------------------------------------------------------------------------------

    def offload(self, to: str | os.PathLike[str] = "cpu") -> None:
        """Collective: moves all masters and states out of the way, until :meth:`reload`; for inference beside training.

        Everything works as ever meanwhile: ``step()``, at the speed of the tier, state dicts and checkpoints. The bits
        of a training do not depend on where it was offloaded. Before the first step there is nothing to move, and this
        does nothing.

        Args:
            to: ``"cpu"``: host memory; for params on a CPU that is where they are, and nothing is copied. A directory:
                a file in it, as with ``offload=directory``, and the memory is free.

        Raises:
            OffloadError: they cannot be kept there. They are where they were, on every rank.
            TypeError: it is neither.
        """
        self.engine.offload(to)

    def reload(self) -> None:
        """Collective: brings masters and states back to where the constructor's ``offload`` says: to the device.

        Without an :meth:`offload` before it does nothing.

        Raises:
            OffloadError: they cannot be read, or not be kept. They are where they were, on every rank.
        """
        self.engine.reload()

    # -- copies and ends -------------------------------------------------------------------------------------------

    def __deepcopy__(self: Optimizer, memo: dict[int, Any]) -> Optimizer:
        """A copy with the states of this moment; its params are those that ``memo`` holds copies of, as in torch."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        module = copy.deepcopy(self.options.module, memo)
        other.engine = _engine(other, self.rule, dataclasses.replace(self.options, module=module))
        for group in self.param_groups:
            memo[id(group.get("process_group"))] = group.get("process_group")  # the same ranks
        self.engine.copy_states(other.engine, lambda value: copy.deepcopy(value, memo))
        # As torch's copies: hooks, and what schedulers patched onto this instance, are left behind.
        other.__setstate__(copy.deepcopy({"defaults": self.defaults, "param_groups": self.param_groups}, memo))
        # torch added what groups of our own rules do not have, and a step would look for.
        other.defaults = {key: other.defaults[key] for key in self.defaults}
        other._begin()
        return other

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "a sharded optimizer cannot be pickled: its params and states are views of buffers that the copy would not "
            "share. Save optimizer.state_dict(), or copy.deepcopy((model, optimizer)) in one process."
        )

    def close(self) -> None:
        """Gives every param storage of its own and releases masters and states. The model stays usable.

        A DDP module reduces its gradients itself again. At stage 3 the params are gathered: every rank must call it.
        While another rank still reads this one's states, for its ``state_dict()``, this waits: until that one closes
        too, or has asked nothing for a few seconds.
        """
        self.engine.close()

    # -- reports ---------------------------------------------------------------------------------------------------

    def timings(self) -> "Timings":
        """Wall-clock seconds of each phase of a step, medians of the last 100; ``print`` shows a table.

        The phases are labels in ``torch.profiler`` as well.
        """
        return self.engine.timings()

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes on this rank by kind (param, gradient, master, state, buffer) and tier (device, host, disk)."""
        return self.engine.memory()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}Sharded ({self.engine.describe()})\n)"


def _engine(optimizer: ShardedOptimizer, rule: Rule, options: Options) -> "Engine":
    # Here, and not above: with the engine comes all that a step needs, and nothing that an import needs. The limit is
    # in test_fresh_process.py.
    from ..engine import Engine

    return Engine(optimizer, rule, options, optimizer._check_group)

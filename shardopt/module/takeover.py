"""Taking over a module: its forward tells when to bind, and whether the backward that follows reduces gradients.

A module that is wrapped in DistributedDataParallel loses that one's reducer, and the reducer's buckets with it; what
DDP does besides (calling the module, broadcasting buffers, ``no_sync()``, ``state_dict()``) goes on.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..domain.bind import Bound
from ..domain.domain import Domain
from ..errors import BindingError
from ..partition.comm.group import Ranks
from ..partition.placement import Placement, Placements
from ..tensors.unsharded_guard import is_sharded
from .backward import Backward
from .closure import ClosureRun
from .forward import Forward, ModuleHook, tensors_within
from .materialize import give_devices, give_values
from .tree import ModuleTree


class Sharer(Protocol):
    """An optimizer's engine: a module may be handed to several optimizers, each with some of its params."""

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """Its param groups."""

    @property
    def takeover(self) -> "Handover | None":
        """Of the module that was handed to it."""


class Handover:
    """The hooks on one module."""

    def __init__(
        self,
        module: nn.Module,
        always_syncs: bool,
        before_forward: Callable[[], None],
        engines: Callable[[], Sequence[Sharer]],
    ):
        """
        Args:
            module: plain or DDP.
            always_syncs: gradients are sharded, so that every backward reduces them, ``no_sync()`` or not.
            before_forward: called when a forward begins that a backward can follow.
            engines: gives those of all optimizers that are in use.
        """
        self.ddp = module if isinstance(module, DistributedDataParallel) else None
        self.module: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        self.pauses = 0  # how many no_sync() contexts of ours are open
        self._domain: Domain | None = None
        self.backward: Backward | None = None
        self._fresh: frozenset[torch.Tensor] = frozenset()
        self.closure = ClosureRun()
        self.forward: Forward | None = None
        self._tree: ModuleTree | None = None  # of when params were last bound, or looked for
        self._looked_in: frozenset[weakref.ref[Sharer]] = frozenset()  # those of that time
        self._always_syncs, self._before_forward, self._engines = always_syncs, before_forward, engines
        self._hooks = [
            self.module.register_forward_pre_hook(ModuleHook(self._enter), prepend=True, with_kwargs=True),
            self.module.register_forward_hook(ModuleHook(self._leave)),
        ]

    def _sharers(self) -> list[Sharer]:
        """Those that the module was handed to, which is this takeover's own while its optimizer is in use."""
        taken = ((each, each.takeover) for each in self._engines())
        return [each for each, takeover in taken if takeover is not None and takeover.module is self.module]

    def check_covers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises BindingError if a param of these groups, which is not bound, is not the module's."""
        own = {*self.module.parameters(), *(() if self._domain is None else self._domain.entries)}
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                if param not in own:
                    raise BindingError(
                        f"param {index} of group {number} (shape {tuple(param.shape)}) is not a param of the module "
                        "that was handed over: its gradient would not be reduced. Hand over the module that contains "
                        "all of them, or give this param to an optimizer of its own."
                    )

    def check_covered(self) -> None:
        """Raises BindingError if a trainable param of the module is in no optimizer that it was handed to."""
        known = {param for each in self._sharers() for group in each.groups for param in group["params"]}
        for name, param in self.module.named_parameters():
            if param.requires_grad and param not in known:
                raise BindingError(
                    f"{name} is trainable but in no param group of an optimizer that took the module over: nobody "
                    "would average its gradient, and nobody train it. Freeze it (requires_grad_(False)) or add it to "
                    "a group (optimizer.add_param_group({'params': ...}))."
                )

    def check_still_covered(self) -> None:
        """As ``check_covered``, where params came into the module after binding, or an optimizer of others is gone."""
        sharing = frozenset(map(weakref.ref, self._sharers()))
        if self._tree is not None and not (self._tree.is_current and sharing == self._looked_in):
            self.check_covered()
            self._tree, self._looked_in = ModuleTree(self.module), sharing

    def process_group(self, given: Any) -> Any:
        """The group to average over: that of the optimizer, else that of DDP."""
        self._find_ddp()
        if self.ddp is None:
            return given
        own = self.ddp.process_group
        if given is None:
            return own
        _check_same_ranks(given, own)
        return given

    def begin(self, domain: Domain, backward: Backward) -> None:
        """What is bound from now on is handed to :meth:`attach`."""
        self._domain, self.backward = domain, backward
        backward.closure = self.closure
        if Placements.of_stage(domain.options.stage).param is Placement.SHARD:
            self.forward = Forward(domain, self.module)
            self.backward.on_end = self.forward.backward_ended

    def attach(self, bound: Bound) -> None:
        """Takes hold of params that were just bound."""
        assert self.backward is not None
        self._tree = ModuleTree(self.module)
        self.backward.attach(bound.entries, bound.shards)
        if self.forward is not None:
            self.forward.attach()

    # -- values of what is on the meta device ----------------------------------------------------------------------

    @property
    def fresh(self) -> frozenset[torch.Tensor]:
        """Params and buffers that were on the meta device and have no values yet."""
        return self._fresh

    def give_devices(self, ranks: Ranks) -> None:
        """What is on the meta device is on the device to train on from now on, and fresh."""
        self._fresh |= frozenset(give_devices(self.module, ranks))

    def give_values(self, state_dict: Mapping[str, torch.Tensor] | None) -> None:
        """Collective: what is fresh gets its values; on all ranks or on none. See :func:`materialise.give_values`."""
        assert self._domain is not None
        give_values(self.module, list(self._fresh), self._domain, state_dict)
        self._fresh = frozenset()

    def describe(self) -> dict[str, Any]:
        """What ranks must have in common before values are shared; JSON-able."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in named if not is_sharded(tensor)}

    def share_values(self, ranks: Ranks) -> None:
        """Collective: rank 0's params and buffers for all, as DDP does when it wraps a module."""
        if self.ddp is None:
            params = [param for param in self.module.parameters() if not is_sharded(param)]  # by another optimizer
            ranks.broadcast([*params, *self.module.buffers()], "sharing rank 0's params")

    def _find_ddp(self) -> None:
        if self.ddp is None:
            active = DistributedDataParallel._get_active_ddp_module()
            if active is not None and _is_around(active.module, self.module):
                self.ddp = active

    def _enter(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        if module is not self.module:  # a shallow copy shares hooks
            return
        self._prepare()
        if self.fresh:
            raise BindingError(
                "call optimizer.bind() again, on every rank: it failed before all params that were on the meta device "
                "had values, and this forward would compute with zeros."
            )
        if self.forward is not None:
            self.forward.enter(module, arguments, keywords)

    def _prepare(self) -> None:
        # In a backward this is activation checkpointing, which runs the forward again.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        self._find_ddp()
        self.retire_reducer()
        self._before_forward()
        if self.backward is not None:
            if self.backward.is_open:
                self.backward.abandon("a new forward began before its backward had ended")
            self.expect_backward()

    def expect_backward(self) -> None:
        """Says whether the backward of a forward that begins now is reduced; a submodule's too, called by itself."""
        assert self.backward is not None
        # Nothing is bound while all params are frozen; gradients of other modules may come through.
        self.backward.is_syncing = self._has_reducer and (
            self._always_syncs or (not self.pauses and (self.ddp is None or self.ddp.require_backward_grad_sync))
        )

    @property
    def _has_reducer(self) -> bool:
        return self._domain is not None and self._domain.reducer is not None

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Lets the gradient of the output open the round: in the outermost graph, even where all is checkpointed."""
        backward = self.backward
        if backward is None or not backward.is_syncing or torch._C._current_graph_task_id() != -1:
            return
        if module is not self.module:
            return
        me = weakref.ref(backward)

        def open_round(_: Any) -> None:
            found = me()
            # In torch.autograd.grad() nothing is accumulated; in backward(inputs=...) perhaps later.
            accumulates = torch.autograd.Variable._execution_engine.is_checkpoint_valid()
            if found is not None and found.is_syncing and not found.is_open and accumulates:
                found.open()

        for tensor in tensors_within(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(open_round)

    def retire_reducer(self) -> None:
        """Makes DDP leave gradients alone, and frees its buckets."""
        if self.ddp is not None and not isinstance(self.ddp.reducer, RetiredReducer):
            check_honourable(self.ddp)
            if self._domain is not None and self._domain.mesh.world.group is not None:
                # DDP may have been wrapped around the module after bind().
                _check_same_ranks(self._domain.mesh.world.group, self.ddp.process_group)
            self.ddp.reducer = cast(Any, RetiredReducer())
            self.ddp.logger = RetiredLogger()  # it holds the old one

    def dropped(self) -> None:
        """As ``close``, without the optimizer, which was dropped."""
        if self.forward is not None and self.forward.holds_params:
            warnings.warn(
                "a stage 3 optimizer was dropped without close(): this rank holds a slice of the module's params only, "
                "and the rest is gone. Call close() on every rank while the optimizer lives.",
                ResourceWarning,
                stacklevel=2,
            )
        self.close()

    def close(self) -> None:
        """Gives the module back; DDP reduces its gradients again, unless another optimizer has the module too."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.backward is not None:
            self.backward.detach()
        if self.forward is not None:
            self.forward.close()
        others = any(each.takeover is not self for each in self._sharers())
        if self.ddp is not None and isinstance(self.ddp.reducer, RetiredReducer) and not others:
            params, expect_sparse = self.ddp._build_params_for_reducer()
            names = self.ddp._build_debug_param_to_name_mapping(params)
            self.ddp._ddp_init_helper(params, expect_sparse, names, self.ddp.static_graph)


def _check_same_ranks(given: dist.ProcessGroup | DeviceMesh, own: dist.ProcessGroup) -> None:
    """Raises BindingError if the optimizer's ranks are not those of DDP."""
    ranks, theirs = _ranks_of(given), _ranks_of(own)
    if ranks != theirs:
        raise BindingError(
            f"process_group= holds ranks {ranks}, the group of the DistributedDataParallel module {theirs}: gradients "
            "would be averaged over other ranks than its buffers. Give both the same, or leave it to the module."
        )


def _ranks_of(group: dist.ProcessGroup | DeviceMesh) -> list[int]:
    """Their global numbers: of a mesh, those of the part that this rank is in."""
    if isinstance(group, DeviceMesh):
        return sorted(group.mesh.flatten().tolist())
    return sorted(dist.get_process_group_ranks(group))


def _is_around(outer: nn.Module, inner: nn.Module) -> bool:
    """Whether ``outer`` is ``inner``, or wraps it without params of its own, as torch.compile's does."""
    if outer is inner:
        return True
    own = set(inner.parameters())
    return all(param in own for param in outer.parameters()) and any(each is inner for each in outer.modules())


def check_honourable(ddp: DistributedDataParallel) -> None:
    """Raises BindingError if DDP was given an option that only its own reducer can honour."""
    options = {
        "a communication hook": bool(ddp._comm_hooks),
        "mixed_precision": ddp.mixed_precision is not None,
        "join()": ddp._join_config.enable,
        "delay_all_reduce_named_params": bool(ddp._delay_all_reduce_params),
        "the Python reducer (torch._dynamo.config.optimize_ddp = 'python_reducer')": bool(ddp._use_python_reducer),
    }
    found = [name for name, is_on in options.items() if is_on]
    if found:
        raise BindingError(
            f"the DistributedDataParallel module was set up with {' and '.join(found)}, which works inside of its own "
            "reducer: shardopt takes the reduction over, and it would silently be left out. Leave it away "
            "(reduce_dtype= compresses gradients, `with optimizer.join():` is for uneven inputs), or pass "
            "model.parameters() without the module at stage 0 or 1."
        )


class RetiredReducer:
    """Answers the calls that DDP makes on its reducer in every forward; gradients are none of its business any more."""

    def prepare_for_forward(self) -> None:
        pass

    def prepare_for_backward(self, outputs: Any) -> None:
        pass

    def _rebuild_buckets(self) -> bool:
        return False

    def _delay_all_reduce(self) -> None:
        pass

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BindingError(
            f"DistributedDataParallel asked its reducer for {name}, but shardopt has taken the reduction over (DDP's "
            "join(), communication hooks and changes of the group need DDP's own). For uneven inputs use `with "
            "optimizer.join():`; else call optimizer.close() first, or pass model.parameters() without the module at "
            "stage 0 or 1."
        )


class RetiredLogger:
    """Takes DDP's notes about a reducer that is gone, and has none to show."""

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        return SimpleNamespace(strs_map={}, ints_map={})

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **keywords: None

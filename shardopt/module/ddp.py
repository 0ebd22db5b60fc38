"""A module wrapped in DistributedDataParallel: shardopt reduces its gradients, so DDP loses its reducer and buckets.

DDP goes on to call the module, to broadcast buffers, and to answer ``no_sync()`` and ``state_dict()``.
"""

import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..domain.called import CalledModule
from ..errors import BindingError

OnLast = Callable[[Iterable[torch.Tensor]], None]


def find_wrapper(called: CalledModule) -> None:
    """Notes the DDP module that calls this one now, if it was wrapped after it was handed over."""
    active = DistributedDataParallel._get_active_ddp_module() if called.ddp is None else None
    if active is not None and _wraps(active.module, called.module):
        called.ddp = active


def group_of(called: Iterable[CalledModule], given: Any) -> Any:
    """Returns the group to average over: the optimizer's own, else that of DDP.

    Raises:
        BindingError: they are not the same ranks.
    """
    for each in called:
        find_wrapper(each)
        if each.ddp is not None:
            given = each.ddp.process_group if given is None else given
            check_same_ranks(given, each.ddp)
    return given


def _wraps(outer: nn.Module, inner: nn.Module) -> bool:
    """True if ``outer`` is ``inner``, or holds it and has no params of its own, as torch.compile's wrapper does."""
    if outer is inner:
        return True
    own = set(inner.parameters())
    return all(param in own for param in outer.parameters()) and any(each is inner for each in outer.modules())


def check_same_ranks(given: dist.ProcessGroup | DeviceMesh, ddp: DistributedDataParallel) -> None:
    """Raises BindingError if the optimizer's ranks are not those of DDP."""
    ranks, theirs = _ranks_of(given), _ranks_of(ddp.process_group)
    if ranks != theirs:
        raise BindingError(
            "give the optimizer and DistributedDataParallel the same ranks, or omit process_group=: DDP would "
            f"broadcast buffers over other ranks than gradients are averaged over. process_group= holds ranks {ranks}, "
            f"the group of the DistributedDataParallel module {theirs}."
        )


def _ranks_of(group: dist.ProcessGroup | DeviceMesh) -> list[int]:
    """Returns global ranks, sorted: of a group or of the slice of a mesh that holds this rank."""
    if isinstance(group, DeviceMesh):
        return sorted(group.mesh.flatten().tolist())
    return sorted(dist.get_process_group_ranks(group))


def ignored_by_ddp(module: nn.Module) -> set[torch.Tensor]:
    """Returns the params and buffers that DDP leaves to each rank, as the list that it looks for on a module says."""
    names = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    if not names:
        return set()
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {tensor for name, tensor in named if name in names}


def has_reducer(ddp: DistributedDataParallel) -> bool:
    """True if DDP still reduces gradients itself."""
    return not isinstance(ddp.reducer, RetiredReducer)


def syncs_buffers(ddp: DistributedDataParallel) -> bool:
    """True if a forward gives every rank the buffers of one."""
    # Torch renamed the attribute after 2.11, and the older name warns since.
    name = "forward_sync_buffers" if hasattr(ddp, "forward_sync_buffers") else "broadcast_buffers"
    return bool(ddp.modules_buffers and getattr(ddp, name))


def retire_reducer(ddp: DistributedDataParallel, group: dist.ProcessGroup | None, on_last: OnLast) -> None:
    """Makes DDP ignore gradients, and frees its buckets.

    Args:
        group: the group that gradients are averaged over; None if that is not known yet, or one rank.
        on_last: called with tensors whose backward is about to reduce gradients, whatever their forward said.

    Raises:
        BindingError: DDP has an option that only its own reducer can honour, or other ranks than ``group``.
    """
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
            f"construct DistributedDataParallel without {' and '.join(found)}: shardopt replaces DDP's reducer, and "
            "this would silently have no effect. Instead, reduce_dtype= compresses gradients and `with "
            "optimizer.join():` is for uneven inputs; or pass model.parameters() without the module at stage 0 or 1."
        )
    if group is not None:  # DDP may have been wrapped around the module after bind()
        check_same_ranks(group, ddp)
    ddp.reducer = cast(Any, RetiredReducer(on_last))
    # DDP's own logger holds the old reducer, whose buckets would stay allocated.
    ddp.logger = cast(Any, RetiredLogger())


def restore_reducer(ddp: DistributedDataParallel) -> bool:
    """Gives DDP a reducer of its own again, as its constructor does. Exchanges nothing.

    Returns:
        False if no param trains now, which a reducer refuses: the first forward with one that does makes it.
    """
    params, expect_sparse = ddp._build_params_for_reducer()
    if not params:
        ddp.reducer = cast(Any, ReturningReducer(ddp))
        return False
    names = ddp._build_debug_param_to_name_mapping(params)
    ddp._ddp_init_helper(params, expect_sparse, names, ddp.static_graph)
    return True


class _NoReducer:
    """Answers the calls that DDP makes on its reducer in every forward, and ignores gradients."""

    def prepare_for_forward(self) -> None:
        pass

    def prepare_for_backward(self, outputs: Any) -> None:
        pass

    def _rebuild_buckets(self) -> bool:
        return False

    def _delay_all_reduce(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._other(name)

    def _other(self, name: str) -> Any:
        """Answers what else is asked of a reducer."""
        raise NotImplementedError


class RetiredReducer(_NoReducer):
    """DDP's reducer while an optimizer has the module."""

    def __init__(self, on_last: OnLast):
        self._on_last = on_last

    def prepare_for_backward(self, outputs: Any) -> None:
        """torch's pipelines call it before the last backward. After a forward that syncs it changes nothing."""
        self._on_last(outputs)

    def _other(self, name: str) -> NoReturn:
        raise BindingError(
            "use `with optimizer.join():` for uneven inputs; for other features of DDP's reducer (communication hooks, "
            "changes of the group) call optimizer.close() first, or pass model.parameters() without the module at "
            f"stage 0 or 1. shardopt has replaced the reducer, and DistributedDataParallel asked it for {name}."
        )


class ReturningReducer(_NoReducer):
    """Stands in for DDP's reducer after the end of an optimizer, while all params are frozen (a GAN's other half)."""

    def __init__(self, ddp: DistributedDataParallel):
        self._ddp = weakref.ref(ddp)  # which holds this object

    def _restored(self) -> dist.Reducer | None:
        """Returns DDP's reducer, made by this call; None while nothing trains."""
        ddp = self._ddp()
        assert ddp is not None  # it makes the call
        try:
            return ddp.reducer if restore_reducer(ddp) else None
        except Exception as error:
            raise BindingError(
                "wrap the module in DistributedDataParallel again: DDP's reducer could not be made after the optimizer "
                f"was closed, so gradients would differ between ranks. {type(error).__name__}: {error}"
            ) from error

    def prepare_for_forward(self) -> None:
        """DDP calls it at the beginning of a forward that a reduction follows."""
        reducer = self._restored()
        if reducer is not None:
            reducer.prepare_for_forward()

    def _rebuild_buckets(self) -> bool:
        """DDP calls it in every forward with gradients, under ``no_sync()`` too."""
        self._restored()
        return False

    def _other(self, name: str) -> Any:
        reducer = self._restored()
        if reducer is None:
            raise BindingError(
                "let a param train (requires_grad_(True)) first: DistributedDataParallel asked its reducer for "
                f"{name}, and has none while all params are frozen."
            )
        return getattr(reducer, name)


class RetiredLogger:
    """Accepts DDP's notes about a reducer that is gone, and returns none."""

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        return SimpleNamespace(strs_map={}, ints_map={})

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **keywords: None

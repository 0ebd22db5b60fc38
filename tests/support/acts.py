"""Acts on one optimizer as plain data, and what performs them on it and on its model, in one process or on ranks.

::

    perform(Setting("SGD", stage=2, module=True), [("backward", 1, (511, 511), -1, True), ("step",)], folder)

An act is a tuple: the name of a method of :class:`Performance`, and its arguments. After each, all that can be seen of
the optimizer is compared with the model. An act that makes no sense where it stands (to freeze a param of no group)
does nothing, so that any list of acts can be performed, and shortened.
"""

import copy
import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardopt
from shardopt import ShardoptError, Tuning
from tests.support.beside_torch import KINDS, Model, Saved
from tests.support.cells import GROUPS, LATE, LOW, SHAPES, Cells, by_param, factors_of, param_of, values
from tests.support.observed import Comparison
from tests.support.replayed import compared
from tests.support.training import load_bytes

Act = tuple[Any, ...]
TIERS = {None: "device", "cpu": "host", "disk": "disk"}


@dataclass(frozen=True)
class Setting:
    """One optimizer.

    Attributes:
        kind: of ``KINDS``.
        module: handed over; else the acts average gradients, as a script does.
        offload: "cpu" or "disk".
        low: some params are bf16, with fp32 masters.
    """

    kind: str
    stage: int = 1
    module: bool = False
    offload: str | None = None
    low: bool = False


class Performance:
    """An optimizer, its model, and what was saved of both."""

    def __init__(self, setting: Setting, folder: Path):
        self.kind, self.setting, self.folder = KINDS[setting.kind], setting, folder
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        weights = [values(0, index) for index in range(len(SHAPES))]
        if setting.low:
            weights = [weight.bfloat16() if index in LOW else weight for index, weight in enumerate(weights)]
        self.model = Model(self.kind, weights, GROUPS)
        self.module = Cells(weight.clone() for weight in weights)
        self.optimizer = self._make()
        self.updates = 0
        self.tier: str | None = None  # where offload() moved masters and states
        self.bound: set[int] = set()  # params that lie in buckets
        self.checkpoints: list[tuple[Path, Saved, int]] = []  # the last: how many groups there were
        self.dicts: list[tuple[dict[str, Any], Saved, int]] = []

    def _make(self) -> Any:
        setting, params = self.setting, self.module.params
        return self.kind.ours(
            [{"params": [params[index] for index in group]} for group in self.model.groups],
            **self.kind.keywords,
            stage=setting.stage,
            module=self.module if setting.module else None,
            offload=str(self.folder / "states") if setting.offload == "disk" else setting.offload,
            tuning=Tuning(bucket_bytes=2000, keep_below=200, live_bytes=5000, chunk_bytes=1024, timeout=60.0),
        )

    @property
    def trainable(self) -> set[int]:
        return {index for index, param in enumerate(self.module.params) if param.requires_grad}

    @property
    def needed(self) -> set[int]:
        """Params that an optimizer binds when it is time."""
        with_gradient = {index for index, gradient in enumerate(self.model.gradients) if gradient.is_here}
        return set(self.model.owned) & (self.trainable | with_gradient)

    @property
    def own_tier(self) -> str:
        return TIERS[self.setting.offload]

    def check(self) -> None:
        Comparison(self).run()

    # -- gradients and steps ---------------------------------------------------------------------------------------

    def backward(self, seed: int, masks: tuple[int, int], bad: int, synced: bool) -> bool:
        """Rank 0 uses the cells of the first mask, rank 1 those of the other one.

        Args:
            bad: cell whose gradient has an Inf on rank 0; below 0: none.
            synced: not under ``no_sync()``.
        """
        of_ranks = [factors_of(seed, rank, masks[rank], bad) for rank in range(self.world)]
        means = self._means(of_ranks)
        if means is None:
            return False
        self._run_backward(of_ranks[self.rank], synced)
        for index, (mean, on) in means.items():
            self.model.gradients[index].add(mean, on, self.rank)
            param = self.module.params[index]
            if param.grad is None and not self.setting.module:  # other ranks have one, and they will be averaged
                param.grad = torch.zeros_like(param)
        if synced or not self.setting.module or self.setting.stage >= 2:
            for gradient in self.model.gradients:
                gradient.reduce()
        if self.setting.module:
            self.bound |= self.needed
        return True

    def _means(self, of_ranks: list[dict[int, Tensor]]) -> dict[int, tuple[Tensor, set[int]]] | None:
        """By param: the mean over ranks, and which of them add to it. None: some rank has no backward."""
        found = [by_param({c: each for c, each in its.items() if param_of(c) in self.trainable}) for its in of_ranks]
        if not all(found):
            return None
        return {
            index: (
                torch.stack([each.get(index, torch.zeros(SHAPES[index])) for each in found]).sum(0) / self.world,
                {rank for rank, each in enumerate(found) if index in each},
            )
            for index in sorted({index for each in found for index in each})
        }

    def _run_backward(self, factors: Mapping[int, Tensor], synced: bool) -> None:
        with nullcontext() if synced else self.optimizer.no_sync():
            loss = self.module(factors)
            self._compare_loss(loss, factors)
            loss.backward()

    def _compare_loss(self, loss: Tensor, factors: Mapping[int, Tensor]) -> None:
        """What forward reads are the weights of now."""
        terms = [self.model.weights[param_of(cell)].double() * each for cell, each in factors.items()]
        size = sum(float(term.abs().sum()) for term in terms)
        if math.isfinite(size):
            expected = sum(float(term.sum()) for term in terms)
            assert abs(float(loss.detach()) - expected) <= 1e-5 * (1 + size), f"loss {float(loss)}, not {expected}"

    def evaluate(self, seed: int, mask: int) -> bool:
        factors = factors_of(seed, 0, mask)
        if not factors:
            return False
        with torch.no_grad():
            self._compare_loss(self.module(factors), factors)
        return True

    def step(self) -> bool:
        self._average()
        if self.waits or self.lacks_others:
            with pytest.raises(ShardoptError, match=r"no_sync\(\)"):
                self.optimizer.step()
            if not self.waits:  # it is found later, when masters have followed
                self.model.follow(self.bound)
            return True
        if any(0 < len(each.pending_on) < self.world for each in self.model.gradients):  # zeros, on some ranks only
            with pytest.raises(ShardoptError, match="gradients"):
                self.optimizer.step()
            self.model.follow(self.bound)
            return True
        self._step(None)
        return True

    def closure(self, seed: int, masks: tuple[int, int]) -> bool:
        """A step that makes its gradients itself."""
        of_ranks = [factors_of(seed, rank, masks[rank]) for rank in range(self.world)]
        if self._means(of_ranks) is None:
            return False

        def evaluate() -> float:
            self.zero_grad(set_to_none=True)
            self.backward(seed, masks, -1, True)
            self._average()
            return 7.0

        self._step(evaluate)
        return True

    def _step(self, closure: Callable[[], float] | None) -> None:
        self.bound |= self.needed
        is_overflowing = closure is None and self.model.is_overflowing()
        context: AbstractContextManager[Any] = warnings.catch_warnings()
        with pytest.warns(UserWarning, match="skipped this step") if is_overflowing else context:
            returned = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        assert returned == (None if closure is None else 7.0)
        self.bound |= self.needed
        self.model.follow(self.bound)
        if not is_overflowing:
            self.model.step()
            self.model.loaded -= self.bound
            self.updates += 1
        self.model.use_gradients()

    def _average(self) -> None:
        """As a script does that hands no module over."""
        if self.setting.module or self.world == 1:
            return
        for index in self.model.owned:
            grad = self.module.params[index].grad
            if grad is not None:
                dist.all_reduce(grad)
                grad /= self.world

    @property
    def waits(self) -> bool:
        """Whether a reduced gradient waits for the rest of it."""
        return any(each.reduced is not None and each.pending is not None for each in self.model.gradients)

    @property
    def lacks_others(self) -> bool:
        """Whether there is a gradient that no other rank was told of; zeros are their own mean."""
        return self.world > 1 and any(
            each.reduced is None and each.pending is not None and bool(each.pending.any())
            for each in self.model.gradients
        )

    def zero_grad(self, set_to_none: bool) -> bool:
        self.optimizer.zero_grad(set_to_none)
        for gradient in self.model.gradients:
            gradient.zero(set_to_none)
        return True

    def scale(self, factor: float) -> bool:
        """As ``clip_grad_norm_`` and GradScaler do it."""
        if self.waits:
            return False
        for param, gradient in zip(self.module.params, self.model.gradients, strict=True):
            if param.grad is not None:
                param.grad.mul_(factor)
            gradient.scale(factor)
        return True

    # -- params and groups -----------------------------------------------------------------------------------------

    def bind(self) -> bool:
        if self.setting.module:
            self.optimizer.bind()
            self.bound |= self.needed
        return self.setting.module

    def train(self, index: int, trains: bool) -> bool:
        """Freezes a param, or trains it again."""
        if index not in self.model.owned:
            return False
        self.module.params[index].requires_grad_(trains)
        return True

    def add_group(self, rate: float) -> bool:
        late = [index for index in LATE if index not in self.model.owned]
        if not late:
            return False
        param = self.module.params[late[0]].requires_grad_(True)
        self.optimizer.add_param_group({"params": [param], "lr": rate})
        self.model.add_group(late[0], lr=rate)
        return True

    def change(self, group: int, which: int, to: int) -> bool:
        """As a scheduler does."""
        group, names = group % len(self.model.groups), sorted(self.kind.changes)
        name = names[which % len(names)]
        choices = self.kind.changes[name]
        for each in (self.optimizer, self.model.optimizer):
            each.param_groups[group][name] = copy.deepcopy(choices[to % len(choices)])
        return True

    def write(self, index: int, seed: int, how: str) -> bool:
        """Weights, in place. Writes to ``.data`` leave no trace, so that masters have to be told."""
        new = values(seed, index).to(self.model.weights[index].dtype)
        param = self.module.params[index]
        if how == "copy":
            with torch.no_grad():
                param.copy_(new)
        else:
            with self.optimizer.unsharded():
                (param.data if how == "data" else param.detach()).copy_(new)
        self.model.write(index, new)
        if how == "data":
            self.optimizer.refresh_masters()
        self.model.follow(self.bound)  # whatever reads a master compares it with its param
        return True

    def look(self) -> bool:
        """At whole params, and at gradients."""
        with self.optimizer.unsharded():
            Comparison(self).whole_params()
        # At a number of ranks that is no power of two, to look at a gradient rounds it: DEFECTS 7.
        if not self.waits and not self.lacks_others and (self.world == 1 or self.setting.module):
            Comparison(self).gradients()
        return True

    # -- where states rest -----------------------------------------------------------------------------------------

    def offload(self, to: str) -> bool:
        self.optimizer.offload("cpu" if to == "cpu" else self.folder / "away")
        if self.bound:
            self.tier = TIERS[to]
        return True

    def reload(self) -> bool:
        self.optimizer.reload()
        self.tier = None
        return True

    # -- saving and loading ----------------------------------------------------------------------------------------

    def save(self) -> bool:
        path = self.folder / f"checkpoint{len(self.checkpoints)}"
        shardopt.save_checkpoint(path, self.module, self.optimizer)
        self.checkpoints.append((path, self.model.save(), len(self.model.groups)))
        return True

    def load(self, which: int) -> bool:
        """A checkpoint; where there is none, one is saved."""
        fitting = [each for each in self.checkpoints if each[2] == len(self.model.groups)]
        if not fitting:
            return self.save()
        path, saved, _ = fitting[which % len(fitting)]
        with_gradient = {index for index, each in enumerate(saved.gradients) if each.whole is not None}
        if self.setting.module and with_gradient - self.trainable - self.bound:
            return False  # it is refused: a gradient of a param that is frozen by now and bound by nobody
        shardopt.load_checkpoint(path, self.module, self.optimizer)
        self.bound |= self.needed
        self.model.load(saved, restores_gradients=self.setting.module)
        self._drop_masters()
        return True

    def whole_dict(self) -> dict[str, Any]:
        """What rank 0 alone saves, on every rank. It is read at once: behind a step or a load it is refused."""
        box: list[Any] = [None]
        if self.rank == 0:
            file = io.BytesIO()
            torch.save(self.optimizer.state_dict(), file)
            box = [file.getvalue()]
        if self.world > 1:
            dist.broadcast_object_list(box, 0)
        return load_bytes(box[0])

    def consolidate(self) -> bool:
        self.optimizer.consolidate_state_dict(to=self.world - 1)
        return True

    def keep(self) -> bool:
        """A state dict."""
        self.dicts.append((self.whole_dict(), self.model.save(), len(self.model.groups)))
        return True

    def _kept(self, which: int) -> tuple[dict[str, Any], Saved] | None:
        fitting = [each[:2] for each in self.dicts if each[2] == len(self.model.groups)]
        return fitting[which % len(fitting)] if fitting else None

    def put(self, which: int, from_torch: bool) -> bool:
        """A state dict that was kept, of ours or of the torch class; where there is none, one is kept."""
        kept = self._kept(which)
        if kept is None:
            return self.keep()
        mine, saved = kept
        self.optimizer.load_state_dict(saved.states if from_torch else mine)
        states = {} if from_torch else mine["state"]
        indices = [i for number, i in enumerate(self.model.owned) if "master" in states.get(number, {})]
        self.model.load_states(saved.states, {index: saved.masters[index] for index in indices})
        self._drop_masters()
        return True

    def assign(self, which: int, index: int) -> bool:
        """The state of one param, as frameworks do; none is that of before its first step."""
        kept = self._kept(which)
        if kept is None:
            return self.keep()
        if index not in self.model.owned:
            return False
        mine, saved = kept
        number = self.model.owned.index(index)
        state = mine["state"].get(number, {})
        self.optimizer.state[self.module.params[index]] = state
        master = saved.masters[index] if "master" in state else None
        self.model.put_state(index, saved.states["state"].get(number), master)
        self._drop_masters()
        return True

    def forget(self) -> bool:
        """All states."""
        self.optimizer.state = {}
        self.model.optimizer.state.clear()
        self.model.begin_states()
        self._drop_masters()
        return True

    def _drop_masters(self) -> None:
        """A param that is not bound has the master that was loaded with its state, or will have its weight."""
        for index in set(self.model.owned) - self.bound:
            if "master" not in self.optimizer.state[self.module.params[index]]:
                self.model.masters[index].data.copy_(self.model.weights[index])

    def adopt(self) -> bool:
        """The torch class goes on from what ours saved."""
        self.model.adopt(self.whole_dict())
        return True

    # -- another optimizer -----------------------------------------------------------------------------------------

    def reopen(self, stage: int, offload: str | None) -> bool:
        """Closed; another one goes on from its state dict."""
        states = self.whole_dict()
        self.zero_grad(True)
        self.optimizer.close()
        Comparison(self).whole_params()
        self.setting = replace(self.setting, stage=stage if self.setting.module else stage % 2, offload=offload)
        self.optimizer = self._make()
        self.optimizer.load_state_dict(states)
        self.updates = 0
        self._begin_anew()
        return True

    def duplicate(self) -> bool:
        """A copy of module and optimizer goes on; at several ranks it would have parts of another layout."""
        if self.world > 1 or (self.setting.stage == 3 and self.setting.module):
            return False
        before = self.optimizer
        self.module, self.optimizer = copy.deepcopy((self.module, before))
        before.close()
        self._begin_anew()
        return True

    def _begin_anew(self) -> None:
        self.tier = None
        self.bound, self.model.loaded = set(), set(range(len(SHAPES)))
        for gradient in self.model.gradients:
            gradient.zero(True)
        self._drop_masters()


def perform(setting: Setting, acts: Iterable[Act], folder: Path | str) -> int:
    """All of them, compared after each. Returns how many made sense."""
    performance, done = Performance(setting, Path(folder)), 0
    for number, act in enumerate(acts):
        with told(f"act {number}: {act}"):
            done += perform_one(performance, act)
    performance.optimizer.close()
    return done


def perform_one(performance: Performance, act: Act) -> bool:
    name, *arguments = act
    with compared():  # a replayed step is the one that would be planned anew
        if not getattr(performance, name)(*arguments):
            return False
        performance.check()
    return True


@contextmanager
def told(what: str) -> Iterator[None]:
    """An error says where it was."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise

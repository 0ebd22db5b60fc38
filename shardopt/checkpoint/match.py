"""Matches a checkpoint with a model by name: what belongs where, and all that does not fit. Reads no element."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..rules.choice import name_in
from ..rules.rule import EMA
from . import values
from .claims import ADVICE
from .names import plain_name
from .typed_json import Names  # noqa: TC001 (fields of records are read at run time)

if TYPE_CHECKING:
    from ..domain.hyperparameters import Group
    from ..engine import Engine
    from ..rules import Rule
    from .model import Model
    from .model_param import ModelParam
    from .records import ExpertIndex, Manifest
    from .typed_json import Encoded

_LISTED = 8  # mismatches that an error names
# Dtype -> those that hold all of its values.
_WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
# Rule -> another rule with the same states, from which it can continue: clipping changes the update alone.
_STATES_OF = {"stable_adamw": "adam"}
_DECOUPLED = "decoupled_weight_decay"  # distinguishes AdamW from Adam, which share a rule: only AdamW clips


@dataclass(frozen=True)
class Taken:
    """The names that one rank takes of a checkpoint; ``groups``: by optimizer and group, those of their params."""

    params: Names
    groups: tuple[tuple[Names, ...], ...]
    buffers: Names
    modules: Names


class ModelMatch:
    """What fits between a checkpoint and a model. Changes nothing.

    Attributes:
        params: name of a param in the model -> its name in the checkpoint.
        states: likewise, for params whose optimizer states fit too.
        buffers: names of buffers that fit.
        modules: name of a module with an extra state in the checkpoint -> its name in the model.
        groups: (optimizer, group) -> the values of the checkpoint's group.
        mismatches: in words, what does not fit and is not loaded.
    """

    def __init__(self, manifest: Manifest, model: Model):
        """Matches what this rank has. :meth:`compare` follows, which needs :meth:`summary` of all ranks."""
        self.params: dict[str, str] = {}
        self.states: dict[str, str] = {}
        self.buffers: list[str] = []
        self.modules: dict[str, str] = {}
        self.groups: dict[tuple[int, int], Encoded] = {}
        self.mismatches: list[str] = []
        self._manifest, self._model, self._kinds = manifest, model, manifest.kinds
        self._canonical = {alias: name for name, about in manifest.params.items() for alias in (name, *about.aliases)}
        self._flags = dict(self._find_flags())  # amsgrad, momentum, ...: they decide which states a rule keeps
        self._group_of = model.groups_by_param()
        self._taken: dict[str, str] = {}
        for name, member in model.params.items():
            saved = next(iter(self._names_of(member)), None)
            if saved is None:
                self._note(f"param {name!r} {list(member.box.shape)} is missing in the checkpoint{self._guess(member)}")
            elif saved in self._taken:
                both = f"params {self._taken[saved]!r} and {name!r}"
                self._note(f"{both} are two here and one tied param in the checkpoint")
            else:
                self._taken[saved] = name
                self._param(member, saved)
        self._check_ties()
        self._modules = self._extra_states()

    def summary(self) -> Taken:
        """Returns the names that this rank takes, unless another rank with the same params returns them."""
        model, is_first = self._model, self._model.data_ranks.rank == 0
        saved_as = {name: saved for saved, name in self._taken.items() if model.params[name].holders.rank == 0}
        groups = tuple(
            tuple(tuple(saved_as[name] for name in names if name in saved_as) for names in model.names_in(engine))
            for engine in model.engines
        )
        buffers, modules = (model.buffers, self._modules) if is_first else ((), ())
        return Taken(tuple(saved_as.values()), groups, tuple(buffers), tuple(modules))

    def compare(self, summaries: Sequence[Taken]) -> None:
        """Compares the whole checkpoint with what all ranks take of it."""
        taken = {saved for each in summaries for saved in each.params}
        for saved, kinds in self._kinds.items():
            if saved not in taken:
                shape, turn = list(kinds["param"].shape), self._manifest.params[saved].turn
                self._note(f"the checkpoint's param {saved!r} {shape} is not in the model{_of_experts(turn)}")
        self._buffers({name for each in summaries for name in each.buffers})
        modules = {name for each in summaries for name in each.modules}
        for name in self._manifest.info.module_extra:
            if plain_name(name) not in modules:
                self._note(f"the checkpoint's extra state of module {name!r} has no module here that can load it")
        if self._model.engines:
            self._groups([each.groups for each in summaries])

    def describe(self) -> str:
        more = len(self.mismatches) - _LISTED
        return "; ".join(self.mismatches[:_LISTED]) + (f"; and {more} more" if more > 0 else "")

    def _names_of(self, member: ModelParam) -> list[str]:
        """Returns the checkpoint's names of a param, by its names and aliases here."""
        of_now = [self._canonical[each] for each in (member.name, *member.aliases) if each in self._canonical]
        return of_now or [self._canonical[each] for each in member.older if each in self._canonical]

    def _find_flags(self) -> Iterator[tuple[str, Group]]:
        for optimizer in self._manifest.optimizers:
            for group in optimizer.groups:
                decoded = values.decode_dict(group.values, lambda _: torch.ones(()))
                for name in group.params:
                    yield name, decoded

    def _note(self, mismatch: str) -> None:
        self.mismatches.append(mismatch)

    def _guess(self, member: ModelParam) -> str:
        """Returns in words why a param may be missing."""
        alike = [
            name
            for name, kinds in self._kinds.items()
            if name not in self._model.params and kinds["param"].shape == member.box.shape
        ]
        if member.expert_index is not None:
            return f" (ranks use its name for {member.expert_index.total} experts: {ADVICE})"
        return f" (renamed from {alike[0]!r}?)" if len(alike) == 1 else ""

    def _check_ties(self) -> None:
        for name, member in self._model.params.items():
            for saved in sorted(set(self._names_of(member)) - self._taken.keys()):
                self._note(f"param {name!r} is tied to {saved!r} here and not in the checkpoint")

    # -- params and their states -----------------------------------------------------------------------------------

    def _param(self, member: ModelParam, saved: str) -> None:
        tensor, shape = self._kinds[saved]["param"], member.box.shape
        place = self._manifest.params[saved].place  # of a checkpoint of one part of a model
        if place is not None and place != member.place:
            self._note(f"param {member.name!r} is {member.place or 'a plain tensor'}, in the checkpoint {place}")
            return
        if place is not None:
            shape = tuple(member.param.shape)
        if tensor.shape != shape:
            self._note(f"param {member.name!r} has shape {list(shape)}, in the checkpoint {list(tensor.shape)}")
        elif not self._param_holds(member, tensor.dtype):
            self._note(f"param {member.name!r} is of {member.dtype}, in the checkpoint of {tensor.dtype}")
        else:
            self.params[member.name] = saved
            if self._model.engines and self._states_fit(member, saved, shape):
                self.states[member.name] = saved

    def _states_fit(self, member: ModelParam, saved: str, shape: tuple[int, ...]) -> bool:
        about, name = self._manifest.params[saved], member.name
        if about.optimizer is None or member.optimizer is None:
            if about.optimizer != member.optimizer:
                where = "in the checkpoint" if about.optimizer is None else "here"
                self._note(f"param {name!r} is in no optimizer {where}")
            return False
        rule = self._model.engines[member.optimizer].rule
        return self._rule_fits(member, saved, rule) and self._state_tensors_fit(member, saved, shape, rule)

    def _rule_fits(self, member: ModelParam, saved: str, rule: Rule) -> bool:
        """True if the rule here continues from states of the rule that was saved."""
        about = self._manifest.params[saved]
        assert about.optimizer is not None
        theirs, ours = self._manifest.optimizers[about.optimizer].rule, rule.name
        saved_flags, own = self._flags[saved], self._group_of[member.param]
        if theirs == ours:  # of an optimizer whose param groups choose among several rules
            theirs, ours = name_in(rule, saved_flags), name_in(rule, own)
        fits = theirs == ours or (
            _STATES_OF.get(theirs, theirs) == _STATES_OF.get(ours, ours)
            and saved_flags.get(_DECOUPLED) == own.get(_DECOUPLED)
        )
        if not fits:
            self._note(f"the states of {member.name!r} are those of {theirs!r}, here it is updated by {ours!r}")
        return fits

    def _state_tensors_fit(self, member: ModelParam, saved: str, shape: tuple[int, ...], rule: Rule) -> bool:
        """True if the states that were saved are those that the rule needs."""
        about, name = self._manifest.params[saved], member.name
        kinds = [kind for kind in self._kinds[saved] if kind not in ("param", "master")]
        missing = [flag for flag in rule.flags if flag not in self._flags[saved]]
        if missing:
            self._note(f"the group of {name!r} says nothing of {missing}, by which {rule.name!r} knows its states")
            return False
        variant = rule.variant(self._flags[saved], shape)
        needed = (*variant.margins, *variant.states) if about.has_state else ()
        shapes = {kind: rule.state_shape(kind, shape) if kind in variant.margins else shape for kind in kinds}
        wrong = [kind for kind in kinds if self._kinds[saved][kind].shape != shapes[kind]]
        carried = set(rule.carried) if about.has_state else set()
        lacking = carried - about.carried.keys() or about.carried.keys() - set(rule.carried)
        differ = set(kinds) ^ set(needed)
        if EMA not in kinds:  # an average that was not saved begins with the weights
            differ.discard(EMA)
        if differ or wrong or lacking:
            carries = f" and {list(rule.carried)}" if rule.carried else ""
            average = f" (an {EMA!r} is kept by optimizers that are given ema=)" if EMA in differ else ""
            self._note(f"{name!r} needs the states {list(needed)}{carries}, found {kinds}{average}")
            return differ == {EMA} and not wrong and not lacking  # all but the average can be loaded
        return True

    # -- buffers and groups ----------------------------------------------------------------------------------------

    def _buffers(self, taken: Collection[str]) -> None:
        theirs = {key.name: tensor for key, tensor in self._manifest.of("buffers")}
        for name, buffer in self._model.buffers.items():
            saved = theirs.get(name)
            if saved is None:
                self._note(f"buffer {name!r} is missing in the checkpoint")
            elif saved.shape != tuple(buffer.shape) or not self._holds(buffer.dtype, saved.dtype):
                there = f"{list(saved.shape)} of {saved.dtype}"
                self._note(f"buffer {name!r} is {list(buffer.shape)} of {buffer.dtype}, in the checkpoint {there}")
            elif any(stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
                # torch refuses to write to such a tensor, and would do so when half of the model is loaded.
                self._note(f"buffer {name!r} was expanded, so its elements share memory: register its clone()")
            else:
                self.buffers.append(name)
        for name in theirs:
            if name not in taken:
                self._note(f"the checkpoint's buffer {name!r} is not in the model")

    def _holds(self, own: torch.dtype, saved: torch.dtype) -> bool:
        """True if it keeps the saved values of a buffer or frozen param, but for what binding casts, here or there."""
        if own is saved or not (own.is_floating_point and saved.is_floating_point):
            return own is saved
        casts = {torch.float32, *(engine.options.compute_dtype for engine in self._model.engines)}
        return own in _WIDER.get(saved, ()) or {own, saved} <= casts

    def _param_holds(self, member: ModelParam, saved: torch.dtype) -> bool:
        is_frozen = bool(self._model.engines) and (member.optimizer is None or not member.param.requires_grad)
        return member.dtype is saved or (is_frozen and self._holds(member.dtype, saved))

    def _extra_states(self) -> list[str]:
        """Finds this rank's modules that take an extra state. Returns the names of all of them."""
        able = {
            self._model.name_of(name): name
            for name, each in self._model.module.named_modules()
            if type(each).set_extra_state is not nn.Module.set_extra_state
        }
        for name in self._manifest.info.module_extra:
            if plain_name(name) in able:
                self.modules[name] = able[plain_name(name)]
        return list(able)

    def _groups(self, names_of_ranks: Sequence[Sequence[Sequence[Names]]]) -> None:
        saved = self._manifest.optimizers
        if len(saved) != len(self._model.engines):
            self._note(f"{len(self._model.engines)} optimizers were given, the checkpoint holds {len(saved)}")
        for number, (theirs, engine) in enumerate(zip(saved, self._model.engines, strict=False)):
            count = len(engine.groups)
            if count != len(theirs.groups):
                self._note(f"optimizer {number} has {count} param groups, in the checkpoint {len(theirs.groups)}")
            for index, group in enumerate(theirs.groups[:count]):
                names = {name for each in names_of_ranks for name in each[number][index]}
                if set(group.params) != names or not self._has_all(engine, index):
                    self._note(f"group {index} of optimizer {number} holds other params in the checkpoint")
                else:
                    self._group(engine, number, index, group.values)

    def _group(self, engine: Engine, number: int, index: int, saved: Encoded) -> None:
        """Takes a group's values, without those that would choose another rule than the optimizer has."""
        where, own = f"group {index} of optimizer {number}", engine.groups[index]
        theirs, ours = name_in(engine.rule, saved), name_in(engine.rule, own)
        if theirs != ours:
            self._note(f"{where} takes the rule {theirs!r} in the checkpoint, here {ours!r}")
            return
        unread = [key for key in engine.unread if saved.get(key) is not None]
        for key in unread:
            self._note(f"{where} has {key}={saved[key]!r} in the checkpoint, and here the optimizer was given none")
        taken = {key: value for key, value in saved.items() if key not in unread}
        self.groups[number, index] = {**taken, **engine.fixed}

    def _has_all(self, engine: Engine, index: int) -> bool:
        """True if all params of a group here were found in the checkpoint."""
        found = set(self._taken.values())
        return all(name in found for name in self._model.names_in(engine)[index])


def _of_experts(turn: ExpertIndex | None) -> str:
    if turn is None:
        return ""
    return (
        f" (it is one of {turn.total} experts that were saved under one name: load it where as many ranks hold others, "
        "and save it there with names=)"
    )

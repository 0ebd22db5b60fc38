"""Compares a checkpoint with a model, by name: what belongs where, and all that does not fit. Reads no element.

And checks that the next step can be computed from the checkpoint's hyper-parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..domain.hyperparameters import check_numbers, plain_numbers
from ..engine import Engine
from ..errors import CheckpointError
from ..rules.rule import EMA
from . import values
from .model import Model, ModelParam, plain_name
from .records import Key, Manifest

_LISTED = 8  # mismatches that an error names


class Fit:
    """What fits and what does not. Changes nothing.

    Attributes:
        params: name of a param in the model -> its name in the checkpoint.
        states: likewise, where its optimizer's states fit too.
        buffers: names.
        modules: name of a module with an extra state in the checkpoint -> its name in the model.
        groups: (optimizer, group) -> that of the checkpoint.
        mismatches: what was left out, in words.
    """

    def __init__(self, manifest: Manifest, model: Model):
        self.params: dict[str, str] = {}
        self.states: dict[str, str] = {}
        self.buffers: list[str] = []
        self.modules: dict[str, str] = {}
        self.groups: dict[tuple[int, int], Mapping[str, Any]] = {}
        self.mismatches: list[str] = []
        self._manifest, self._model, self._kinds = manifest, model, manifest.kinds
        self._canonical = {
            alias: name for name, about in manifest.params.items() for alias in (name, *about["aliases"])
        }
        self._flags = dict(self._find_flags())  # which states a rule keeps depends on them (amsgrad, momentum)
        taken: dict[str, str] = {}
        for name, member in model.params.items():
            saved = next(iter(self._names_of(member)), None)
            if saved is None:
                self._note(f"param {name!r} {_shape(member.param)} is missing in the checkpoint{self._renamed(member)}")
            elif saved in taken:
                self._note(f"params {taken[saved]!r} and {name!r} are two here and one tied param in the checkpoint")
            else:
                taken[saved] = name
                self._param(member, saved)
        for saved, kinds in self._kinds.items():
            if saved not in taken and not self._is_others(saved):
                self._note(f"the checkpoint's param {saved!r} {list(kinds['param'].shape)} is not in the model")
        self._check_ties(taken)
        self._buffers()
        self._extra_states()
        if model.engines:
            self._groups(taken)

    def describe(self) -> str:
        more = len(self.mismatches) - _LISTED
        return "; ".join(self.mismatches[:_LISTED]) + (f"; and {more} more" if more > 0 else "")

    def _names_of(self, member: ModelParam) -> list[str]:
        """Returns the names in the checkpoint that a param's names here stand for."""
        return [self._canonical[each] for each in (member.name, *member.aliases) if each in self._canonical]

    def _find_flags(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for optimizer in self._manifest.optimizers:
            for group in optimizer["groups"]:
                decoded = values.decode(group["values"], lambda _: torch.ones(()))
                for name in group["params"]:
                    yield name, decoded

    def _is_others(self, saved: str) -> bool:
        """True if other ranks hold the param: those of another process group, of as many as there are here."""
        turn = self._manifest.params[saved].get("turn")
        own = {tuple(member.expert_group) for member in self._model.params.values() if member.expert_group is not None}
        return turn is not None and tuple(turn) not in own and turn[1] in {total for _, total in own}

    def _note(self, mismatch: str) -> None:
        self.mismatches.append(mismatch)

    def _renamed(self, member: ModelParam) -> str:
        alike = [
            name
            for name, kinds in self._kinds.items()
            if name not in self._model.params and kinds["param"].shape == tuple(member.param.shape)
        ]
        return f" (renamed from {alike[0]!r}?)" if len(alike) == 1 else ""

    def _check_ties(self, taken: Mapping[str, str]) -> None:
        for name, member in self._model.params.items():
            for saved in sorted(set(self._names_of(member)) - taken.keys()):
                self._note(f"param {name!r} is tied to {saved!r} here and not in the checkpoint")

    # -- params and their states -----------------------------------------------------------------------------------

    def _param(self, member: ModelParam, saved: str) -> None:
        tensor = self._kinds[saved]["param"]
        if self._manifest.params[saved].get("place") != (None if member.place is None else str(member.place)):
            theirs = self._manifest.params[saved].get("place", "a plain tensor")
            self._note(f"param {member.name!r} is {member.place or 'a plain tensor'}, in the checkpoint {theirs}")
        elif tensor.shape != tuple(member.param.shape):
            self._note(
                f"param {member.name!r} has shape {_shape(member.param)}, in the checkpoint {list(tensor.shape)}"
            )
        elif tensor.dtype is not member.param.dtype:
            self._note(f"param {member.name!r} is of {member.param.dtype}, in the checkpoint of {tensor.dtype}")
        else:
            self.params[member.name] = saved
            if self._model.engines and self._states_fit(member, saved):
                self.states[member.name] = saved

    def _states_fit(self, member: ModelParam, saved: str) -> bool:
        about, name = self._manifest.params[saved], member.name
        if about["optimizer"] is None or member.optimizer is None:
            if about["optimizer"] != member.optimizer:
                where = "in the checkpoint" if about["optimizer"] is None else "here"
                self._note(f"param {name!r} is in no optimizer {where}")
            return False
        rule = self._model.engines[member.optimizer].rule
        theirs = self._manifest.optimizers[about["optimizer"]]["rule"]
        if theirs != rule.name:
            self._note(f"the states of {name!r} are those of {theirs!r}, here it is updated by {rule.name!r}")
            return False
        kinds = [kind for kind in self._kinds[saved] if kind not in ("param", "master")]
        missing = [flag for flag in rule.flags if flag not in self._flags[saved]]
        if missing:
            self._note(f"the group of {name!r} says nothing of {missing}, by which {rule.name!r} knows its states")
            return False
        needed = rule.variant(self._flags[saved]).states if about["has_state"] else ()
        wrong = [kind for kind in self._kinds[saved] if self._kinds[saved][kind].shape != tuple(member.param.shape)]
        carried = set(rule.carried) if about["has_state"] else set()
        lacking = carried - about["carried"].keys() or about["carried"].keys() - set(rule.carried)
        differ = set(kinds) ^ set(needed)
        if EMA not in kinds:  # which begins with the weights
            differ.discard(EMA)
        if differ or wrong or lacking:
            carries = f" and {list(rule.carried)}" if rule.carried else ""
            average = f" (an {EMA!r} is kept by optimizers that are given ema=)" if EMA in differ else ""
            self._note(f"{name!r} needs the states {list(needed)}{carries}, found {kinds}{average}")
            return differ == {EMA} and not wrong and not lacking  # the rest is what it was
        return True

    # -- buffers and groups ----------------------------------------------------------------------------------------

    def _buffers(self) -> None:
        theirs = {key.name: tensor for key, tensor in self._manifest.of("buffers")}
        for name, buffer in self._model.buffers.items():
            saved = theirs.get(name)
            if saved is None:
                self._note(f"buffer {name!r} is missing in the checkpoint")
            elif saved.shape != tuple(buffer.shape) or saved.dtype is not buffer.dtype:
                there = f"{list(saved.shape)} of {saved.dtype}"
                self._note(f"buffer {name!r} is {_shape(buffer)} of {buffer.dtype}, in the checkpoint {there}")
            else:
                self.buffers.append(name)
        for name in theirs:
            if name not in self._model.buffers:
                self._note(f"the checkpoint's buffer {name!r} is not in the model")

    def _extra_states(self) -> None:
        able = {
            plain_name(name): name
            for name, each in self._model.module.named_modules()
            if type(each).set_extra_state is not nn.Module.set_extra_state
        }
        for name in self._manifest.info["module_extra"]:
            if plain_name(name) in able:
                self.modules[name] = able[plain_name(name)]
            else:
                self._note(f"the checkpoint's extra state of module {name!r} has no module here that takes one")

    def _groups(self, taken: Mapping[str, str]) -> None:
        saved = self._manifest.optimizers
        if len(saved) != len(self._model.engines):
            self._note(f"{len(self._model.engines)} optimizers were given, the checkpoint holds {len(saved)}")
        for number, (theirs, engine) in enumerate(zip(saved, self._model.engines, strict=False)):
            own = self._model.names_in(engine)
            if len(own) != len(theirs["groups"]):
                self._note(f"optimizer {number} has {len(own)} param groups, in the checkpoint {len(theirs['groups'])}")
            for index, (names, group) in enumerate(zip(own, theirs["groups"], strict=False)):
                if {taken.get(name) for name in group["params"] if not self._is_others(name)} == set(names):
                    self.groups[number, index] = group["values"]
                else:
                    self._note(f"group {index} of optimizer {number} holds other params in the checkpoint")


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


# -- hyper-parameters --------------------------------------------------------------------------------------------------


def check_groups(manifest: Manifest, fitting: Fit, engines: Sequence[Engine]) -> None:
    """Evaluates every group's scalars once, as the next step will. Changes nothing.

    Raises:
        CheckpointError: they cannot be computed, with what the checkpoint holds.
    """
    for (number, index), saved in fitting.groups.items():
        engine = engines[number]
        names = manifest.optimizers[number]["groups"][index]["params"]
        try:
            # Tensors are learning rates and the like: any number will do.
            decoded = values.decode(saved, lambda name: _stand_in(manifest, name))
            plain = plain_numbers({**engine.groups[index], **decoded})
            check_numbers([plain], engine.defaults)
            _check_arguments(decoded, engine)
            variant = engine.rule.variant(plain)
            for step, carried in _counts(manifest, names):
                engine.rule.evaluate(variant, plain, step + 1, carried)
        except Exception as error:
            raise CheckpointError(
                f"load another checkpoint: group {index} of optimizer {number} holds hyper-parameters that no step can "
                f"be computed from ({type(error).__name__}: {error}): {_told(saved)}. Nothing was loaded."
            ) from error


def _check_arguments(given: Mapping[str, Any], engine: Engine) -> None:
    """Checks hyper-parameters as the optimizer's class checks those of a param group."""
    if engine.check_arguments is not None:
        engine.check_arguments(given)
    refused = [key for key in ("capturable", "differentiable") if given.get(key)]
    if refused:
        raise ValueError(f"{refused[0]} is refused here")


def _counts(manifest: Manifest, names: Sequence[str]) -> list[tuple[int, dict[str, float]]]:
    """Returns the different step counts and carried scalars of these params."""
    found: dict[tuple[Any, ...], tuple[int, dict[str, float]]] = {(0,): (0, {})}
    for name in names:
        about = manifest.params[name]
        if about["has_state"]:
            carried = manifest.carried(name)
            found[about["step"], *carried.items()] = about["step"], carried
    return list(found.values())


def _stand_in(manifest: Manifest, name: str) -> torch.Tensor:
    return torch.ones(()).expand(manifest.tensors[Key("extra", name, "value")].shape)


def _told(saved: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r:.40}" for key, value in saved.items() if value is not None)[:300]

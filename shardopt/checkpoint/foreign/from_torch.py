"""Reads a ``torch.optim`` state dict and a model state dict, from one or two files or nested in one dict."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, TypeGuard

import torch

from ...errors import CheckpointError
from .name_by_order import name_by_order
from .source import Foreign, ForeignParam, Hyper, LazyTensor, State, picked
from .unpickle import read_file

KeyPath = tuple[object, ...]  # the keys that lead to something in nested dicts
# Names of buffers in the state dicts of torch's own layers.
_BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")
_USUAL = ("model", "module", "state_dict", "model_state_dict", "")


def read_torch(sources: Sequence[Path], hints: "Hints") -> Foreign:
    """
    Raises:
        CheckpointError: the role of a tensor is not clear.
    """
    nested = {str(number): _read(path) for number, path in enumerate(sources)}
    return from_nested(nested, f"torch: {', '.join(path.name for path in sources)}", hints)


def _read(path: Path) -> object:
    return _safetensors(path) if path.suffix == ".safetensors" else _lazy(read_file(path))


def _safetensors(path: Path) -> dict[str, LazyTensor]:
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            described = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            tensors = {name: file.get_tensor(name) for name in described}  # views of the mapped file
    except Exception as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}. Nothing was imported.") from error
    return {name: LazyTensor.of(tensor) for name, tensor in tensors.items()}


def _lazy(value: object) -> object:
    """Returns the same containers with a LazyTensor in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return LazyTensor.of(value)
    if isinstance(value, Mapping):
        return {key: _lazy(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(_lazy(item) for item in value)
    return value


class Hints(NamedTuple):
    """What the user adds to files that lack it: names and patterns of tensors."""

    names: Sequence[str] | None = None  # of the optimizer's params, in its order
    frozen: Sequence[str] = ()
    buffers: Sequence[str] = ()
    drop: Sequence[str] = ()


@dataclass(frozen=True)
class TorchStates:
    """A state dict of ``torch.optim``; ``state``: by number or name of a param."""

    param_groups: Sequence[Hyper]
    state: Mapping[object, State] = field(default_factory=dict)


def from_nested(nested: object, origin: str, hints: Hints) -> Foreign:
    """Finds the state dicts of optimizer and model in nested dicts of LazyTensors."""
    optimizers = dict(_optimizers(nested, ()))
    if len(optimizers) != 1:
        found = [".".join(map(str, path)) for path in optimizers]
        raise CheckpointError(
            "give one file with 'state' and 'param_groups' beside that of the model (split a file of several): "
            f"{origin} has {len(optimizers)} optimizer state dicts {found}. Nothing was written."
        )
    weights = {name: tensor for name, tensor in _model(nested, origin).items() if not _matches(str(name), hints.drop)}
    (saved,) = optimizers.values()
    weights, aliases = _untied(weights)
    groups, owned = _groups(saved, weights, aliases, hints)
    params = {
        name: ForeignParam(weights[name], aliases.get(name, ()), saved.state.get(key, {}))
        for name, key in owned.items()
    }
    buffers: dict[str, LazyTensor] = {}
    unclear = []
    for name, tensor in weights.items():
        if name in owned:
            continue
        if _matches(name, hints.frozen):
            params[name] = ForeignParam(tensor, aliases.get(name, ()))
        elif _matches(name, (*hints.buffers, *_BUFFERS)) or not tensor.dtype.is_floating_point:
            buffers[name] = tensor
        else:
            unclear.append(name)
    if unclear:
        raise CheckpointError(
            "give names or patterns ('encoder.*') with --frozen, --buffers or --drop (second names of tied params): "
            f"{origin} has no optimizer state for {unclear[:6]}{' and more' if len(unclear) > 6 else ''}, and does not "
            "say whether these are params or buffers. Nothing was written."
        )
    return Foreign(origin, params, buffers, groups)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_optimizer(value: object) -> TypeGuard[Hyper]:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("param_groups"), list)
        and "params" in str([list(group) for group in value["param_groups"] if isinstance(group, Mapping)])
    )


def _optimizers(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, TorchStates]]:
    if _is_optimizer(value):
        yield path, picked(TorchStates, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _optimizers(item, (*path, key))


def _model(nested: object, origin: str) -> dict[str, LazyTensor]:
    """Returns the dict whose values are tensors; of several such dicts, the one with a usual name."""
    found = dict(_holders(nested, ()))
    named = {path: each for path, each in found.items() if str(path[-1] if path else "") in _USUAL}
    chosen = found if len(found) == 1 else named
    if len(chosen) != 1:
        raise CheckpointError(
            f"give the model's state dict in a file of its own: {origin} has {len(found)} dicts of tensors, at "
            f"{['.'.join(map(str, path)) for path in found]}. Nothing was written."
        )
    (model,) = chosen.values()
    return model


def _holders(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, dict[str, LazyTensor]]]:
    if not isinstance(value, Mapping) or _is_optimizer(value):
        return
    tensors = {str(key): item for key, item in value.items() if isinstance(item, LazyTensor)}
    if tensors:
        yield path, tensors
    for key, item in value.items():
        yield from _holders(item, (*path, key))


def _untied(weights: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], dict[str, tuple[str, ...]]]:
    """Returns each tensor by its first name, and the other names by that name."""
    first: dict[object, str] = {}
    kept: dict[str, LazyTensor] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, tensor in weights.items():
        owner = name if tensor.place is None else first.setdefault(tensor.place, name)
        if owner == name:
            kept[name] = tensor
        else:
            aliases[owner] = (*aliases.get(owner, ()), name)
    return kept, aliases


def _groups(
    states: TorchStates, weights: Mapping[str, LazyTensor], aliases: Mapping[str, tuple[str, ...]], hints: Hints
) -> tuple[list[tuple[tuple[str, ...], Hyper]], dict[str, object]]:
    """Returns the groups by name; and for each name its key in the dict of states."""
    saved = states.param_groups
    keys = [list(group["params"]) for group in saved]
    canonical = {alias: name for name, its in aliases.items() for alias in (name, *its)}
    canonical |= {name: name for name in weights if name not in canonical}
    if hints.names is not None:
        names = _dealt(hints.names, keys)
    elif all(isinstance(key, str) for group in keys for key in group):
        names = keys  # FSDP2 and DCP
    elif all(len(group.get("param_names", ())) == len(group["params"]) for group in saved):
        names = [list(group["param_names"]) for group in saved]
    else:
        candidates = {
            name: tensor.shape
            for name, tensor in weights.items()
            if tensor.dtype.is_floating_point and not _matches(name, (*hints.buffers, *hints.frozen, *_BUFFERS))
        }
        names = name_by_order([[_shape(states.state.get(key, {})) for key in group] for group in keys], candidates)
    unknown = [name for group in names for name in group if name not in canonical]
    if unknown:
        raise CheckpointError(
            "give the model that was saved with the optimizer, or --names FILE with the model's names of the params "
            f"(without a wrapper's 'module.'): {unknown[:4]} are not in the model's state dict, which begins with "
            f"{list(weights)[:4]}. Nothing was written."
        )
    owned: dict[str, object] = {}
    groups: list[tuple[tuple[str, ...], Hyper]] = []
    for group, its_names, its_keys in zip(saved, names, keys, strict=True):
        found = tuple(canonical[name] for name in its_names)
        owned.update(zip(found, its_keys, strict=True))
        groups.append((found, {k: v for k, v in group.items() if k not in ("params", "param_names")}))
    if len(owned) != sum(map(len, keys)):
        raise CheckpointError("give each param of the optimizer a name of its own: two have one. Nothing was written.")
    return groups, owned


def _dealt(names: Sequence[str], keys: Sequence[Sequence[object]]) -> list[list[str]]:
    wanted = sum(map(len, keys))
    if len(names) != wanted:
        raise CheckpointError(
            f"give a name for each of {wanted} params: found {len(names)} names. Nothing was written."
        )
    rest = iter(names)
    return [[next(rest) for _ in group] for group in keys]


def _shape(state: State) -> tuple[int, ...] | None:
    """Returns the shape of the param: of its states, or as rows and columns broadcast; None if it has none of these."""
    shapes = {value.shape for key, value in state.items() if isinstance(value, LazyTensor) and key != "step"}
    try:
        return tuple(torch.broadcast_shapes(*shapes)) if shapes else None
    except RuntimeError:
        return None

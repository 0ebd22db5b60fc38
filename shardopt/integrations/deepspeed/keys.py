"""Reads a DeepSpeed config: takes its keys, checks the kind of each value, collects warnings and errors."""

import json
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import ShardoptError

AUTO = "auto"
Kind = Callable[[Any], Any]  # returns the checked value, or raises a TypeError that says what belongs there


# -- kinds of values ---------------------------------------------------------------------------------------------------


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def number(value: Any) -> float:
    """Returns a number; whole numbers stay ints."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
        raise TypeError("a number, without quotes,")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def count(value: Any) -> int:
    """Returns a whole number from 0 on; JSON's ``5e8`` is one too."""
    belongs = "a whole number, 0 or above, without quotes,"
    try:
        found = number(value)
    except TypeError:
        raise TypeError(belongs) from None
    if found < 0 or found != int(found):
        raise TypeError(belongs)
    return int(found)


def pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise TypeError("a list of two numbers")
    return number(value[0]), number(value[1])


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text")
    return value


def anything(value: Any) -> Any:
    return value


def _section(value: Any) -> Any:
    raise TypeError("an object {...}")


# -- the config --------------------------------------------------------------------------------------------------------


class Keys:
    """The config's leaves by dotted path. Each is taken once; leaves that nobody takes are errors. A null is missing.

    Attributes:
        warnings: keys without an effect, in words.
        errors: keys that would change results, in words.
        unfilled: paths that need a value in place of ``"auto"``.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | Path,
        auto: Mapping[str, Any],
        sections: Collection[str] = (),
        renamed: Mapping[str, str] | None = None,
    ):
        """
        Args:
            auto: values for ``"auto"``, by dotted path.
            sections: paths that must hold an object.
            renamed: old name of a path -> its present name.
        """
        self.source, whole = _read(config)
        leaves = {path: value for path, value in _leaves(whole, "") if value is not None}
        self.warnings: list[str] = []
        self.errors: list[str] = []
        self.unfilled: list[str] = []
        unknown = [path for path in auto if leaves.get(path) != AUTO]
        if unknown:
            raise ShardoptError(f"remove {unknown} from auto=: {self.source} does not set these to 'auto'.")
        for path, value in auto.items():
            del leaves[path]
            leaves.update(_leaves({path: value}, ""))
        self._written: dict[str, str] = {}  # path that is taken -> as the config spells it
        self._left: dict[str, Any] = {}
        for path, value in leaves.items():
            known = _renamed(path, renamed or {})
            if known in self._left:
                self.errors.append(f"{path} and {self._written[known]} are two names of one key: remove one")
            self._left[known], self._written[known] = value, path
        for section in sections:
            self.take(section, _section)

    def _name(self, path: str) -> str:
        return self._written.get(path, path)

    def take(self, path: str, kind: Kind, default: Any = None) -> Any:
        """Takes the value at ``path``; ``default`` if it is missing, left to "auto" or of another kind."""
        if path not in self._left:
            return default
        value = self._left.pop(path)
        if isinstance(value, str) and value == AUTO:
            self.unfilled.append(self._name(path))
            return default
        try:
            return kind(value)
        except TypeError as error:
            self.errors.append(f"{self._name(path)}={_json(value)}: {error} belongs there")
            return default

    def names_in(self, section: str) -> list[str]:
        """Returns the keys under ``section.``, without that prefix."""
        return [path.removeprefix(f"{section}.") for path in self._left if path.startswith(f"{section}.")]

    def take_all(self, section: str, kind_of: Callable[[str], Kind] = lambda name: anything) -> dict[str, Any]:
        """Takes everything under ``section.``; the keys are without that prefix."""
        missing = object()
        found = {name: self.take(f"{section}.{name}", kind_of(name), missing) for name in self.names_in(section)}
        return {name: value for name, value in found.items() if value is not missing}

    def has(self, path: str) -> bool:
        """True if the key, or a key under it, is left."""
        return path in self._left or bool(self.names_in(path))

    def is_auto(self, path: str) -> bool:
        value = self._left.get(path)
        return isinstance(value, str) and value == AUTO

    def refuse(self, path: str, value: Any, why: str) -> None:
        """Adds an error that names the key."""
        self.errors.append(f"{self._name(path)}={_json(value)}: {why}")

    def warn(self, path: str, why: str, value: Any = None) -> None:
        """Adds to the one warning."""
        self.warnings.append(f"{self._name(path)}{'' if value is None else f'={_json(value)}'} ({why})")

    def expect(self, path: str, value: Any, otherwise: str, kind: Kind = flag) -> None:
        """Adds an error that ends with ``otherwise`` unless the key is missing, left to "auto", or has this value."""
        if self.is_auto(path):
            self._left.pop(path)
        found = self.take(path, kind, value)
        if found != value:
            self.refuse(path, found, otherwise)

    def drop(self, path: str) -> list[tuple[str, Any]]:
        """Takes the key and all keys under it, of any kind; returns (path as written, value) of each."""
        paths = [each for each in self._left if each == path or each.startswith(f"{path}.")]
        return [(self._name(each), self._left.pop(each)) for each in paths]

    def finish(self) -> None:
        """Makes an error of each key that is left, then raises all errors together."""
        self.errors += [f"{self._name(path)}={_json(value)}: not known here" for path, value in self._left.items()]
        parts = []
        if self.errors:
            parts.append(
                f"remove or change keys of {self.source}, without which the results would differ: "
                f"{'; '.join(self.errors)}."
            )
        if self.unfilled:
            dots = ", ".join(f"{path!r}: ..." for path in dict.fromkeys(self.unfilled))
            parts.append(
                f"give the values that {self.source} leaves to 'auto', as from_deepspeed_config(..., auto={{{dots}}})."
            )
        if parts:
            raise ShardoptError(" ".join(parts))


def _read(config: Any) -> tuple[str, Mapping[str, Any]]:
    """Returns the config's name for messages, and its content."""
    if isinstance(config, Mapping):
        return "the DeepSpeed config", config
    if not isinstance(config, str | Path):
        raise ShardoptError(f"pass a dict, or the path of a JSON file, as config; found a {type(config).__name__}.")
    if not str(config):
        raise ShardoptError("pass a dict, or the path of a JSON file, as config; found an empty path.")
    try:
        found = json.loads(Path(config).read_text(), object_pairs_hook=_no_duplicates)
    except OSError as error:  # missing, a directory, not to be read
        raise ShardoptError(f"pass the path of a JSON file as config: {config} cannot be read ({error}).") from error
    except (ValueError, RecursionError) as error:
        raise ShardoptError(f"correct {config}: it is not JSON that can be read ({error}).") from error
    if not isinstance(found, Mapping):
        raise ShardoptError(f"{config}: a DeepSpeed config is a JSON object, found a {type(found).__name__}.")
    return str(config), found


def _no_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} occurs twice")
        found[key] = value
    return found


def _renamed(path: str, renamed: Mapping[str, str]) -> str:
    for old, new in renamed.items():
        if path == old or path.startswith(f"{old}."):
            return new + path.removeprefix(old)
    return path


def _json(value: Any) -> str:
    """Returns the value as JSON."""
    return json.dumps(value, default=repr)[:100]


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

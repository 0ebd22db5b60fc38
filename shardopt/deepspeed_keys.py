"""A DeepSpeed config as it is written: where its keys are, which were read, what to say about the others."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import ShardoptError

AUTO = "auto"


class Keys:
    """The config's leaves by dotted path. Each is taken once; what is left in the end is unknown."""

    def __init__(self, config: Mapping[str, Any] | str | Path, auto: Mapping[str, Any], derived: Collection[str]):
        """
        Args:
            auto: by dotted path, what stands for ``"auto"``.
            derived: paths whose ``"auto"`` follows from other things.
        """
        if not isinstance(config, Mapping):
            config = json.loads(Path(config).read_text())
            if not isinstance(config, Mapping):
                raise ShardoptError(f"a DeepSpeed config is a JSON object, found a {type(config).__name__}.")
        self._left = dict(_leaves(config, ""))
        self.warnings: list[str] = []
        self.errors: list[str] = []
        unknown = [path for path in auto if self._left.get(path) != AUTO]
        if unknown:
            raise ShardoptError(f"auto= names {unknown}, which the config does not leave to 'auto': remove them there.")
        self._left.update(auto)
        for path in [path for path, value in self._left.items() if value == AUTO and path not in derived]:
            del self._left[path]
            self.errors.append(
                f"{path} is 'auto', which the Hugging Face integration fills from its own arguments: give it here as "
                f"auto={{{path!r}: ...}}"
            )

    def take(self, path: str, default: Any = None) -> Any:
        """The value at ``path``, or ``default`` where it is missing."""
        return self._left.pop(path, default)

    def take_all(self, section: str) -> dict[str, Any]:
        """Everything under ``section.``, by the rest of its path."""
        paths = [path for path in self._left if path.startswith(f"{section}.")]
        return {path.removeprefix(f"{section}."): self.take(path) for path in paths}

    def has(self, path: str) -> bool:
        """Whether it, or anything under it, is there and not taken yet."""
        return any(each == path or each.startswith(f"{path}.") for each in self._left)

    def is_auto(self, path: str) -> bool:
        return bool(self._left.get(path) == AUTO)

    def expect(self, path: str, value: Any, otherwise: str) -> None:
        """An error that ends with ``otherwise`` unless the key is missing, or has this value."""
        found = self.take(path, value)
        if found != value:
            self.errors.append(f"{path}={found!r}: {otherwise}")

    def note(self, path: str, why: str) -> None:
        """A warning if the key, or anything under it, is there; it has no effect on results."""
        if self.has(path):
            self._left.pop(path, None)
            self.take_all(path)
            self.warnings.append(f"{path} ({why})")

    def ignore(self, *paths: str) -> None:
        """They mean nothing here and change no result."""
        for path in paths:
            self._left.pop(path, None)
            for each in [each for each in self._left if each.startswith(f"{path}.")]:
                self._left.pop(each)

    def finish(self) -> None:
        """Everything that is left is an error; then they are raised together."""
        self.errors += [f"{path}={value!r}: not known here" for path, value in self._left.items()]
        if self.errors:
            raise ShardoptError(
                "this DeepSpeed config asks for what would not be done, so that the results would be other ones: "
                + "; ".join(self.errors)
                + ". Remove or change these keys."
            )


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

"""The rule that a param group names, by the key "rule" or as published scripts of Muon do, and keys that name none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import RuleError, warn
from ..rules.choice import KEY, PUBLISHED_KEYS, RuleChoice

# Names of optimizers, which a script may give as the value of any key.
_NAMES = frozenset(
    {
        *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "dion", "lamb", "lars", "lion"),
        *("muon", "nadam", "normuon", "radam", "rmsprop", "rprop", "sgd", "shampoo", "soap"),
    }
)


def with_rule(rule: RuleChoice, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the group with the key "rule", if it names a rule by one of the published keys.

    Raises:
        RuleError: two keys name different rules, or one names a rule that the optimizer lacks.
        TypeError: a key such as ``use_muon`` has another value than True or False.
    """
    for key in PUBLISHED_KEYS:
        word = str(group.get(key)).lower()
        if word in _NAMES and word not in rule.choices:
            raise RuleError(
                f"give params of {key}={group[key]!r} to an optimizer of that class: this one has the rules "
                f"{list(rule.choices)}, and would update them by another one."
            )
    words = list(dict.fromkeys([*rule.published_words(group), *([group[KEY]] if KEY in group else [])]))
    if len(words) > 1:
        raise RuleError(
            f"name one rule in a param group, by {KEY!r} alone: its keys name {words}, and each param is updated by "
            "one rule."
        )
    return {**group, KEY: words[0]} if words else dict(group)


def warn_of_unread(group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], read: Collection[str]) -> None:
    """Warns of keys of a new group that look as if they chose its rule, and that nothing reads; of each key once.

    Args:
        groups: those that the optimizer has already.
        read: the keys that rules read.
    """
    for key, value in group.items():
        is_choice = isinstance(value, bool | np.bool_) or (isinstance(value, str) and value.lower() in _NAMES)
        if is_choice and key not in read and not any(key in each for each in groups):
            warn(
                f"write rule='muon' or rule='adamw' if {key}={value!r} was to choose the rule of its param group: "
                f"nothing reads the key {key!r}."
            )

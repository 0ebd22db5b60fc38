"""Several rules in one optimizer: each param group names its own by the key "rule"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..arguments import flag
from ..errors import RuleError
from .rule import FP32_EPS, Rule, Shape, Variant

KEY = "rule"
# Keys by which published scripts of Muon name a group's rule, beside use_muon=True.
PUBLISHED_KEYS = ("kind", "algorithm")


@dataclass(frozen=True, kw_only=True)
class RuleChoice(Rule):
    """Rules by name, the first of which is that of groups that name none."""

    choices: Mapping[str, Rule] = field(repr=False, compare=False, hash=False)

    @staticmethod
    def among(choices: Mapping[str, Rule]) -> RuleChoice:
        """Makes the choice. Its states are those of all rules: two rules may share one only in the same formats."""
        rules = list(choices.values())
        first = rules[0]
        return RuleChoice(
            name=first.name,
            states=tuple(dict.fromkeys(state for each in rules for state in each.states)),
            flags=(),
            carried=tuple(dict.fromkeys(name for each in rules for name in each.carried)),
            counts_steps=any(each.counts_steps for each in rules),
            nonnegative=frozenset().union(*(each.nonnegative for each in rules)),
            tolerated={state: finest for each in rules for state, finest in each.tolerated.items()},
            takes_norms=any(each.takes_norms for each in rules),
            of_param=tuple(dict.fromkeys(fact for each in rules for fact in each.of_param)),
            asked_of_param=tuple(dict.fromkeys(fact for each in rules for fact in each.asked_of_param)),
            scalars=first.scalars,
            function=first.function,
            tree=first.tree,
            average=first.average,
            choices=dict(choices),
        )

    def of(self, group: Mapping[str, Any]) -> Rule:
        """See :meth:`Rule.of`."""
        word = group.get(KEY, next(iter(self.choices)))
        if word not in self.choices:
            raise RuleError(
                f"give param groups one of the rules {list(self.choices)} as {KEY!r}, or leave the key out: found "
                f"{word!r}, which would update the group's params by nothing."
            )
        return self.choices[word]

    def published_words(self, group: Mapping[str, Any]) -> Iterator[str]:
        """Yields the rules that a group names as published scripts do: ``kind="adamw"``, ``use_muon=True``.

        Raises:
            TypeError: a key such as ``use_muon`` has another value than True or False.
        """
        for key in PUBLISHED_KEYS:
            word = str(group.get(key)).lower()
            if word in self.choices:
                yield word
        for word in self.choices:
            key = f"use_{word}"
            if group.get(key) is not None:
                others = [each for each in self.choices if each != word]
                yield from [word] if flag(group[key], key) else others[:1]

    def averaging(self, decay: float) -> RuleChoice:
        """See :meth:`Rule.averaging`."""
        return RuleChoice.among({word: each.averaging(decay) for word, each in self.choices.items()})

    def initial_values(self, group: Mapping[str, Any]) -> dict[str, float]:
        """See :meth:`Rule.initial_values`."""
        return self.of(group).initial_values(group)

    def variant(self, group: Mapping[str, Any], shape: Shape = ()) -> Variant:
        """See :meth:`Rule.variant`."""
        return self.of(group).variant(group, shape)

    def answers(self, group: Mapping[str, Any], shape: Shape) -> tuple[bool, ...]:
        """See :meth:`Rule.answers`."""
        return self.of(group).answers(group, shape)

    def evaluate(
        self,
        variant: Variant,
        group: Mapping[str, Any],
        step: int,
        carried: Mapping[str, float],
        shape: Shape = (),
        eps: float = FP32_EPS,
    ) -> tuple[tuple[float, ...], dict[str, float]]:
        """See :meth:`Rule.evaluate`."""
        return self.of(group).evaluate(variant, group, step, carried, shape, eps)


def name_in(rule: Rule, group: Mapping[str, Any]) -> str:
    """Returns the word by which a param group, one that was saved perhaps, names its rule; else the rule's name."""
    if not isinstance(rule, RuleChoice):
        return rule.name
    # Before the key of our own: that of a dict that another class saved is filled in from the group that takes it over.
    published = next(rule.published_words(group), None)
    return published or str(group.get(KEY, next(iter(rule.choices))))

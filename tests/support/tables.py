"""Tables of states in docstrings, which tests walk: ``from  event  to``, a row a line."""

import re
from enum import Enum


def rows_of(states: type[Enum]) -> list[tuple[str, str, str]]:
    """(state, event, state after it) of each row in the docstring of an enum."""
    names = "|".join(each.name for each in states)
    row = re.compile(rf"^ *({names}) +(\S.*?)  +({names})$", re.MULTILINE)
    rows = [(before, event, after) for before, event, after in row.findall(states.__doc__ or "")]
    assert {before for before, _, _ in rows} == {each.name for each in states}, f"{states.__name__}: rows are not found"
    return rows

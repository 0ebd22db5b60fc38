"""What an editor tells of the public calls: the meanings of keywords. Their types are checked by scripts/check.sh."""

import pydoc

import shardopt
from shardopt.config import Options
from shardopt.option import options_of


def test_help_tells_every_keyword() -> None:
    """Of each optimizer: the names with their defaults in its own docstring, the meanings with its arguments."""
    for name in (name for name in shardopt.__all__ if name.startswith("Sharded")):
        kind = getattr(shardopt, name)
        shown = " ".join(pydoc.render_doc(kind, renderer=pydoc.plaintext).replace("|", " ").split())
        own = " ".join((kind.__doc__ or "").split())
        for field, said in options_of(Options):
            assert f" {field.name}=" in own, (name, field.name)
            assert said.meaning.split("`")[0].split("[")[0].strip(" (")[1:] in shown, (name, field.name)

"""Promise: arrows point down. No module is part of a circle of imports; no folder imports from above or beside it."""

import importlib.util
from types import ModuleType

from tests.support.paths import ROOT

CHAIN = 12  # modules in the longest chain that one import loads
FOUR = {"rules", "kernels", "partition", "offload"}


def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arrows_point_down() -> None:
    drawing = house()
    found = drawing.graph()
    assert drawing.circles(found) == []
    assert drawing.upward(found) == []
    assert {drawing.room(name) for name in found} - {"__init__"} == {each for rooms in drawing.FLOORS for each in rooms}
    rooms = {(drawing.room(name), drawing.room(target)) for name, targets in found.items() for target in targets}
    assert not [(here, there) for here, there in rooms if here != there and {here, there} <= FOUR]
    assert len(drawing.longest_chain(drawing.graph(loaded=True))) <= CHAIN


def test_what_is_wrong_is_found() -> None:
    drawing = house()
    up = {"shardopt.domain.bind": {"shardopt.engine"}, "shardopt.engine": set()}
    assert drawing.upward(up) == [("shardopt.domain.bind", "shardopt.engine")]
    beside = {
        "shardopt.partition.bucket": {"shardopt.offload.store"},
        "shardopt.offload.store": {"shardopt.rules.rule"},
    }
    assert drawing.upward({**beside, "shardopt.rules.rule": set()}) == [
        ("shardopt.offload.store", "shardopt.rules.rule")
    ]
    ring = {"shardopt.a": {"shardopt.b"}, "shardopt.b": {"shardopt.c"}, "shardopt.c": {"shardopt.a"}}
    assert drawing.circles(ring) == [sorted(ring)]


def test_the_picture_is_of_this_house() -> None:
    """``python scripts/house.py --write`` draws it anew."""
    drawing = house()
    assert drawing.PICTURE.read_text() == drawing.picture(drawing.graph())


def test_each_folder_asks_a_question() -> None:
    drawing = house()
    folders = [path for path in (ROOT / "shardopt").iterdir() if (path / "__init__.py").exists()]
    assert [path.name for path in folders if not drawing.question(path.name).endswith("?")] == []

"""Promise: manifests keep their bytes from version to version, and a wrong field is told by its name.

``fixtures/manifests`` holds manifests that shardopt wrote when its records were dicts, ``fixtures/parts`` older ones.
"""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from shardopt import CheckpointError
from shardopt.checkpoint.manifest import from_bytes, to_bytes
from shardopt.checkpoint.records import Manifest
from shardopt.checkpoint.typed_json import Count, HexFloat, Names, from_json, omitted, renamed, to_json
from tests.support.paths import ROOT
from tests.support.training import raises

FIXTURES = ROOT / "tests" / "fixtures"
MANIFESTS = sorted([*(FIXTURES / "manifests").glob("*.json"), *(FIXTURES / "parts").rglob("manifest.json")])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.relative_to(FIXTURES).as_posix())
def test_a_manifest_that_is_read_and_written_has_the_same_bytes(path: Any) -> None:
    data = path.read_bytes()
    assert to_bytes(from_bytes(data, "")) == data


def test_what_a_later_version_adds_is_ignored() -> None:
    text = (FIXTURES / "manifests" / "boxes_and_scales.json").read_text()
    content = json.loads(text)["manifest"]
    content["info"]["later"] = content["params"]["embed.weight"]["later"] = {"a": [1]}
    assert from_json(Manifest, content) == from_bytes(text.encode(), "")


class Pair(NamedTuple):
    number: Count
    total: Count


@dataclass(frozen=True, kw_only=True)
class Inner:
    pair: Pair
    factor: HexFloat | None = None
    old: str = omitted("")


@dataclass(frozen=True)
class Outer:
    names: Names
    inner: dict[str, Inner]
    sums: tuple[Count, ...] = renamed("crc")


GOOD: dict[str, Any] = {"names": ["a"], "inner": {"x.y": {"pair": [1, 2], "factor": (0.1).hex()}}, "crc": [3]}
RECORD = Outer(("a",), {"x.y": Inner(pair=Pair(1, 2), factor=0.1)}, (3,))


def test_fields_are_the_only_list_of_what_json_holds() -> None:
    assert from_json(Outer, GOOD) == RECORD and to_json(RECORD) == GOOD
    short = {**GOOD, "inner": {"z": {"pair": [1, 2], "old": "o"}}}  # as an older version wrote it
    found = from_json(Outer, short)
    assert found.inner["z"] == Inner(pair=Pair(1, 2), old="o")
    # None is written where the field is not omitted, and in the order of the fields.
    assert json.dumps(to_json(found)["inner"]) == '{"z": {"pair": [1, 2], "factor": null, "old": "o"}}'


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"names": ["a", 3]}, "where.names = ['a', 3], where a list of names belongs"),
        ({"names": None}, "where.names = None, where a list of names"),
        ({"crc": [1, True]}, "where.crc.1 = True, where a count"),
        ({"crc": "12"}, "where.crc = '12', where a list"),
        ({"inner": [1]}, "where.inner = [1], where an object"),
        ({"inner": {"x.y": {"pair": [1]}}}, "where.inner.x.y.pair = [1], where a list of number, total"),
        ({"inner": {"x.y": {"pair": [1, -2]}}}, "where.inner.x.y.pair.total = -2, where a count"),
        ({"inner": {"x": {}}}, "where.inner.x.pair = None, where a list of number, total"),
        ({"inner": {"x": {"pair": [0, 0], "factor": 0.5}}}, "factor = 0.5, where a number in hexadecimal digits"),
    ],
)
def test_a_wrong_field_is_told_by_its_name(change: dict[str, Any], told: str) -> None:
    with raises(CheckpointError, told, "load another checkpoint", "nothing was loaded"):
        from_json(Outer, {**GOOD, **change}, "where")

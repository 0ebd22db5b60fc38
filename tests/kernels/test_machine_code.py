"""How long the kernels are: the instructions of a warp on the main path, as the committed prediction has them.

``bench/gpu_model.py`` predicts the kernels' speed on an H100 from their machine code and writes what it counted below
``bench/results``. A kernel that has become longer, or shorter, fails here until that is run again, so that nobody makes
one slower without seeing by how much.
"""

import json
from typing import Any

import pytest
import triton

from tests.support.lowered import lowered_kernels
from tests.support.paths import ROOT
from tests.support.ptx.process import Compiling

# By default what a change of a word, a format or a reduction would show in; with --slow every kernel.
FEW = (
    "AdamW plain fp32 fp32",
    "AdamW plain bf16 bf16",
    "AdamW plain fp16 bf16",
    "AdamW kept bf16 bf16 split fp32 fp32",
    "AdamW kept bf16 bf16 split24 signed8 unsigned8",
    "AdamW kept bf16_random bf16 - signed8 unsigned8",
    "Lion kept bf16_random bf16 - signed8",
    "Rprop kept bf16_random bf16 - bf16_dithered bf16_dithered",
)


def in_lengths(wanted: tuple[str, ...] | None) -> dict[str, dict[str, int]]:
    found = lowered_kernels(lambda label: wanted is None or label in wanted or "kernel" in label)
    return {each.label: each.units for each in found}


@pytest.fixture(scope="module")
def committed() -> dict[str, dict[str, int]]:
    path = sorted((ROOT / "bench" / "results").glob("*-gpu-model-*.json"))[-1]
    result: dict[str, Any] = json.loads(path.read_text())
    if result["machine"]["triton"] != triton.__version__:
        pytest.skip(f"counted with Triton {result['machine']['triton']}, whose compiler makes other machine code")
    return {row["kernel"]: row["units"] for row in result["results"]["rows"]}


@pytest.mark.parametrize("wanted", [FEW, pytest.param(None, marks=pytest.mark.slow)], ids=["few", "every"])
def test_no_kernel_is_longer_than_was_predicted(
    compiling: Compiling, committed: dict[str, dict[str, int]], wanted: tuple[str, ...] | None
) -> None:
    found = compiling(in_lengths, wanted)
    expected = committed if wanted is None else {label: committed[label] for label in found}
    assert len(found) >= len(wanted or committed)
    longer = {
        label: f"{sum(found[label].values())} instructions on the main path, {sum(units.values())} before"
        for label, units in expected.items()
        if found[label] != units
    }
    assert not longer, f"run PYTHONPATH=. python bench/gpu_model.py, and say why: {longer}"

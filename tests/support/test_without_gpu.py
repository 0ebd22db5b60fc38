"""The environment of ``scripts/gpu_without_gpu.sh``, as far as it can be looked at without its two gigabytes."""

import re

from tests.support.paths import ROOT
from tests.support.without_gpu import build, record


def test_what_it_is_made_of_is_there() -> None:
    sources = {path.stem for path in build.SOURCES.glob("*.cpp")}
    assert sources == {*build.OF_CUDART, *build.OF_CUDA, *build.OF_NCCL, "operations"}
    text = (ROOT / "scripts" / "gpu_without_gpu.sh").read_text()
    assert "tests/support/without_gpu/build.py" in text and "tests/support/without_gpu/record.py" in text
    assert "tests.support.without_gpu.installed:install" in text


def test_every_test_that_needs_a_gpu_is_run_and_each_reduced_size_is_told() -> None:
    files = {file: (ROOT / file).read_text() for file in record.marked()}
    assert {"tests/kernels/test_gpu.py", "tests/gpu/test_nccl_stages.py"} <= files.keys()
    reduced = {
        f"{file}::{name}"
        for file, text in files.items()
        for name, body in re.findall(
            r"^def (test_\w+)\((.*?)(?=^(?:def|class|@|# --)|\Z)", text, re.MULTILINE | re.DOTALL
        )
        if "sized(" in body
    }
    assert reduced == record.SIZES.keys()

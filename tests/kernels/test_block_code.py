"""What travels in 8 or 4 bits has the same bytes from native code and from Triton."""

import numpy as np
import pytest
import torch

from shardopt.domain.block_code import BlockCode
from shardopt.domain.formats import TRAFFIC_FORMATS
from shardopt.domain.shard_tables import ShardTables
from shardopt.kernels import native_backend, triton_backend
from shardopt.partition.layout import BucketLayout
from tests.support.training import raw

CPU = torch.device("cpu")
LAYOUT = BucketLayout((300, 1, 256, 70), 1)


def gradients(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(LAYOUT.numel, generator=generator) * 10.0 ** torch.arange(LAYOUT.numel).remainder(9).sub(6)
    values[LAYOUT.offsets[2] + 3] = torch.inf
    values[LAYOUT.offsets[3]], values[LAYOUT.offsets[3] + 1] = 1e-42, 3e38  # no scale is subnormal
    return values.to(dtype)


@np.errstate(all="ignore")  # the interpreter computes in NumPy
@pytest.mark.parametrize("form", TRAFFIC_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_interpreter_has_the_bytes_of_native_code(form: str, dtype: torch.dtype) -> None:
    values, found = gradients(dtype), []
    for backend in (native_backend, triton_backend):
        for keeps_rest in (False, True):
            code = BlockCode(LAYOUT.numel, dtype, torch.float32, TRAFFIC_FORMATS[form], CPU, keeps_rest)
            code._backend = backend
            rest = torch.linspace(-1e-3, 1e-3, LAYOUT.numel).bfloat16() if keeps_rest else None
            message = code.encode(values, ShardTables(LAYOUT.pieces(0), LAYOUT.numel, CPU).gradients_in(values), rest)
            total = torch.ones(LAYOUT.numel)
            code.decode_into(total, message, 0, add=True)
            params = BlockCode(LAYOUT.numel, dtype, dtype, TRAFFIC_FORMATS[form], CPU)
            params._backend = backend
            arrived = torch.empty_like(values)
            params.decode_into(arrived, message, 0, add=False)
            # Where no param has an element, kernels may leave anything.
            within = torch.cat(
                [
                    torch.arange(first, first + numel)
                    for first, numel in zip(LAYOUT.offsets, LAYOUT.numels, strict=False)
                ]
            )
            assert rest is None or (rest[LAYOUT.offsets[2] : LAYOUT.offsets[3]] == 0).all()
            kept = () if rest is None else (rest[within],)
            found.append([raw(torch.nan_to_num(each.float()[within], nan=7.0)) for each in (total, arrived)])
            found[-1] += [raw(each) for each in kept]
            found[-1].append(raw(message[-(LAYOUT.numel // 64) :]))  # the scales, and what fills up the message
    assert found[0] == found[2] and found[1] == found[3]

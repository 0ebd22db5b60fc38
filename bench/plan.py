"""Planning without memory: the layout of a model of a trillion params over thousands of ranks, on the meta device.

    python bench/plan.py               1T params, 4,096 ranks, stage 3

Builds a GPT on the meta device, then times what each rank computes when it binds: buckets in backward order, offsets,
slices, its own pieces. Integers only; nothing is allocated for params, and no rank is talked to.
"""

import resource
import time

import torch
from common import device_name, parser_of, show, write_result
from torch import nn

import shardopt
from shardopt.config import Options
from shardopt.domain.bind import plan_of
from shardopt.domain.domain import Domain
from shardopt.partition.comm.group import Ranks
from shardopt.partition.mesh import Mesh
from shardopt.rules.adam import adam


def gpt(layers: int, width: int, vocab: int) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(vocab, width), *(block() for _ in range(layers)), nn.Linear(width, vocab))


def resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--layers", type=int, default=128, help="blocks")
    parser.add_argument("--width", type=int, default=25_600, help="channels")
    parser.add_argument("--vocab", type=int, default=131_072, help="tokens")
    parser.add_argument("--ranks", type=int, default=4096, help="that share the states")
    parser.add_argument("--rank", type=int, default=1234, help="whose pieces are computed")
    args = parser.parse_args()
    model = gpt(args.layers, args.width, args.vocab)
    numel = sum(param.numel() for param in model.parameters())
    before = resident_peak()
    start = time.perf_counter()
    optimizer = shardopt.ShardedAdamW(model, stage=3)
    ranks = Ranks.alone()
    ranks.size, ranks.rank = args.ranks, args.rank
    mesh = Mesh(ranks, ranks, Ranks.alone(), tuple(range(args.ranks)))
    domain = Domain(adam, Options(module=model, stage=3), mesh)
    plan = plan_of(domain, domain.unbound(optimizer.param_groups), {})
    own = sum(piece.numel for planned in plan for piece in planned.layout.pieces(args.rank))
    held = sum(planned.layout.shard_numel for planned in plan)
    seconds, nbytes = time.perf_counter() - start, resident_peak() - before
    padding = held * args.ranks / numel - 1
    show(
        f"{device_name(torch.device('cpu'))}; {numel / 1e12:.3f}T params over {args.ranks} ranks, {len(plan)} buckets",
        ("what", "value"),
        [
            ["planning, s", f"{seconds:.3f}"],
            ["memory it took, MiB", f"{nbytes / 2**20:.1f}"],
            ["params of this rank", f"{own:,}"],
            ["padding of all shards", f"{100 * padding:.4f} %"],
        ],
    )
    results = {
        "params": numel,
        "buckets": len(plan),
        "seconds": seconds,
        "bytes": nbytes,
        "params of the rank": own,
        "padding": padding,
    }
    write_result("plan", args, torch.device("cpu"), results)


if __name__ == "__main__":
    main()

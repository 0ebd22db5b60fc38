"""Host time of a training step by phase, of a GPT whose arithmetic is negligible: what a GPU would wait for.

    python bench/host.py                                   one rank
    torchrun --nproc-per-node 2 bench/host.py              ranks over gloo

The time is the processor time of the main thread, in which waits for other ranks do not count. All engines take their
turns one after the other, with clipping; a phase's time in a turn is the least of its steps. The ratios are of whole
steps of the smaller model; `a param` is the slope between the two models, `fixed` what is left of the smaller one.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from common import device_name, median_of, parser_of, ratios, show, write_result
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import shardopt

WIDTH, VOCABULARY = 8, 32
PHASES = ("forward", "backward", "clip", "step")
DDP, FSDP2 = "DDP, torch fused AdamW", "FSDP2, torch fused AdamW"
Seconds = dict[str, float]


class Block(nn.Module):
    """One of a GPT: 12 params."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(self.before_attention(x)).unsqueeze(1).chunk(3, -1)
        x = x + self.mixed(nn.functional.scaled_dot_product_attention(query, key, value).squeeze(1))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


Engine = tuple[nn.Module, torch.optim.Optimizer]


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain(model: Gpt) -> Engine:
    return model, fused(model)


def ddp(model: Gpt) -> Engine:
    return DistributedDataParallel(model), fused(model)


def fsdp2(model: Gpt) -> Engine:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, fused(model)


def params_only(model: Gpt) -> Engine:
    return DistributedDataParallel(model), shardopt.ShardedAdamW(model.parameters(), lr=1e-4, stage=1)


def stage(number: Literal[0, 1, 2, 3], **tuning: Any) -> Callable[[Gpt], Engine]:
    def make(model: Gpt) -> Engine:
        module = model if number == 3 else DistributedDataParallel(model)
        return module, shardopt.ShardedAdamW(module, lr=1e-4, stage=number, tuning=shardopt.Tuning(**tuning))

    return make


ENGINES: dict[str, Callable[[Gpt], Engine]] = {
    "plain model, torch fused AdamW": plain,
    DDP: ddp,
    FSDP2: fsdp2,
    "stage 1, params only": params_only,
    "stage 0": stage(0),
    "stage 1": stage(1),
    "stage 2": stage(2),
    "stage 3, keep_below=0": stage(3, keep_below=0),
}


def turn(engine: Engine, tokens: Tensor, steps: int) -> Seconds:
    """Seconds of each phase: the least of some steps."""
    model, optimizer = engine
    least = dict.fromkeys(PHASES, float("inf"))
    for _ in range(steps):
        marks = [time.thread_time()]
        loss = model(tokens).sum()
        marks.append(time.thread_time())
        loss.backward()
        marks.append(time.thread_time())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        marks.append(time.thread_time())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.thread_time())
        for phase, start, end in zip(PHASES, marks, marks[1:], strict=False):
            least[phase] = min(least[phase], end - start)
    return least


def measured(sizes: Sequence[int], turns: int, steps: int) -> dict[tuple[int, str], list[Seconds]]:
    tokens, engines = torch.zeros(1, 2, dtype=torch.long), {}
    for blocks in sizes:
        for name, make in ENGINES.items():
            torch.manual_seed(0)
            engines[blocks, name] = make(Gpt(blocks))
    for engine in engines.values():
        turn(engine, tokens, 4)
    found: dict[tuple[int, str], list[Seconds]] = {key: [] for key in engines}
    for _ in tqdm(range(turns), desc="turns", unit="turn", disable=True if dist.get_rank() else None):
        for key, engine in engines.items():
            found[key].append(turn(engine, tokens, steps))
    return found


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--blocks", type=int, nargs=2, default=[12, 36], help="of the two models")
    parser.add_argument("--turns", type=int, default=15, help="of each engine")
    parser.add_argument("--steps", type=int, default=4, help="in a turn")
    args = parser.parse_args()
    if args.quick:
        args.turns, args.steps = 3, 2
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    few, many = sorted(args.blocks)
    num_params = sum(1 for _ in Gpt(many).parameters()) - sum(1 for _ in Gpt(few).parameters())
    found = measured((few, many), args.turns, args.steps)
    whole = {key: [sum(each.values()) for each in turns] for key, turns in found.items()}
    results: dict[str, Any] = {}
    rows = []
    for name in ENGINES:
        pairs = list(zip(found[few, name], found[many, name], strict=True))
        of_a_param = {phase: median_of([(b[phase] - a[phase]) / num_params for a, b in pairs]) for phase in PHASES}
        slopes = [(b - a) / num_params for a, b in zip(whole[few, name], whole[many, name], strict=True)]
        of_few = sum(1 for _ in Gpt(few).parameters())
        fixed = median_of([a - slope * of_few for a, slope in zip(whole[few, name], slopes, strict=True)])
        over = {other: [ratios(whole[n, name], whole[n, other]) for n in (few, many)] for other in (DDP, FSDP2)}
        results[name] = {
            "seconds": [median_of(whole[n, name]) for n in (few, many)],
            "seconds a param": of_a_param,
            "seconds fixed": fixed,
            "over DDP": over[DDP],
            "over FSDP2": over[FSDP2],
        }
        microseconds = [f"{1e6 * of_a_param[phase].median:.1f}" for phase in PHASES]
        rows.append([name, *(f"{each}" for each in over[DDP]), *microseconds, f"{1e3 * fixed.median:.1f}"])
    if dist.get_rank() == 0:
        columns = ("engine", f"over DDP, {few}", f"over DDP, {many}", *(f"{each}, us a param" for each in PHASES))
        ranks = dist.get_world_size()
        show(f"{device_name(torch.device('cpu'))}, ranks: {ranks}", (*columns, "fixed, ms"), rows)
        write_result(f"host-{ranks}-ranks", args, torch.device("cpu"), results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

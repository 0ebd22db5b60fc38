"""Host time of a training step by phase, of a GPT whose arithmetic is negligible: what a GPU would wait for.

    python bench/host.py                                   one rank
    torchrun --nproc-per-node 2 bench/host.py              ranks over gloo
    bash scripts/gpu_without_gpu.sh --null bench/host.py --device null      the host's work for a GPU, without one

The time is the processor time of the main thread, in which waits for other ranks do not count. All engines take their
turns one after the other, with clipping; a phase's time in a turn is the least of its steps. The ratios are of whole
steps of the smaller model; `a param` is the slope between the two models, `fixed` what is left of the smaller one.

On a null device launches, copies, waits and collectives return at once: what is timed is PyTorch, Triton's launcher
and this package, on all threads of the process, since autograd has one of its own for a GPU. The driver's own work is
not in it. So the calls that cost it something are counted, phase by phase, and `with the driver` adds a supposed price
of each.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
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
# Seconds of CUDA's driver for each call, supposed: "2 to 3 us a launch" is what people measure.
PRICES = {
    **dict.fromkeys(("kernel launches", "Triton launches", "library calls", "collectives", "fills"), 2.5e-6),
    **dict.fromkeys(("copies to the device", "copies to the host", "copies on the device"), 2.5e-6),
    **dict.fromkeys(("event records", "event queries", "stream waits"), 0.5e-6),
}
Seconds = dict[str, float]
Calls = dict[str, dict[str, int]]  # by phase, then by kind


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


def ddp_bucket_a_block(model: Gpt) -> Engine:
    return DistributedDataParallel(model, bucket_cap_mb=bytes_of_a_block(model) / 2**20), fused(model)


def fsdp2(model: Gpt) -> Engine:
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
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


def stage_2_bucket_a_block(model: Gpt) -> Engine:
    return stage(2, bucket_bytes=bytes_of_a_block(model))(model)


def bytes_of_a_block(model: Gpt) -> int:
    return sum(param.nbytes for param in model.blocks[0].parameters())


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
# What a bucket more costs: the bigger model has as many more as it has blocks.
OF_BUCKETS: dict[str, Callable[[Gpt], Engine]] = {
    f"{DDP}, a bucket a block": ddp_bucket_a_block,
    "stage 2, a bucket a block": stage_2_bucket_a_block,
}


def phases(engine: Engine, tokens: Tensor) -> Iterator[str]:
    """Takes a step, and stops behind each phase."""
    model, optimizer = engine
    loss = model(tokens).sum()
    yield "forward"
    loss.backward()
    yield "backward"
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    yield "clip"
    optimizer.step()
    optimizer.zero_grad()
    yield "step"


def turn(engine: Engine, tokens: Tensor, steps: int) -> Seconds:
    """Seconds of each phase: the least of some steps."""
    clock = time.process_time if tokens.is_cuda else time.thread_time
    least = dict.fromkeys(PHASES, float("inf"))
    for _ in range(steps):
        start = clock()
        for phase in phases(engine, tokens):
            end = clock()
            least[phase] = min(least[phase], end - start)
            start = end
    return least


def calls(engine: Engine, tokens: Tensor) -> Calls:
    """What one step asks of the device."""
    from tests.support.without_gpu.counts import counts

    found, before = {}, counts()
    for phase in phases(engine, tokens):
        after = counts()
        found[phase] = {kind: after[kind] - before[kind] for kind in after}
        before = after
    return found


def seconds_of_driver(calls: Calls) -> float:
    return sum(PRICES.get(kind, 0.0) * count for each in calls.values() for kind, count in each.items())


Key = tuple[int, str]  # blocks, engine


def measured(
    makers: dict[str, Callable[[Gpt], Engine]], device: torch.device, sizes: Sequence[int], turns: int, steps: int
) -> tuple[dict[Key, list[Seconds]], dict[Key, Calls]]:
    """The times of all turns; on a null device also the calls of a step."""
    tokens, engines = torch.zeros(1, 2, dtype=torch.long, device=device), dict[Key, Engine]()
    for blocks in sizes:
        for name, make in makers.items():
            torch.manual_seed(0)
            engines[blocks, name] = make(Gpt(blocks).to(device))
    for engine in engines.values():
        turn(engine, tokens, 4)
    of_a_step = {key: calls(engine, tokens) for key, engine in engines.items()} if tokens.is_cuda else {}
    found: dict[Key, list[Seconds]] = {key: [] for key in engines}
    for _ in tqdm(range(turns), desc="turns", unit="turn", disable=True if dist.get_rank() else None):
        for key, engine in engines.items():
            found[key].append(turn(engine, tokens, steps))
    return found, of_a_step


# ---- Updates and moves, without a model ------------------------------------------------------------------------------


def flat(device: torch.device, offload: Any = None) -> shardopt.ShardedAdamW:
    """64 chunks in 4 params, as ``bench/bus.py`` has them, of a thousandth of the bytes."""
    params = [nn.Parameter(torch.ones(1 << 14, dtype=torch.bfloat16, device=device)) for _ in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    tuning = shardopt.Tuning(chunk_bytes=1 << 12, bucket_bytes=1 << 15, nonfinite="propagate")
    return shardopt.ShardedAdamW(params, lr=1e-3, offload=offload, tuning=tuning)


def moves(device: torch.device, turns: int) -> dict[str, dict[str, float]]:
    """Seconds of the host by call, the least: of its main thread, and of the driver.

    A step of DDP takes its turns among them: what this machine was busy with besides is in both.
    """
    from tests.support.without_gpu.counts import counts

    away, ring = flat(device), flat(device, shardopt.Offload(step="gpu"))
    on_cpu = flat(device, shardopt.Offload(step="cpu"))
    named: dict[str, Callable[[], object]] = {
        "update-ring, step": ring.step,
        "update-cpu-step, step": on_cpu.step,
        "moves, step, states on the device": away.step,
        "moves, offload": lambda: away.offload("cpu"),
        "moves, step, states offloaded": away.step,
        "moves, reload": away.reload,
    }
    torch.manual_seed(0)
    beside, tokens = ddp(Gpt(12).to(device)), torch.zeros(1, 2, dtype=torch.long, device=device)
    of_ddp = dict.fromkeys(PHASES, float("inf"))
    least = {name: float("inf") for name in named}
    driver: dict[str, float] = {}
    for _ in tqdm(range(turns), desc="turns", unit="turn", disable=None):
        for name, call in named.items():
            before, start = counts(), time.thread_time()
            call()
            least[name] = min(least[name], time.thread_time() - start)
            driver[name] = sum(PRICES.get(kind, 0.0) * (count - before[kind]) for kind, count in counts().items())
        of_ddp = {phase: min(of_ddp[phase], seconds) for phase, seconds in turn(beside, tokens, 2).items()}
    found = {name: {"least seconds": least[name], "driver": driver[name]} for name in named}
    return {**found, DDP: of_ddp}


def device_of(name: str) -> torch.device:
    """Raises SystemExit if a null device is asked for and this is not one."""
    if name == "cpu":
        return torch.device("cpu")
    if os.environ.get("WITHOUT_GPU_NULL") != "1":
        raise SystemExit("run `bash scripts/gpu_without_gpu.sh --null bench/host.py --device null`, which makes it")
    return torch.device("cuda", 0)


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--device", choices=("cpu", "null"), default="cpu", help="null: one on which nothing computes")
    parser.add_argument("--blocks", type=int, nargs=2, default=[12, 36], help="of the two models")
    parser.add_argument("--turns", type=int, default=15, help="of each engine")
    parser.add_argument("--steps", type=int, default=4, help="in a turn")
    parser.add_argument("--engines", nargs="+", metavar="ENGINE", help="some of them, DDP's among them (default: all)")
    parser.add_argument("--moves", action="store_true", help="of a null device: only updates and moves of states")
    args = parser.parse_args()
    if args.quick:
        args.turns, args.steps = 3, 2
    torch.set_num_threads(1)
    device = device_of(args.device)
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    if args.moves:
        write_result("host-moves-null", args, torch.device("cpu"), moves(device, 4 * args.turns))
        dist.destroy_process_group()
        return
    few, many = sorted(args.blocks)
    makers = ENGINES if args.device == "cpu" else {**ENGINES, **OF_BUCKETS}
    makers = {name: make for name, make in makers.items() if name in (args.engines or makers)}
    num_params = sum(1 for _ in Gpt(many).parameters()) - sum(1 for _ in Gpt(few).parameters())
    found, of_a_step = measured(makers, device, (few, many), args.turns, args.steps)
    whole = {key: [sum(each.values()) for each in turns] for key, turns in found.items()}
    driver = {key: seconds_of_driver(each) for key, each in of_a_step.items()}
    results: dict[str, Any] = {}
    rows = []
    for name in makers:
        pairs = list(zip(found[few, name], found[many, name], strict=True))
        of_a_param = {phase: median_of([(b[phase] - a[phase]) / num_params for a, b in pairs]) for phase in PHASES}
        slopes = [(b - a) / num_params for a, b in zip(whole[few, name], whole[many, name], strict=True)]
        of_few = sum(1 for _ in Gpt(few).parameters())
        fixed = median_of([a - slope * of_few for a, slope in zip(whole[few, name], slopes, strict=True)])
        others = [other for other in (DDP, FSDP2) if other in makers]
        over = {other: [ratios(whole[n, name], whole[n, other]) for n in (few, many)] for other in others}
        results[name] = {
            "seconds": [median_of(whole[n, name]) for n in (few, many)],
            "least seconds": [_least(found[n, name]) for n in (few, many)],
            "seconds a param": of_a_param,
            "seconds fixed": fixed,
            **{f"over {other.partition(',')[0]}": over[other] for other in others},
        }
        if of_a_step:
            for other in others:
                both = [
                    ratios(*([each + driver[n, which] for each in whole[n, which]] for which in (name, other)))
                    for n in (few, many)
                ]
                results[name][f"over {other.partition(',')[0]}, with the driver"] = both
            results[name]["calls"] = {f"{n} blocks": _without_zeros(of_a_step[n, name]) for n in (few, many)}
        microseconds = [f"{1e6 * of_a_param[phase].median:.1f}" for phase in PHASES]
        rows.append([name, *(f"{each}" for each in over[DDP]), *microseconds, f"{1e3 * fixed.median:.1f}"])
    if dist.get_rank() == 0:
        columns = ("engine", f"over DDP, {few}", f"over DDP, {many}", *(f"{each}, us a param" for each in PHASES))
        ranks = dist.get_world_size()
        of = "" if args.device == "cpu" else "null-"
        show(f"{of}{device_name(torch.device('cpu'))}, ranks: {ranks}", (*columns, "fixed, ms"), rows)
        if of_a_step:
            _show_calls(of_a_step, few)
        write_result(f"host-{of}{ranks}-ranks", args, torch.device("cpu"), results)
    dist.destroy_process_group()


def _least(turns: Sequence[Seconds]) -> Seconds:
    return {phase: min(each[phase] for each in turns) for phase in PHASES}


def _without_zeros(calls: Calls) -> Calls:
    return {phase: {kind: count for kind, count in its.items() if count} for phase, its in calls.items()}


def _show_calls(of_a_step: dict[Key, Calls], few: int) -> None:
    rows = []
    for (blocks, name), found in of_a_step.items():
        if blocks != few:
            continue
        kinds = [kind for kind in found["step"] if any(found[phase][kind] for phase in PHASES)]
        told = [f"{kind} {', '.join(str(found[phase][kind]) for phase in PHASES)}" for kind in kinds]
        rows.append([name, "\n".join(told)])
    show(f"calls in {', '.join(PHASES)}; {few} blocks", ("engine", "calls"), rows)


if __name__ == "__main__":
    main()

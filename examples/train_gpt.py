"""Train a byte-level GPT on the Python standard library; one line decides whether its optimizer is sharded.

    bash scripts/demo.sh                                               two CPU ranks, or one rank on each GPU
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py     the same by hand
    python examples/train_gpt.py --optimizer torch                     one process, torch.optim.AdamW

`train` is the script that everybody has. Batches depend on the seed and the step alone, never on the number of ranks
or the optimizer, so that two runs can be compared line by line.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import shardopt

VOCAB = 256  # a token is a byte
EVAL_WINDOWS = 128  # sequences of a held-out evaluation, always the same ones


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on the Python standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--optimizer", choices=("shardopt", "torch"), default="shardopt", help="whose AdamW")
    parser.add_argument(
        "--stage", type=int, choices=(0, 1, 2, 3), default=2, help="of shardopt: what is sharded over the ranks"
    )
    parser.add_argument("--offload", default=None, help='of shardopt: "cpu" or a directory, where states are kept')
    parser.add_argument(
        "--master",
        choices=("fp32", "split", "split24", "none"),
        default="fp32",
        help="of shardopt: the masters of bf16 params",
    )
    parser.add_argument(
        "--state-format", choices=("fp32", "bf16", "int8"), default="fp32", help="of shardopt: of the moments"
    )
    parser.add_argument(
        "--gradient-format",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of shardopt: of sums for bf16 params",
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the params")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--steps", type=int, default=500, help="length of the schedule")
    parser.add_argument("--seconds", type=float, default=75.0, help="training time after which to stop early")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step, over all ranks")
    parser.add_argument("--context", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model")
    parser.add_argument("--width", type=int, default=128, help="channels of the model")
    parser.add_argument("--heads", type=int, default=4, help="attention heads in a block")
    parser.add_argument("--seed", type=int, default=0, help="of the first params and of the batches")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="directory of the results")
    args = parser.parse_args()
    for name in ("lr", "steps", "seconds", "batch", "context", "layers", "width", "heads"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} must be positive, not {getattr(args, name)}")
    if args.width % (2 * args.heads):
        parser.error(f"--width {args.width} must be a multiple of twice --heads {args.heads}: channels rotate in pairs")
    return args


# ---- Ranks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device


def start_ranks() -> Ranks:
    """Join the process group if torchrun started this process; otherwise be the only rank, without one."""
    rank, local_rank, world = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"no GPU for local rank {local_rank}: start at most {torch.cuda.device_count()} ranks here")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if world and device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    elif world:
        dist.init_process_group("gloo")
    return Ranks(rank, max(1, world), device)


# ---- Data ------------------------------------------------------------------------------------------------------------


def read_standard_library() -> tuple[Tensor, Tensor]:
    """Return (train, held_out), 1D uint8. The path alone decides a file's side: no machine trains on another's test."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}  # not the library, or not on every machine
    sides = (bytearray(), bytearray())
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if left_out.isdisjoint(name.parts):
            is_held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] % 10 == 0
            sides[is_held_out].extend(path.read_bytes())
    if min(map(len, sides)) < 100_000:
        sys.exit(
            f"only {len(sides[0]):,} bytes to train on and {len(sides[1]):,} held out among the .py files in {root}: "
            "this Python came without the sources of its library. Run with one that has them."
        )
    return torch.frombuffer(sides[0], dtype=torch.uint8), torch.frombuffer(sides[1], dtype=torch.uint8)


def sequences(text: Tensor, starts: Tensor, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets), each [len(starts), context]: the targets are the inputs one byte later."""
    tokens = text.unfold(0, context + 1, 1)[starts].to(device, torch.int64)
    return tokens[:, :-1], tokens[:, 1:]


# ---- Model -----------------------------------------------------------------------------------------------------------


def rotate(x: Tensor) -> Tensor:  # [batch, heads, context, channels]
    """Turn pairs of channels by an angle that grows with the position (RoPE, https://arxiv.org/abs/2104.09864)."""
    context, pairs = x.shape[-2], x.shape[-1] // 2
    speeds = 1e-3 ** (torch.arange(pairs, device=x.device) / pairs)
    angles = torch.outer(torch.arange(context, device=x.device), speeds)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        for out in (self.attention_out, self.mlp_out):
            # 2 * layers of these are added up: smaller ones keep the sum's variance the same at any depth.
            nn.init.normal_(out.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, x: Tensor) -> Tensor:  # [batch, context, width]
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(VOCAB, width)
        self.blocks = nn.Sequential(*(Block(layers, width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:  # both [batch, context] int64
        logits = self.head(self.norm(self.blocks(self.bytes(tokens)))).float()  # [batch, context, VOCAB]
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: GPT, text: Tensor, ranks: Ranks) -> float:
    """Mean nats per byte over sequences spread evenly over the held-out text; each rank reads its share of them."""
    starts = torch.linspace(0, len(text) - model.context - 1, EVAL_WINDOWS).long()[ranks.rank :: ranks.world]
    total = torch.zeros((), device=ranks.device)
    for part in starts.split(32):
        total += model(*sequences(text, part, model.context, ranks.device)) * len(part)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / EVAL_WINDOWS


@torch.no_grad()
def write_sample(model: GPT, device: torch.device, prompt: bytes = b"\n\ndef ", length: int = 400) -> str:
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(length):
        logits = model(tokens[:, -model.context :])[:, -1] / 0.7  # below 1: rather likely bytes than odd ones
        tokens = torch.cat((tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)), dim=1)
    return bytes(tokens[0].tolist()).decode("ascii", errors="replace").strip()


# ---- Training --------------------------------------------------------------------------------------------------------


def learning_rate_factor(step: int, steps: int) -> float:
    """Warm up over the first twentieth, along a cosine that ends at zero."""
    return min(1.0, 20 * (step + 1) / steps) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def make_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2]},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    if args.optimizer == "torch":
        opt = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    else:
        opt = shardopt.ShardedAdamW(
            groups,
            lr=args.lr,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            module=model,
            stage=args.stage,
            offload=args.offload,
            master=args.master,
            state_format=args.state_format,
            gradient_format=args.gradient_format,
            tuning=shardopt.Tuning(seed=args.seed),
        )
    return opt


class Progress:
    """The steps so far: their losses, their time without the evaluations, and the bar that shows both on rank 0."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, evaluate: Callable[[], float]) -> None:
        self.args, self.ranks, self.evaluate = args, ranks, evaluate
        self.step, self.is_over = 0, False
        self.unread: list[Tensor] = []  # losses are read some at a time, since reading one waits for the device
        self.train: list[tuple[int, float]] = []
        self.held_out = [(0, evaluate())]
        self.bar = tqdm(total=args.steps, unit="step", mininterval=0.5, disable=ranks.rank != 0)
        self.seconds, self.resumed = 0.0, time.perf_counter()

    @property
    def tokens_per_second(self) -> float:
        return self.step * self.args.batch * self.args.context / self.seconds

    def note(self, loss: Tensor) -> None:
        self.step += 1
        self.bar.update()
        self.unread.append(loss.detach())
        is_milestone = self.step % math.ceil(self.args.steps / 6) == 0 or self.step == self.args.steps
        if is_milestone or self.step % 10 == 0:
            self.read(is_milestone)

    def read(self, is_milestone: bool) -> None:
        loss = torch.stack(self.unread).mean().item()
        self.unread.clear()
        self.seconds += time.perf_counter() - self.resumed
        # The ranks decide together: one that stopped by its own clock would leave the others waiting for it.
        said = torch.tensor((loss, self.seconds / self.args.seconds), device=self.ranks.device) / self.ranks.world
        if dist.is_initialized():
            dist.all_reduce(said)
        mean_loss, time_used = said.tolist()
        self.is_over = self.step == self.args.steps or time_used >= 1
        self.train.append((self.step, mean_loss))
        if is_milestone or self.is_over:
            self.held_out.append((self.step, self.evaluate()))
        self.bar.set_postfix_str(
            f"loss {mean_loss:.3f}, held out {self.held_out[-1][1]:.3f}, {self.tokens_per_second:,.0f} tokens/s"
        )
        if self.is_over:
            self.bar.close()
        self.resumed = time.perf_counter()


def train(args: argparse.Namespace, ranks: Ranks) -> dict:
    """Return the run as `report` tells it: its options, its losses, its bytes, a sample of its writing."""
    text, held_out_text = read_standard_library()
    if args.context >= len(held_out_text):
        sys.exit(f"--context {args.context} is longer than the {len(held_out_text):,} bytes held out")
    torch.manual_seed(args.seed)
    model = GPT(args.context, args.layers, args.width, args.heads)
    model.to(ranks.device, torch.bfloat16 if args.dtype == "bf16" else torch.float32)
    ddp = DistributedDataParallel(model) if dist.is_initialized() else model
    opt = make_optimizer(args, ddp)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: learning_rate_factor(step, args.steps))

    numel = sum(p.numel() for p in model.parameters())
    if ranks.rank == 0:
        print(
            f"{numel:,} {args.dtype} params, AdamW of {args.optimizer}"
            f"{f' at stage {args.stage}' if args.optimizer == 'shardopt' else ''}, {ranks.world} rank(s) on "
            f"{ranks.device.type}; "
            f"{len(text) / 1e6:.1f} MB of Python to train on, {len(held_out_text) / 1e6:.1f} MB held out",
            flush=True,
        )
    sampler = torch.Generator().manual_seed(args.seed)
    progress = Progress(args, ranks, lambda: held_out_loss(model, held_out_text, ranks))
    while not progress.is_over:
        starts = torch.randint(len(text) - args.context, (args.batch,), generator=sampler)
        mine = starts.tensor_split(ranks.world)[ranks.rank]
        opt.zero_grad()
        loss = ddp(*sequences(text, mine, args.context, ranks.device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        scheduler.step()
        progress.note(loss)

    return {
        "options": vars(args) | {"out": str(args.out)},
        "world": ranks.world,
        "device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "params": numel,
        "steps": progress.step,
        "seconds": progress.seconds,
        "tokens_per_second": progress.tokens_per_second,
        "train": progress.train,
        "held_out": progress.held_out,
        "memory": memory(opt, ddp),
        "sample": sample(opt, model, ranks),
    }


def sample(opt: torch.optim.Optimizer, model: GPT, ranks: Ranks) -> str:
    """Some text, written on rank 0 alone. At stage 3 that takes whole params."""
    whole = opt.unsharded() if isinstance(opt, shardopt.ShardedOptimizer) else contextlib.nullcontext()
    with whole:
        return write_sample(model, ranks.device) if ranks.rank == 0 else ""


# ---- Report ----------------------------------------------------------------------------------------------------------


def memory(opt: torch.optim.Optimizer, ddp: nn.Module) -> dict[str, tuple[int, int]]:
    """Return kind -> bytes on this rank: (of this run, of DDP + torch.optim.AdamW); what is on a disk in rows apart."""
    params = list(ddp.parameters())
    held = sum(p.nbytes for p in params)
    # Two states in the param's own dtype, and a step count of 4 bytes for each param.
    torchs = {"param": held, "gradient": held, "master": 0, "state": 2 * held + 4 * len(params), "buffer": 0}
    if isinstance(opt, torch.optim.AdamW):
        ours = torchs | {"state": sum(tensor.nbytes for state in opt.state.values() for tensor in state.values())}
    else:
        ours = {}
        for kind, tiers in opt.memory().items():
            ours[kind] = sum(count for tier, count in tiers.items() if tier != "disk")
            if "disk" in tiers:
                ours[f"({kind}, on disk)"] = tiers["disk"]
    # DDP reduces copies of the gradients; a module that was handed over has none.
    buckets = held if isinstance(ddp, DistributedDataParallel) else 0
    left = buckets if isinstance(opt, torch.optim.AdamW) else 0
    return {kind: (count, torchs.get(kind, 0)) for kind, count in ours.items()} | {"DDP buckets": (left, buckets)}


def memory_table(run: dict) -> Table:
    table = Table(title=f"Bytes per param on rank 0 of {run['world']}, params in {run['options']['dtype']}")
    table.add_column("kind")
    for heading in (run["options"]["optimizer"], "MiB", "DDP + torch.optim.AdamW", "MiB"):
        table.add_column(heading, justify="right")

    def add_row(kind: str, pair: Iterable[int]) -> None:
        table.add_row(kind, *(cell for b in pair for cell in (f"{b / run['params']:.2f}", f"{b / 2**20:.2f}")))

    for kind, pair in run["memory"].items():
        add_row(kind, pair)
    table.add_section()
    in_memory = [pair for kind, pair in run["memory"].items() if not kind.endswith("on disk)")]
    add_row("total in memory", map(sum, zip(*in_memory, strict=True)))
    if run["options"]["dtype"] == "bf16":
        table.caption = "torch.optim.AdamW keeps no fp32 master of a bf16 param, and its states in bf16"
    return table


def plot_losses(run: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # there may be no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*run["train"], strict=True), linewidth=1, label="train")
    axes.plot(*zip(*run["held_out"], strict=True), marker="o", label="held out")
    axes.set(xlabel="step", ylabel="nats per byte", title=f"{run['options']['optimizer']}, {run['world']} rank(s)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def report(run: dict, out: Path) -> None:
    console = Console(highlight=False, markup=False)
    console.rule("what the model writes")
    console.print(run["sample"])
    console.rule()
    console.print(memory_table(run))
    first, last = run["held_out"][0][1], run["held_out"][-1][1]
    console.print(
        f"held-out loss {first:.3f} -> {last:.3f} nats/byte ({last / math.log(2):.3f} bits/byte) after {run['steps']} "
        f"steps, {run['seconds']:.0f} s, {run['tokens_per_second']:,.0f} tokens/s",
        soft_wrap=True,
    )
    out.mkdir(parents=True, exist_ok=True)
    plot_losses(run, out / "loss.png")
    (out / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    console.print(f"written: {out / 'loss.png'}, {out / 'run.json'}", soft_wrap=True)


def main() -> None:
    args = parse_args()
    ranks = start_ranks()
    if args.batch % ranks.world:
        sys.exit(f"--batch {args.batch} cannot be shared evenly by {ranks.world} ranks: make it a multiple of them")
    try:
        run = train(args, ranks)
        if dist.is_initialized():
            # gloo's threads hold the tensors of a collective a little longer than the call: a rank that left Python
            # at once would be aborted by them.
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if ranks.rank == 0:
        report(run, args.out)
        if args.optimizer == "shardopt" and ranks.device.type == "cpu":
            # This run used the native twin of the Triton kernel: show that the two agree in every bit.
            sys.exit(subprocess.run([sys.executable, "-m", "shardopt", "twins"]).returncode)


if __name__ == "__main__":
    main()

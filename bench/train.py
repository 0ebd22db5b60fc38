"""One training step of a GPT under every way to share its optimizer: time, optimizer part, peak memory.

    python bench/train.py                                   2 gloo ranks of one thread, or a rank on each GPU
    python bench/train.py --dtype bf16
    python bench/train.py --engines ddp zero shardopt-1     only these; `ddp` is always the 1.0
    python bench/train.py --quick --layers 2 --width 128    does it run?

Every engine lives in processes of its own and sleeps while another one takes its turn; a round gives each engine one
turn. So a ratio compares steps that were taken within seconds of each other, and memory is that of one engine alone.

* `step`: forward, backward and update, from a barrier on; the slowest rank counts.
* `optimizer`: `optimizer.step()` alone, from a barrier on; for ZeRO-1 that holds the gathering of the params.
* `peak`: the most bytes that a rank's process held while stepping, above what it held before the model was built (all
  libraries loaded, kernels compiled, one step of a small model taken), for each param of the model: weights,
  gradients, buckets, states, activations. `at first`: the same, from the building of the model through its first steps.
* bf16: params and gradients in bf16. Engines marked `no masters` update bf16 weights with bf16 states, which loses
  small updates; those of shardopt and DeepSpeed keep fp32 masters and states.
"""

import argparse
import contextlib
import ctypes
import gc
import importlib.util
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Median, describe_machine, median_of, parser_of, pick_device, ratios, show, write_result
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import shardopt
from shardopt.partition.layout import BucketLayout, split_into_buckets

LR = 3e-4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BATCHES = 8  # taken in turn, so that the loss goes down where an engine trains at all
# Engines in fp32 do the same arithmetic up to the order of sums; training makes that grow, but not to this.
LOSS_TOLERANCE = 0.02


# ---- The model -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, context, width]
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        x = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x


class GPT(nn.Module):
    """Tokens to loss."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, context + 1] int64
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


# ---- Engines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What every rank of every engine is told."""

    ranks: int
    threads: int
    device: str  # type only: a rank takes the GPU of its number
    dtype: str
    layers: int
    width: int
    heads: int
    vocab: int
    batch: int
    context: int
    burst: int
    seed: int

    def model(self, small: bool = False) -> GPT:
        layers, width, vocab = (1, 64, 256) if small else (self.layers, self.width, self.vocab)
        heads = 2 if small else self.heads
        torch.manual_seed(self.seed)
        return GPT(layers, width, heads, vocab, self.context)


def _backward(loss: Tensor) -> None:
    loss.backward()


@dataclass(frozen=True)
class Engine:
    """How one engine trains a model."""

    forward: Callable[[Tensor], Tensor]
    update: Callable[[], Any]
    zero_grad: Callable[[], Any]
    backward: Callable[[Tensor], Any] = _backward
    memory: Callable[[], dict[str, dict[str, int]]] | None = None  # shardopt's account of itself


Make = Callable[[GPT, Settings], Engine]


def _ddp(model: GPT) -> DistributedDataParallel:
    return DistributedDataParallel(model)


def make_ddp(model: GPT, settings: Settings) -> Engine:
    ddp = _ddp(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=LR, fused=True)
    return Engine(ddp, optimizer.step, optimizer.zero_grad)


def make_zero_redundancy(model: GPT, settings: Settings) -> Engine:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = _ddp(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.AdamW, lr=LR, fused=True)
    return Engine(ddp, optimizer.step, optimizer.zero_grad)


def make_fsdp2(model: GPT, settings: Settings) -> Engine:
    return _fsdp2(model, settings, {})


def make_fsdp2_masters(model: GPT, settings: Settings) -> Engine:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=DTYPES[settings.dtype], reduce_dtype=DTYPES[settings.dtype])
    return _fsdp2(model.float(), settings, {"mp_policy": policy})


def _fsdp2(model: GPT, settings: Settings, keywords: dict[str, Any]) -> Engine:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(settings.device, (settings.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **keywords)
    fully_shard(model, mesh=mesh, **keywords)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return Engine(model, optimizer.step, optimizer.zero_grad)


def make_shardopt(stage: int) -> Make:
    def make(model: GPT, settings: Settings) -> Engine:
        ddp = _ddp(model)
        optimizer = shardopt.ShardedAdamW(ddp.parameters(), lr=LR, stage=stage)
        return Engine(ddp, optimizer.step, optimizer.zero_grad, memory=optimizer.memory)

    return make


def make_handed_over(stage: int, wrapped: bool, **keywords: Any) -> Make:
    def make(model: GPT, settings: Settings) -> Engine:
        module = _ddp(model) if wrapped else model
        optimizer = shardopt.ShardedAdamW(module, lr=LR, stage=stage, **keywords)
        return Engine(module, optimizer.step, optimizer.zero_grad, memory=optimizer.memory)

    return make


def make_offloaded(stage: int, offload: str) -> Make:
    """``offload``: "cpu", or "disk" for the system's temporary directory."""

    def make(model: GPT, settings: Settings) -> Engine:
        where = tempfile.gettempdir() if offload == "disk" else offload
        optimizer = shardopt.ShardedAdamW(_ddp(model), lr=LR, stage=stage, offload=where)
        return Engine(optimizer.options.module, optimizer.step, optimizer.zero_grad, memory=optimizer.memory)

    return make


def make_deepspeed(stage: int, offload: bool = False) -> Make:
    """``offload``: states in host memory, stepped by DeepSpeed's own CPU Adam."""

    def make(model: GPT, settings: Settings) -> Engine:
        import deepspeed

        warnings.simplefilter("ignore")  # about calls of its own; this process runs nothing else
        deepspeed.logger.setLevel("ERROR")
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": settings.batch,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": settings.dtype == "bf16"},
            "zero_allow_untested_optimizer": True,
        }
        if offload:
            config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}}
            optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=LR, weight_decay=0.01)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return Engine(engine, engine.step, lambda: None, backward=engine.backward)

    return make


@dataclass(frozen=True)
class Offer:
    """A line of the table."""

    title: str
    make: Make
    dtypes: Sequence[str] = ("fp32", "bf16")
    has_masters: bool = True
    package: str = "torch"  # that must be installed
    stage: int | None = None  # of shardopt
    is_extra: bool = False  # left out unless it is asked for


SMALL = {"master": "split24", "state_format": "int8"}
ENGINES = {
    "ddp": Offer("DDP + torch fused AdamW", make_ddp, has_masters=False),
    "zero": Offer("DDP + ZeroRedundancyOptimizer (fused AdamW)", make_zero_redundancy, has_masters=False),
    "fsdp2": Offer("FSDP2 + torch fused AdamW", make_fsdp2, has_masters=False),
    "fsdp2-masters": Offer("FSDP2, fp32 params, bf16 compute", make_fsdp2_masters, dtypes=("bf16",)),
    "deepspeed-1": Offer("DeepSpeed stage 1", make_deepspeed(1), package="deepspeed"),
    "deepspeed-2": Offer("DeepSpeed stage 2", make_deepspeed(2), package="deepspeed"),
    "deepspeed-3": Offer("DeepSpeed stage 3", make_deepspeed(3), package="deepspeed"),
    "shardopt-0": Offer("DDP + shardopt stage 0", make_shardopt(0), stage=0),
    "shardopt-1": Offer("DDP + shardopt stage 1", make_shardopt(1), stage=1),
    "module-0": Offer("shardopt stage 0, DDP module handed over", make_handed_over(0, wrapped=True), stage=0),
    "module-1": Offer("shardopt stage 1, DDP module handed over", make_handed_over(1, wrapped=True), stage=1),
    "module-2": Offer("shardopt stage 2, DDP module handed over", make_handed_over(2, wrapped=True), stage=2),
    "module-3": Offer("shardopt stage 3, plain module handed over", make_handed_over(3, wrapped=False), stage=3),
    "small": Offer(
        "shardopt stage 1, split24 masters, int8 states",
        make_handed_over(1, wrapped=False, **SMALL),
        dtypes=("bf16",),
        stage=1,
        is_extra=True,
    ),
    "small-released": Offer(
        "the same, gradients released",
        make_handed_over(1, wrapped=False, **SMALL, release_gradients=True),
        dtypes=("bf16",),
        stage=1,
        is_extra=True,
    ),
    "module-2-cpu": Offer(
        "shardopt stage 2, states offloaded to host memory", make_offloaded(2, "cpu"), stage=2, is_extra=True
    ),
    "module-2-disk": Offer(
        "shardopt stage 2, states offloaded to disk", make_offloaded(2, "disk"), stage=2, is_extra=True
    ),
    "deepspeed-2-offload": Offer(
        "DeepSpeed stage 2, states offloaded to its CPU Adam",
        make_deepspeed(2, offload=True),
        package="deepspeed",
        is_extra=True,
    ),
}


# ---- Memory ----------------------------------------------------------------------------------------------------------


class Memory:
    """Bytes that this process holds, now and at its peak: resident ones, or on a GPU those of torch's allocator."""

    def __init__(self, device: torch.device):
        self._device = device
        self._base = 0

    def start(self) -> None:
        """Counts from here on."""
        gc.collect()
        self._return_free_pages()
        self._base = self._read("VmRSS")
        self.restart_peak()

    def restart_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM

    def peak(self) -> int | None:
        """None where the system keeps no peak that can be reset."""
        if self._device.type != "cuda" and sys.platform != "linux":
            return None
        return self._read("VmHWM") - self._base

    def _read(self, key: str) -> int:
        if self._device.type == "cuda":
            peak = key == "VmHWM"
            return (torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated)(self._device)
        if sys.platform != "linux":
            return 0
        found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0

    def _return_free_pages(self) -> None:
        # What malloc keeps of the warm-up would hide as much of the model's memory.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


# ---- One rank of one engine ------------------------------------------------------------------------------------------


class Rank:
    """Builds the model under its engine and takes turns when told."""

    def __init__(self, name: str, rank: int, settings: Settings):
        self.make = ENGINES[name].make
        self.rank, self.settings = rank, settings
        self.device = torch.device(settings.device, rank) if settings.device == "cuda" else torch.device("cpu")
        self.losses: list[float] = []
        self.memory = Memory(self.device)
        self._train_small_model()
        self.memory.start()
        self.engine = self._engine(small=False)
        self.batches = self._batches(settings.vocab)
        for _ in range(2):
            self.take_turn()
        self.first_peak = self.memory.peak()
        self.memory.restart_peak()

    def _engine(self, small: bool) -> Engine:
        model = self.settings.model(small).to(self.device, DTYPES[self.settings.dtype])
        return self.make(model, self.settings)

    def _batches(self, vocab: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.settings.seed + 1 + self.rank)
        shape = (self.settings.batch, self.settings.context + 1)
        return [torch.randint(vocab, shape, generator=generator).to(self.device) for _ in range(BATCHES)]

    def _train_small_model(self) -> None:
        """Loads every library and compiles every kernel, so that the peak holds only what the model brings."""
        engine = self._engine(small=True)
        for tokens in self._batches(vocab=256)[:2]:
            engine.backward(engine.forward(tokens))
            engine.update()
            engine.zero_grad()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _forward_and_backward(self) -> Tensor:
        self.engine.zero_grad()
        loss = self.engine.forward(self.batches[len(self.losses) % BATCHES])
        self.engine.backward(loss)
        return loss.detach()

    def take_turn(self) -> dict[str, float]:
        """Seconds of a whole step and of the update, each the mean of a burst."""
        dist.barrier()
        start = self._now()
        losses = []
        for _ in range(self.settings.burst):
            losses.append(self._forward_and_backward())
            self.engine.update()
            self.losses.append(0.0)
        step = (self._now() - start) / self.settings.burst
        update = 0.0
        for _ in range(self.settings.burst):
            losses.append(self._forward_and_backward())
            self._now()  # a GPU is still busy with backward
            dist.barrier()
            start = self._now()
            self.engine.update()
            update += self._now() - start
            self.losses.append(0.0)
        self.losses[-len(losses) :] = [self._mean_over_ranks(loss) for loss in losses]
        self.engine.zero_grad()  # others take their turn now, and need the memory
        return {"step": step, "update": update / self.settings.burst}

    def _mean_over_ranks(self, loss: Tensor) -> float:
        total = loss.float().clone()
        dist.all_reduce(total)
        return float(total) / self.settings.ranks

    def report(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "first peak": self.first_peak,
            "peak": self.memory.peak(),
            "memory": self.engine.memory() if self.engine.memory else None,
        }


def run_rank(name: str, rank: int, settings: Settings, store: str, pipe: Connection) -> None:
    """The process of one rank: answers "turn" and "report" until the pipe closes."""
    try:
        torch.set_num_threads(settings.threads)
        # All ranks are on this machine, whose name need not resolve; DeepSpeed reads the rank from here.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(settings.ranks))
        if settings.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        device = torch.device("cuda", rank) if settings.device == "cuda" else None
        if device is not None:
            torch.cuda.set_device(device)
        backend = "nccl" if device is not None else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=settings.ranks, device_id=device
        )
        worker = Rank(name, rank, settings)
        pipe.send(("ready", None))
        answers: dict[str, Callable[[], Any]] = {"turn": worker.take_turn, "report": worker.report}
        while (request := pipe.recv()) != "end":
            pipe.send(("done", answers[request]()))
        dist.destroy_process_group()
    except EOFError:
        pass  # the parent is gone
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


# ---- The rounds ------------------------------------------------------------------------------------------------------


class EngineFailed(Exception):
    pass


@dataclass
class Team:
    """All ranks of one engine, seen from the parent."""

    name: str
    processes: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    turns: list[dict[str, float]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)

    def start(self, settings: Settings, directory: str) -> None:
        context = multiprocessing.get_context("spawn")  # a forked child would inherit torch's threads half-alive
        for rank in range(settings.ranks):
            ours, theirs = context.Pipe()
            arguments = (self.name, rank, settings, f"{directory}/{self.name}", theirs)
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        self._answers()

    def ask(self, request: str) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(request)
        return self._answers()

    def _answers(self) -> list[Any]:
        """One from each rank. The first that fails ends the wait: the others may be waiting for it."""
        answers: dict[int, Any] = {}
        waiting = dict(enumerate(self.pipes))
        while waiting:
            for ready in multiprocessing.connection.wait(list(waiting.values())):
                rank = next(rank for rank, pipe in waiting.items() if pipe is ready)
                try:
                    kind, answer = waiting.pop(rank).recv()
                except EOFError:
                    kind, answer = "failed", "the process ended"
                if kind == "failed":
                    raise EngineFailed(f"{self.name}, rank {rank}: {answer}")
                answers[rank] = answer
        return [answers[rank] for rank in range(len(self.pipes))]

    def take_turn(self) -> None:
        answers = self.ask("turn")
        self.turns.append({key: max(answer[key] for answer in answers) for key in answers[0]})

    def seconds(self, key: str) -> list[float]:
        return [turn[key] for turn in self.turns]

    def dismiss(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a rank that failed has closed its end
                pipe.send("end")

    def join(self) -> None:
        for process in self.processes:
            process.join(10)
            if process.is_alive():  # waits for a rank that failed
                process.terminate()


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__ or "")
    titles = "; ".join(f"{name}: {offer.title}" for name, offer in ENGINES.items())
    usual = [name for name, offer in ENGINES.items() if not offer.is_extra]
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES], default=usual, metavar="ENGINE", help=titles)
    parser.add_argument("--dtype", choices=[*DTYPES], default="fp32", help="of params, gradients and activations")
    parser.add_argument("--ranks", type=int, default=None, help="processes an engine (default: all GPUs, else 2)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the model lies")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each engine")
    parser.add_argument(
        "--burst", type=int, default=None, help="steps in each half of a turn (default: 5 on a GPU, else 1)"
    )
    parser.add_argument("--layers", type=int, default=8, help="blocks of the GPT")
    parser.add_argument("--width", type=int, default=512, help="channels")
    parser.add_argument("--heads", type=int, default=8, help="attention heads")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens")
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank")
    parser.add_argument("--context", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the data")
    args = parser.parse_args()
    device = pick_device(args.device)
    on_gpu = device.type == "cuda"
    args.device = device.type
    args.ranks = args.ranks or (torch.cuda.device_count() if on_gpu else 2)
    args.burst = args.burst or (5 if on_gpu else 1)
    if args.quick:
        args.rounds = min(args.rounds, 5)
    for name in ("ranks", "threads", "rounds", "burst", "layers", "width", "heads", "vocab", "batch", "context"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    if on_gpu and args.ranks > torch.cuda.device_count():
        parser.error(f"--ranks {args.ranks}: a rank needs a GPU of its own, and there are {torch.cuda.device_count()}")
    if "ddp" not in args.engines:
        args.engines = ["ddp", *args.engines]  # the 1.0
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})


def is_offered(name: str, dtype: str) -> bool:
    return dtype in ENGINES[name].dtypes and importlib.util.find_spec(ENGINES[name].package) is not None


def run_rounds(args: argparse.Namespace, settings: Settings) -> tuple[list[Team], dict[str, str]]:
    """Every engine's turns and reports, and why some have none."""
    teams: list[Team] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        try:
            names = [name for name in args.engines if is_offered(name, args.dtype)]
            for name in tqdm(names, desc="building", unit="engine", disable=None):
                team = Team(name)
                try:
                    team.start(settings, directory)
                    teams.append(team)
                except EngineFailed as error:
                    team.dismiss()
                    team.join()
                    failed[name] = str(error)
            for number in tqdm(range(args.rounds), desc="rounds", unit="round", disable=None):
                # Each engine comes first as often as any other.
                for index in range(len(teams)):
                    teams[(number + index) % len(teams)].take_turn()
            for team in teams:
                team.reports = team.ask("report")
        finally:
            for team in teams:
                team.dismiss()
            for team in teams:
                team.join()
    return teams, failed


# ---- Report ----------------------------------------------------------------------------------------------------------


def largest(reports: Sequence[dict[str, Any]], key: str, numel: int) -> float | None:
    """Bytes a param on the rank that needs most."""
    values = [report[key] for report in reports]
    return None if None in values else max(values) / numel


def states_against_formula(team: Team, settings: Settings, numel: int) -> dict[str, float] | None:
    """Masters and states as shardopt counts them, beside what ZeRO's formula asks for, in bytes a param."""
    stage = ENGINES[team.name].stage
    if stage is None:
        return None
    memories = [{kind: sum(tiers.values()) for kind, tiers in report["memory"].items()} for report in team.reports]
    measured = max(memory["master"] + memory["state"] for memory in memories) / numel
    formula = (8 if settings.dtype == "fp32" else 12) / (settings.ranks if stage >= 1 else 1)
    kinds = {kind: max(memory[kind] for memory in memories) / numel for kind in memories[0] if kind != "gradient"}
    return {**kinds, "masters and states": measured, "formula": formula, "padding": measured / formula - 1}


def padding_at(ranks: int, model: GPT) -> float:
    """Part by which the states of a stage-1 run on so many ranks exceed an equal share; integers alone tell."""
    numels = [param.numel() for param in reversed(list(model.parameters()))]
    held = 0
    for indices in split_into_buckets(
        [4 * numel for numel in numels], shardopt.Tuning().bucket_bytes_of(torch.device("cpu"), has_module=False)
    ):
        held += BucketLayout(tuple(numels[index] for index in indices), ranks).shard_numel * ranks
    return held / sum(numels) - 1


def summarise(team: Team, baseline: Team, settings: Settings, numel: int) -> dict[str, Any]:
    losses, right = team.reports[0]["losses"], baseline.reports[0]["losses"]
    return {
        "title": ENGINES[team.name].title,
        "masters": settings.dtype == "fp32" or ENGINES[team.name].has_masters,
        "step s": median_of(team.seconds("step")),
        "step x DDP": ratios(team.seconds("step"), baseline.seconds("step")),
        "optimizer s": median_of(team.seconds("update")),
        "optimizer x DDP": ratios(team.seconds("update"), baseline.seconds("update")),
        "peak bytes a param": largest(team.reports, "peak", numel),
        "peak bytes a param at first": largest(team.reports, "first peak", numel),
        "states": states_against_formula(team, settings, numel),
        "first loss": losses[0],
        "last loss": losses[-1],
        "largest loss difference to DDP": max(abs(a - b) / abs(b) for a, b in zip(losses, right, strict=True)),
    }


def compare(teams: Sequence[Team], one: str, other: str) -> dict[str, Median] | None:
    """Ratios of two engines, round by round."""
    by_name = {team.name: team for team in teams}
    if one not in by_name or other not in by_name:
        return None
    return {key: ratios(by_name[one].seconds(key), by_name[other].seconds(key)) for key in ("step", "update")}


def table_row(row: dict[str, Any]) -> list[str]:
    def number(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.1f}"

    states = row["states"]
    return [
        row["title"] + ("" if row["masters"] else ", no masters"),
        f"{row['step s'].median * 1e3:.4g}",
        str(row["step x DDP"]),
        f"{row['optimizer s'].median * 1e3:.3g}",
        number(row["peak bytes a param"]),
        number(row["peak bytes a param at first"]),
        f"{states['masters and states']:.3f} ({states['formula']:.3g})" if states else "",
        f"{row['last loss']:.4f}",
    ]


def main() -> None:
    args = parse_args()
    device, settings = pick_device(args.device), settings_of(args)
    with torch.device("meta"):
        model = settings.model()
    numel = sum(param.numel() for param in model.parameters())
    teams, failed = run_rounds(args, settings)
    baseline = next((team for team in teams if team.name == "ddp"), None)
    if baseline is None:
        sys.exit(f"the baseline did not run: {failed['ddp']}")
    rows = {team.name: summarise(team, baseline, settings, numel) for team in teams}
    against_zero = compare(teams, "shardopt-1", "zero")
    padding = padding_at(8, model)

    where = f"{describe_machine(device)['device']}, {settings.ranks} ranks of {settings.threads} threads"
    columns = (
        "engine",
        "step ms",
        "x DDP",
        "optimizer ms",
        "peak B/param",
        "at first",
        "states B/param (formula)",
        "loss",
    )
    show(f"{where}; GPT of {numel / 1e6:.1f}M params, {args.dtype}", columns, [table_row(row) for row in rows.values()])
    if against_zero:
        step, update = against_zero["step"], against_zero["update"]
        print(f"shardopt stage 1 over ZeroRedundancyOptimizer: step {step}, optimizer {update}")
    print(f"padding of masters and states at 8 ranks: {100 * padding:.3f} %")
    for name in args.engines:
        if args.dtype in ENGINES[name].dtypes and name not in rows:
            print(f"{name}: {failed.get(name, 'not installed')}")
    if args.dtype == "fp32":
        for row in rows.values():
            if not row["largest loss difference to DDP"] < LOSS_TOLERANCE:
                print(f"WARNING: the losses of {row['title']} are not those of DDP: it does not train the same way")
    results = {
        "params": numel,
        "engines": rows,
        "shardopt-1 over zero": against_zero,
        "padding at 8 ranks": padding,
        "not run": {name: reason.splitlines()[-1] for name, reason in failed.items()},
        "rounds": {
            team.name: json.loads(json.dumps(team.turns), parse_float=lambda x: float(f"{float(x):.6g}"))
            for team in teams
        },
    }
    ranks = "" if settings.ranks == 2 else f"-{settings.ranks}-ranks"
    write_result(f"train-{args.dtype}{ranks}", args, device, results)


if __name__ == "__main__":
    main()

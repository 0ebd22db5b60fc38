"""The ranks of one engine: processes of their own, which take a turn when they are told and sleep meanwhile."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from engines import ENGINES, Engine
from gpt import DTYPES, Settings
from torch import Tensor

BATCHES = 8  # taken in turn, so that the loss goes down where an engine trains at all


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
        self.first_steps, self.moved_first = len(self.losses), self._moved()
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

    def _moved(self) -> int:
        return 0 if self.engine.moved is None else self.engine.moved()

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
            "moved": (self._moved() - self.moved_first) / max(1, len(self.losses) - self.first_steps) or None,
        }


class Worker(Protocol):
    """What a rank's process asks of its engine."""

    def take_turn(self) -> dict[str, float]: ...

    def report(self) -> dict[str, Any]: ...


def run_rank(
    name: str,
    rank: int,
    settings: Settings,
    store: str,
    pipe: Connection,
    make: Callable[[str, int, Settings], Worker] = Rank,
) -> None:
    """The process of one rank: answers "build", then "turn" and "report", until the pipe closes."""
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
        if pipe.recv() == "end":
            return
        worker = make(name, rank, settings)
        pipe.send(("done", None))
        answers: dict[str, Callable[[], Any]] = {"turn": worker.take_turn, "report": worker.report}
        while (request := pipe.recv()) != "end":
            pipe.send(("done", answers[request]()))
        dist.destroy_process_group()
    except EOFError:
        pass  # the parent is gone
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


class EngineFailed(Exception):
    """An engine has no result: a rank raised an error, ended, or was late."""


@dataclass
class Team:
    """All ranks of one engine, seen from the parent."""

    name: str
    run: Callable[..., None] = run_rank  # in the process of each rank
    executables: Sequence[str] = ()  # by rank: what runs Python for it; none: this Python
    limit: float | None = None  # seconds that an answer of the ranks may take
    processes: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    turns: list[dict[str, float]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)

    def start(self, settings: Settings, directory: str) -> None:
        """Starts the processes, which load their libraries and connect."""
        context = multiprocessing.get_context("spawn")  # a forked child would inherit torch's threads half-alive
        for rank in range(settings.ranks):
            ours, theirs = context.Pipe()
            arguments = (self.name, rank, settings, f"{directory}/{self.name}", theirs)
            process = context.Process(target=self.run, args=arguments, daemon=True)
            context.set_executable(self.executables[rank] if self.executables else sys.executable)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def build(self) -> None:
        """Returns once every rank has built its model and taken its first steps."""
        self.ask("build", 4.0)

    def ask(self, request: str, patience: float = 1.0) -> list[Any]:
        """``patience``: how many times the limit an answer may take."""
        for pipe in self.pipes:
            pipe.send(request)
        return self._answers(None if self.limit is None else patience * self.limit)

    def _answers(self, limit: float | None) -> list[Any]:
        """One from each rank. The first that fails ends the wait: the others may be waiting for it."""
        answers: dict[int, Any] = {}
        waiting = dict(enumerate(self.pipes))
        until = None if limit is None else time.monotonic() + limit
        while waiting:
            left = None if until is None else max(0.0, until - time.monotonic())
            found = multiprocessing.connection.wait(list(waiting.values()), left)
            if not found:
                raise EngineFailed(f"{self.name}: no answer of ranks {sorted(waiting)} in {limit:g} s")
            for ready in found:
                rank = next(rank for rank, pipe in waiting.items() if pipe is ready)
                try:
                    kind, answer = waiting.pop(rank).recv()
                except (EOFError, ConnectionResetError):
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
                process.join()

"""Saving and loading checkpoints, beside writing and reading the same bytes with nothing in between.

    python bench/checkpoint.py --directory /path/on/the/disk     64M params: 768 MiB of params, masters and states

In each round, in turns: a plain file of the same size is written in chunks of 4 MiB and synced; a checkpoint is saved;
one is saved asynchronously, of which the blocking part is taken, beside one copy of the same bytes; the plain file is
read, and a checkpoint is loaded, both from the disk as far as the system drops what it cached. `of disk` is the plain
write's time over the save's, `of reading` the plain read's over the load's.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import Median, median_of, parser_of, pick_device, ratios, show, write_result
from torch import nn
from tqdm import tqdm

import shardopt

CHUNK = 4 << 20


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write_plainly(path: Path, data: memoryview) -> None:
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(data), CHUNK):
            file.write(data[start : start + CHUNK])
        os.fsync(file.fileno())


def read_plainly(path: Path, into: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        for start in range(0, len(into), CHUNK):
            file.readinto(into[start : start + CHUNK])


def drop_cached(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(directory: Path, numel: int, rounds: int) -> dict[str, Median | float]:
    width = 1024
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(numel // width**2)))
    optimizer = shardopt.ShardedAdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    nbytes = 3 * 4 * numel  # params and two states
    source, target = torch.randint(0, 255, (2, nbytes), dtype=torch.uint8)
    plain, save, blocking, copy, read, load = ([] for _ in range(6))
    for number in tqdm(range(rounds + 1), desc="rounds", leave=False):
        times = [
            timed(lambda: write_plainly(directory / "plain", memoryview(source.numpy()))),
            timed(lambda: shardopt.save_checkpoint(directory / "runs", model, optimizer)),
            timed(lambda: target.copy_(source)),
        ]
        start = time.perf_counter()
        saving = shardopt.save_checkpoint(directory / "runs", model, optimizer, asynchronous=True)
        times.append(time.perf_counter() - start)
        saving.wait()
        drop_cached(directory)
        times.append(timed(lambda: read_plainly(directory / "plain", memoryview(target.numpy()))))
        times.append(timed(lambda: shardopt.load_checkpoint(directory / "runs", model, optimizer)))
        shutil.rmtree(directory / "runs")
        (directory / "plain").unlink()
        if number:  # the first one allocates
            for samples, value in zip((plain, save, copy, blocking, read, load), times, strict=True):
                samples.append(value)
    return {
        "bytes": nbytes,
        "plain write, s": median_of(plain),
        "save, s": median_of(save),
        "plain read, s": median_of(read),
        "load, s": median_of(load),
        "of disk": ratios(plain, save),
        "of reading": ratios(read, load),
        "blocking part of a copy": ratios(blocking, copy),
    }


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--numel", type=int, default=64 << 20, help="params")
    parser.add_argument("--rounds", type=int, default=9, help="of which each takes all measurements")
    args = parser.parse_args()
    if args.quick:
        args.numel, args.rounds = 4 << 20, 3
    with tempfile.TemporaryDirectory(prefix="shardopt-bench-", dir=args.directory) as directory:
        results = run(Path(directory), args.numel, args.rounds)
    show("checkpoints on one rank", ["", ""], [[name, str(value)] for name, value in results.items()])
    args.directory = None  # results name no paths
    write_result("checkpoint", args, pick_device("cpu"), results)


if __name__ == "__main__":
    main()

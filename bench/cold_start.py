"""How long a fresh process takes until its first sharded step: imports, then one AdamW step of a small model.

Each sample is a process of its own, with the bytecode that Python keeps beside a package. `import shardopt` is what it
takes beyond `import torch`; the first step holds the import of Numba (or Triton) and the compilation of the kernel, the
second one nothing of the kind.

    python bench/cold_start.py
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from common import ROOT, Median, describe_machine, median_of, parser_of, pick_device, show, write_result
from tqdm import tqdm

CHILD = """
import json, sys, time
marks = [time.perf_counter()]
def mark(): marks.append(time.perf_counter())
import torch
mark()
import shardopt
mark()
dtype = getattr(torch, sys.argv[2])
model = torch.nn.Linear(64, 64, device=sys.argv[1], dtype=dtype)
for param in model.parameters():
    param.grad = torch.ones_like(param)
if sys.argv[1] == "cuda":
    torch.cuda.synchronize()
mark()
optimizer = shardopt.ShardedAdamW(model.parameters())
for _ in range(2):
    optimizer.step()
    if sys.argv[1] == "cuda":
        torch.cuda.synchronize()
    mark()
print(json.dumps([later - earlier for earlier, later in zip(marks, marks[1:])]))
"""
PHASES = ("import torch", "import shardopt", "make a model", "first step", "second step")
# What an issue of the project asks for, in seconds.
GOALS = {"import shardopt": 0.1, "first step": 2.0}


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--samples", type=int, default=10, help="processes to start")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the params")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the step is taken")
    args = parser.parse_args()
    if args.quick:
        args.samples = min(args.samples, 3)
    if args.samples < 1:
        parser.error("--samples must be at least 1")
    return args


def sample(device: str, dtype: str) -> list[float]:
    """Seconds of each phase in one fresh process."""
    with tempfile.TemporaryDirectory() as empty:
        # A kernel that an earlier process compiled would be found on disk.
        environment = {**os.environ, "TRITON_CACHE_DIR": empty, "PYTHONPATH": str(ROOT)}
        # Where it is set, every process compiles our sources anew, which an installed package's are not.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", CHILD, device, dtype]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"a fresh process failed:\n{done.stderr}")
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def main() -> None:
    args = parse_args()
    device = pick_device(args.device)
    sample(device.type, args.dtype)  # brings the files into memory
    samples = [sample(device.type, args.dtype) for _ in tqdm(range(args.samples), unit="process", disable=None)]
    phases: dict[str, Median] = {
        phase: median_of(seconds) for phase, seconds in zip(PHASES, zip(*samples, strict=True), strict=True)
    }
    rows = [
        [phase, str(seconds), f"under {GOALS[phase]} s" if phase in GOALS else ""] for phase, seconds in phases.items()
    ]
    show(f"Cold start on {describe_machine(device)['device']}: seconds", ("phase", "median", "goal"), rows)
    write_result("cold-start", args, device, {"seconds": phases})


if __name__ == "__main__":
    main()

"""Measure an earlier commit as the one at hand: what stand-ins record of its steps, and its host's times.

    PYTHONPATH=. python bench/earlier.py d77e9fe --record DIRECTORY       DIRECTORY/d77e9fe.json for timeline.py
    bash scripts/gpu_without_gpu.sh --null bench/earlier.py d77e9fe --moves
    bash scripts/gpu_without_gpu.sh --null bench/earlier.py f4ce202       its times on a null device

The commit is checked out into a folder of its own, which is removed afterwards. It keeps its package and those
stand-ins that know its insides (kernels, CUDA's names, the group, tensors); all else that measures is lent to it by the
commit at hand. Stand-ins of commits before 6dd78382 count no bytes: ``EDITS`` are the lines in which they tell them,
each of which must be found. Results are written beside those of the commit at hand, with its name in theirs.

An H100 ran d77e9fe and f4ce202: ``bench/timeline.py --held-out DIRECTORY`` compares with what it measured.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STREAMS = "tests/support/streams"
LENT = (
    "bench/timeline.py",
    "bench/host.py",
    *(f"{STREAMS}/{name}.py" for name in ("book", "counts", "operations", "record", "stream")),
    "tests/support/timeline",
    "tests/support/without_gpu",
)
# The disk is in none of the trainings, so its transfers are not written down.
RECORDING = """
    @contextmanager
    def recording(self, larger: int = 1):
        self.book.record = Record(larger)
        try:
            yield self.book.record
        finally:
            self.book.record = None

    def other_thread("""
PINNING = """flags: int) -> int:
        if self.book.record is not None:
            self.book.record.call(self.book.host, "pinning", pinned=nbytes)
"""
STEP = """    reads = [*tables, *used.gradients(spec.grad.itemsize)]
    book.act("step_kernel", reads, writes, cost=Cost(COMPUTE, length(reads) + 2 * length(writes)))
"""
CPU_STEP = """        reads = used.gradients(spec.grad.itemsize)
        book.act("an update on the CPU", reads, writes, book.host, Cost(WORKERS, length(reads) + 2 * length(writes)))
"""
# Of a file: what is there once, and what takes its place.
EDITS = {
    f"{STREAMS}/machine.py": [
        ("import AbstractContextManager, ExitStack", "import AbstractContextManager, ExitStack, contextmanager"),
        ("from .operations import Operations", "from .operations import Operations\nfrom .record import Record"),
        ("\n    def other_thread(", RECORDING),
    ],
    f"{STREAMS}/cuda.py": [
        ("import remote_states, serve", "import remote_states, serve\nfrom shardopt.offload import pinned"),
        ("flags: int) -> int:\n", PINNING),
        ('"cudart": _Runtime', '"cudart": type("_", (_Runtime,), {"book": book})'),
        (
            "        for name, value in",
            '        stack.enter_context(patch.object(pinned, "_PAGE", 1))\n        for name, value in',
        ),
    ],
    f"{STREAMS}/kernels.py": [
        ("import Book, Span, span", "import Book, Span, length, span\nfrom .record import COMPUTE, WORKERS, Cost"),
        ('    book.act("step_kernel", [*tables, *used.gradients(spec.grad.itemsize)], writes)\n', STEP),
        (
            '        book.act("an update on the CPU", used.gradients(spec.grad.itemsize), writes, book.host)\n',
            CPU_STEP,
        ),
    ],
}


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Within, a folder holds the commit, and what it is lent."""
    folder = Path(tempfile.mkdtemp(prefix="earlier-"))
    git = ("git", "-C", str(ROOT), "worktree")
    subprocess.run([*git, "add", "--detach", "--force", str(folder), commit], check=True, capture_output=True)
    try:
        for name in LENT:
            lend(name, folder)
        for name, edits in EDITS.items():
            edit(folder / name, edits)
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def lend(name: str, folder: Path) -> None:
    if (ROOT / name).is_dir():
        shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
    else:
        shutil.copy(ROOT / name, folder / name)


def edit(path: Path, edits: list[tuple[str, str]]) -> None:
    """Raises SystemExit if what is to be replaced is not there once."""
    text = path.read_text()
    for before, after in edits:
        if text.count(before) != 1:
            raise SystemExit(f"edit {path.name} by hand, and EDITS: it has {text.count(before)} times {before!r}.")
        text = text.replace(before, after)
    path.write_text(text)


def run(folder: Path, script: str, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run([sys.executable, f"bench/{script}.py", *arguments], cwd=folder, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what else is given goes to bench/timeline.py, or to bench/host.py")
    parser.add_argument("--record", type=Path, metavar="DIRECTORY", help="only what is recorded of its steps")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results", help="folder of the times")
    args, rest = parser.parse_known_args()
    with checked_out(args.commit) as folder:
        if args.record:
            args.record.mkdir(parents=True, exist_ok=True)
            run(folder, "timeline", "--record", str(args.record.resolve() / f"{args.commit}.json"), *rest)
            return
        run(folder, "host", "--device", "null", "--out", str(folder / "out"), *rest)
        for path in (folder / "out").iterdir():
            shutil.move(path, args.out / path.name.replace("-host-", f"-host-of-{args.commit}-", 1))


if __name__ == "__main__":
    main()

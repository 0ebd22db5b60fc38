"""The file that states rest in: made safely, never taken for another's, gone afterwards; it does not grow."""

import copy
import fcntl
import gc
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from shardopt import OffloadError, ShardedAdam, ShardedAdamW, Tuning
from shardopt.offload.disk.checksum import checksum
from shardopt.offload.disk.file_io import PAGE
from shardopt.offload.disk.pipeline import THREADS
from tests.support.launch import launch
from tests.support.memory import resident
from tests.support.moments import until
from tests.support.scripts import Program
from tests.support.training import raises, raw


def trained(root: Path, numel: int = 3000) -> ShardedAdam:
    param = Parameter(torch.ones(numel))
    optimizer = ShardedAdam([param], offload=root, tuning=Tuning(chunk_bytes=4096))
    param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def folder_of(root: Path) -> Path:
    (folder,) = root.glob("shardopt-*")
    return folder


def opened_in(root: Path) -> int:
    """Descriptors of this process that lead into the folder."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of listdir() itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(Path(each).is_relative_to(root) for each in links)


# -- who may do what ---------------------------------------------------------------------------------------------------


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        optimizer = trained(tmp_path / "made")
    finally:
        os.umask(before)
    folder = folder_of(tmp_path / "made")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder.parent, folder, folder / "states")] == [
        0o700,
        0o700,
        0o600,
    ]
    optimizer.close()
    assert not os.listdir(tmp_path / "made")


def test_a_directory_that_was_made_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be a typing error, or where a disk should have been mounted. One that is there is used silently."""
    trained(tmp_path / "swpa").close()
    (told,) = caplog.messages
    assert f"offload={str(tmp_path / 'swpa')!r} was not there and was made" in told and "typing error" in told
    caplog.clear()
    trained(tmp_path / "swpa").close()
    assert not caplog.messages
    with pytest.raises(OffloadError, match="is not a directory that can be used"):
        trained(tmp_path / "no" / "parent")


def test_a_directory_that_others_can_change_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(OffloadError, match="other users"):
        trained(tmp_path)
    tmp_path.chmod(0o1777)
    trained(tmp_path).close()


def test_two_jobs_in_one_directory(tmp_path: Path) -> None:
    first, second = trained(tmp_path), trained(tmp_path, 4000)
    assert len(os.listdir(tmp_path)) == 2
    kept = second.state_dict()["state"][0]["exp_avg"].clone()
    first.close()
    assert torch.equal(second.state_dict()["state"][0]["exp_avg"], kept)
    second.close()
    assert not os.listdir(tmp_path)


def test_an_optimizer_that_is_dropped_takes_its_file_along(tmp_path: Path) -> None:
    optimizer = trained(tmp_path)
    assert os.listdir(tmp_path)
    del optimizer
    gc.collect()
    assert not os.listdir(tmp_path)


def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    optimizer = trained(tmp_path)
    child = os.fork()
    if not child:  # as a DataLoader's worker that ends, its copy of the optimizer with it
        optimizer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (folder_of(tmp_path) / "states").exists()
    optimizer.close()


def test_a_forked_child_neither_reads_nor_writes(tmp_path: Path) -> None:
    """Nor waits for threads that were left behind; its parent goes on."""
    optimizer = trained(tmp_path)
    (param,) = optimizer.param_groups[0]["params"]
    before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    held = optimizer.state_dict()["state"][0]["exp_avg"]
    uses = (optimizer.step, held.sum, lambda: copy.deepcopy(optimizer.state_dict()), lambda: optimizer.offload("cpu"))
    child = os.fork()
    if not child:
        signal.alarm(60)  # where it waits all the same
        code = 1
        try:
            param.grad = torch.ones_like(param)
            weights = raw(param)
            for use in uses:
                with raises(OffloadError, "fork", "Nothing was read or written"):
                    use()
            assert raw(param) == weights
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before)
    optimizer.step()
    optimizer.close()


# -- what dead runs leave ----------------------------------------------------------------------------------------------

TRAINS = """
import sys, time, torch
from shardopt import ShardedAdam
param = torch.nn.Parameter(torch.ones(3000))
optimizer = ShardedAdam([param], offload=sys.argv[1])
param.grad = torch.ones_like(param)
optimizer.step()
print("ready", flush=True)
time.sleep(600)
"""


def killed(root: Path, living: Callable[[Path], None] = lambda left: None) -> Path:
    """The folder of a run that was killed; ``living`` sees it before."""
    (root.parent / "trains.py").write_text(TRAINS)
    run = Program(str(root.parent / "trains.py"), (str(root),))
    end = time.monotonic() + 300
    while run.printed() != "ready\n" and time.monotonic() < end:
        time.sleep(0.01)
    left = folder_of(root)
    living(left)
    run.process.kill()
    assert run.wait().returncode == -signal.SIGKILL and (left / "states").stat().st_size > PAGE
    return left


def test_the_next_run_reclaims_what_a_killed_one_left(tmp_path: Path) -> None:
    root, kept = tmp_path / "states", []

    def trains_beside(left: Path) -> None:
        kept.append(trained(root))
        assert left.exists()  # its owner lives

    left = killed(root, trains_beside)
    next_one = trained(root)
    assert not left.exists() and len(os.listdir(root)) == 2
    kept[0].close()
    next_one.close()


def test_the_number_of_a_process_serves_where_there_are_no_locks(tmp_path: Path) -> None:
    optimizer = trained(tmp_path)
    assert optimizer.engine.domain is not None
    fcntl.flock(cast(Any, optimizer.engine.domain.store)._file.fd, fcntl.LOCK_UN)
    left = folder_of(tmp_path)
    trained(tmp_path).close()
    assert left.exists()
    optimizer.close()


def test_a_lock_serves_where_the_number_of_a_process_says_nothing(tmp_path: Path) -> None:
    """A child that was forked, or a process in another container, holds the file of one that is not to be seen."""
    optimizer = trained(tmp_path)
    left = folder_of(tmp_path)
    gone = os.fork() or os._exit(0)
    os.waitpid(gone, 0)
    header = (left / "states").read_bytes()[:PAGE].rstrip(b"\0")
    told = header.replace(b'"pid": %d' % os.getpid(), b'"pid": %d' % gone)
    with open(left / "states", "r+b") as file:
        file.write(told.ljust(PAGE, b"\0"))
    trained(tmp_path).close()
    assert left.exists() and told != header
    optimizer.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(OffloadError, match="owner 12345"):
        trained(tmp_path)
    os.chown(tmp_path, 0, -1)


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """Traps that look like leftovers."""
    tmp_path = tmp_path / "states"
    model = killed(tmp_path)
    header = (model / "states").read_bytes()
    precious = tmp_path / "precious"
    precious.write_bytes(header)

    def trap(number: int, mode: int = 0o700) -> Path:
        folder = tmp_path / f"shardopt-{number:032x}"
        folder.mkdir(mode)
        folder.chmod(mode)
        return folder

    def owned(number: int) -> bytes:
        return header.replace(model.name.encode(), f"shardopt-{number:032x}".encode())

    (trap(1) / "states").symlink_to(precious)
    os.link(precious, trap(2) / "states")
    os.mkfifo(trap(3) / "states")
    (trap(4) / "states").write_bytes(header)  # another run's
    (trap(5) / "states").write_bytes(b"notes")
    for number in (4, 5):  # or their modes would save them
        (tmp_path / f"shardopt-{number:032x}" / "states").chmod(0o600)
    (trap(6, 0o755) / "states").write_bytes(owned(6))
    with_notes = trap(7)
    (with_notes / "notes").write_bytes(b"mine")
    (with_notes / "states").write_bytes(owned(7))
    (with_notes / "states").chmod(0o600)
    (tmp_path / f"shardopt-{8:032x}").symlink_to(tmp_path / f"shardopt-{5:032x}")
    (tmp_path / "shardopt-mine").mkdir()
    (tmp_path / f"shardopt-{9:032x}").write_text("a file")
    trap(10)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    optimizer = trained(tmp_path)
    optimizer.close()
    files = opened_in(tmp_path)
    trained(tmp_path).close()  # which looks at all traps again
    assert opened_in(tmp_path) == files
    after = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    gone = [str(path) for path in before if path not in after]
    assert gone == sorted([model.name, f"{model.name}/states", f"{with_notes.name}/states"])
    assert precious.read_bytes() == header


# -- what it takes -----------------------------------------------------------------------------------------------------


Taken = tuple[int, int, int, int]


def what_steps_take(root: Path, steps: int) -> tuple[Taken, Taken, int]:
    """Descriptors, threads, folders and bytes on the disk before steps and after, and what they add to memory."""

    def reading() -> int:
        return sum(each.name.startswith("shardopt-io") for each in threading.enumerate())

    def taken() -> Taken:
        gc.collect()
        # A pool starts its threads as it needs them, and those of a pool that is closed end a little later.
        until(lambda: reading() <= THREADS, "threads of pools that were closed")
        others = [each for each in threading.enumerate() if not each.name.startswith("shardopt-io")]
        return (
            len(os.listdir("/proc/self/fd")),
            len(others),
            len(os.listdir(root)),
            sum(each.stat().st_size for each in root.glob("*/states")),
        )

    param = Parameter(torch.ones(2000, dtype=torch.bfloat16))
    optimizer = ShardedAdamW([param], offload=root, tuning=Tuning(chunk_bytes=4096))
    param.grad = torch.ones_like(param)

    def train(count: int) -> None:
        for _ in range(count // 10):
            for _ in range(10):
                optimizer.step()
            optimizer.state_dict()
            optimizer.offload("cpu")
            optimizer.reload()

    train(steps // 20)
    before, bytes_before = taken(), resident()
    train(steps)
    after, grown = taken(), resident() - bytes_before
    optimizer.close()
    return before, after, grown


@pytest.mark.parametrize("steps", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_grows_with_the_number_of_steps(steps: int, tmp_path: Path) -> None:
    """In a new process: what the tests before it left may end meanwhile."""
    [(before, after, grown)] = launch(what_steps_take, tmp_path, steps, world=1)
    assert after == before and after[2] == 1
    assert grown < 4 << 20  # 420 bytes a step of 10,000


def what_stays(root: Path) -> tuple[int, int]:
    """Descriptors and threads that 30 optimizers leave."""
    trained(root).close()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(30):
        trained(root).close()
    for thread in [each for each in threading.enumerate() if each.name.startswith("shardopt-io")]:
        thread.join(60)
    return len(os.listdir("/proc/self/fd")) - files, threading.active_count() - threads


def test_optimizers_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    """In a new process: what the tests before it left may end meanwhile."""
    [(files, threads)] = launch(what_stays, tmp_path, world=1)
    assert files <= 0 and threads <= 0
    assert not os.listdir(tmp_path)


# -- the checksum ------------------------------------------------------------------------------------------------------


def test_the_checksum_sees_what_disks_do() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 63, 1024, dtype=np.uint64)
    expected = checksum(words)
    assert checksum(words.copy()) == expected
    seen: set[int] = {expected}

    def changed(values: Any) -> None:
        seen.add(checksum(np.ascontiguousarray(values)))

    for bit in range(64):
        for place in (0, 1, 500, 1023):
            flipped = words.copy()
            flipped[place] ^= np.uint64(1 << bit)
            changed(flipped)
            flipped[(place + 4) % 1024] ^= np.uint64(1 << bit)  # the same bit of the next word of the same lane
            changed(flipped)
    assert len(seen) == 1 + 64 * 4 * 2
    sectors = words.reshape(16, 64)
    for one in range(16):
        for other in range(one):
            swapped = sectors.copy()
            swapped[[one, other]] = swapped[[other, one]]
            changed(swapped.reshape(-1))
        zeroed = sectors.copy()
        zeroed[one] = 0
        changed(zeroed.reshape(-1))
    assert len(seen) == 1 + 64 * 4 * 2 + 120 + 16

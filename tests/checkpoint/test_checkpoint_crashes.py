"""Crashes and failures at every call on the file system: a reader finds the old checkpoint or the new one, whole."""

import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardopt
from shardopt import CheckpointError, ShardedAdamW
from shardopt.checkpoint import files, publish, rng
from shardopt.checkpoint.inspect import verify
from shardopt.checkpoint.publish import LATEST, PUBLISHED, find
from tests.support.checkpoints import save
from tests.support.training import raises

# -- a disk that loses what was not synced -----------------------------------------------------------------------------


@dataclass
class Node:
    """A file's bytes or a directory's entries, as operations in their order."""

    is_directory: bool
    writes: list[bytes] = field(default_factory=list)
    entries: list[tuple[str, int | None]] = field(default_factory=list)  # name -> node, or None: removed
    groups: list[int] = field(default_factory=list)  # entries of one number happen together
    durable: int = 0  # how many of the operations are


class Disk:
    """What :mod:`shardopt.checkpoint.files` does below one directory, as a model of what may survive a crash.

    Only what was synced is sure to be there: any of the other changes of names may be, in whatever order, and any
    beginning of the other bytes, or zeros in their place.
    """

    def __init__(self, root: Path):
        self.nodes: dict[int, Node] = {0: Node(True)}
        self._places = {root: 0}
        self._open: dict[int, int] = {}
        self.happened = 0
        self.after_each: Callable[[], None] = lambda: None

    def load(self, root: Path) -> None:
        """All that is there, as durable."""
        for path in sorted(root.rglob("*")):
            node = self._new(path, path.is_dir())
            if path.is_file():
                node.writes, node.durable = [path.read_bytes()], 1
        for node in self.nodes.values():
            node.durable = len(node.entries) if node.is_directory else len(node.writes)

    def _new(self, path: Path, is_directory: bool) -> Node:
        number = len(self.nodes)
        self.nodes[number] = Node(is_directory)
        self._places[path] = number
        self._change(path, number)
        return self.nodes[number]

    def _change(self, path: Path, number: int | None, group: int | None = None) -> None:
        parent = self.nodes[self._places[path.parent]]
        parent.entries.append((path.name, number))
        parent.groups.append(len(parent.groups) if group is None else group)

    def _tell(self) -> None:
        self.happened += 1
        self.after_each()

    def watch(self, patch: pytest.MonkeyPatch, lazy: tuple[str, ...] = ()) -> None:
        """Stands between the package and the disk; calls in ``lazy`` are left out, as a faulty program would."""
        real = {name: getattr(files, name) for name in _CHANGING}

        def watched(name: str) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                result = real[name](*arguments)
                if name not in lazy:
                    getattr(self, f"_{name}")(result, *arguments)
                    self._tell()
                return result

            return call

        for name in _CHANGING:
            patch.setattr(files, name, watched(name))

    def _make_directory(self, _: None, path: Path) -> None:
        self._new(path, True)

    def _create(self, file: int, path: Path, *_mode: int) -> None:
        self._new(path, False)
        self._open[file] = self._places[path]

    def _write(self, _: None, file: int, data: memoryview) -> None:
        self.nodes[self._open[file]].writes.append(bytes(data))

    def _sync(self, _: None, file: int) -> None:
        node = self.nodes[self._open[file]]
        node.durable = len(node.writes)

    def _sync_directory(self, _: None, path: Path) -> None:
        node = self.nodes[self._places[path]]
        node.durable = len(node.entries)

    def _rename(self, _: None, source: Path, target: Path) -> None:
        number = self._places.pop(source)
        group = len(self.nodes[self._places[source.parent]].groups)
        self._change(source, None, group)
        self._change(target, number, group)
        self._places[target] = number
        for path in [path for path in self._places if source in path.parents]:
            self._places[target / path.relative_to(source)] = self._places.pop(path)

    def _remove(self, _: None, path: Path) -> None:
        self._change(path, None)
        del self._places[path]

    _remove_directory = _remove

    def crash(self, into: Path, draw: random.Random) -> None:
        """One of the states in which a crash at this moment may leave the disk."""
        self._lay_out(0, into, draw)

    def _lay_out(self, number: int, path: Path, draw: random.Random) -> None:
        node = self.nodes[number]
        if not node.is_directory:
            sure, lost = b"".join(node.writes[: node.durable]), b"".join(node.writes[node.durable :])
            kept = lost[: draw.choice([0, len(lost), draw.randint(0, len(lost))])]
            path.write_bytes(sure + kept + bytes(draw.choice([0, len(lost) - len(kept)])))
            return
        path.mkdir()
        names: dict[str, int | None] = {}
        in_order, lucky = draw.random() < 0.5, draw.randint(node.durable, len(node.entries))
        fate: dict[int, bool] = {}
        for at, ((name, child), group) in enumerate(zip(node.entries, node.groups, strict=True)):
            happens = at < lucky if in_order else draw.random() < 0.5
            if at < node.durable or fate.setdefault(group, happens):
                names[name] = child
        linked = [child for child in names.values() if child is not None]
        for name, child in names.items():
            # A directory is in one place only: where it went, if it is seen there.
            if child is not None and not (self.nodes[child].is_directory and linked.count(child) > 1):
                self._lay_out(child, path / name, draw)


_CHANGING = ("make_directory", "create", "write", "sync", "sync_directory", "rename", "remove", "remove_directory")


# -- crashes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Small, so that thousands of crashes are a matter of seconds."""
    monkeypatch.setattr(rng, "states", lambda device: {"torch": torch.arange(9, dtype=torch.uint8)})
    for name in ("check", "restore"):
        monkeypatch.setattr(rng, name, lambda saved, device: None)
    torch.manual_seed(0)
    module = nn.Linear(2, 2)
    return module, ShardedAdamW(module, lr=0.1)


def advance(module: nn.Module, optimizer: ShardedAdamW) -> None:
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def simulate(root: Path, model: Any, count: int, patch: pytest.MonkeyPatch, lazy: tuple[str, ...] = ()) -> int:
    """Crashes after each call of a save with an older checkpoint there; how many crashes there were."""
    keep = 1
    advance(*model)
    old = save(root, *model, keep=keep)
    advance(*model)
    disk, draw, crashed = Disk(root), random.Random(1), root.parent / "crashed"
    disk.load(root)
    crashes = 0

    def crash() -> None:
        nonlocal crashes
        for _ in range(count):
            crashes += 1
            shutil.rmtree(crashed, ignore_errors=True)
            with pytest.MonkeyPatch.context() as unwatched:
                for name, function in plain.items():
                    unwatched.setattr(files, name, function)
                disk.crash(crashed, draw)
                check_recovery(crashed, {old.name, *names_of(disk)})

    plain = {name: getattr(files, name) for name in _CHANGING}
    disk.after_each = crash
    with patch.context() as watching:
        disk.watch(watching, lazy)
        new = save(root, *model, keep=keep)
    assert crashes == count * disk.happened and disk.happened > 20
    disk.crash(crashed.with_name("after"), draw)
    assert find(crashed.with_name("after")).name == new.name and old.name != new.name
    return crashes


def names_of(disk: Disk) -> list[str]:
    """Checkpoints that were published so far."""
    return [name for name, node in disk.nodes[0].entries if PUBLISHED.fullmatch(name) and node is not None]


def check_recovery(root: Path, whole: set[str]) -> None:
    """A reader finds one of these whole; the next save begins by removing what is left of the other."""
    found = find(root)
    assert found.name in whole and not verify(found), f"{found.name}: {verify(found)[:1]}"
    damaged = [path.name for path in publish.published(root) if verify(path)]
    assert not damaged, f"published, and not whole: {damaged}"
    target = publish.begin(root, 7)
    assert target.lock is not None
    files.close(target.lock)
    left = [
        name for name in os.listdir(root) if not PUBLISHED.fullmatch(name) and name not in (LATEST, target.saving.name)
    ]
    assert not left, f"not collected: {left}"
    assert find(root) == found and not verify(found)


def test_some_hundred_crashes(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulate(tmp_path / "runs", model, 12, monkeypatch) > 300


@pytest.mark.slow
def test_ten_thousand_crashes(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulate(tmp_path / "runs", model, 350, monkeypatch) >= 10_000


@pytest.mark.parametrize(
    ("lazy", "noticed"), [("sync", "published, and not whole"), ("sync_directory", "not collected: \\['saving-")]
)
def test_what_is_not_synced_would_be_noticed(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch, lazy: str, noticed: str
) -> None:
    with pytest.raises((AssertionError, CheckpointError), match=noticed):
        simulate(tmp_path / "runs", model, 12, monkeypatch, (lazy,))


def test_the_first_checkpoint_of_all(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root, crashed, draw = tmp_path / "runs", tmp_path / "crashed", random.Random(2)
    root.mkdir()
    disk = Disk(root)
    found = 0

    def crash() -> None:
        nonlocal found
        for _ in range(10):
            shutil.rmtree(crashed, ignore_errors=True)
            disk.crash(crashed, draw)
            try:
                path = find(crashed)
            except CheckpointError as error:
                assert "holds no checkpoint" in str(error)
            else:
                found += 1
                assert not verify(path)

    disk.after_each = crash
    with monkeypatch.context() as watching:
        disk.watch(watching)
        save(root, *model)
    assert found > 20


# -- failures ----------------------------------------------------------------------------------------------------------


def failing(calls: Iterator[int], at: int, code: int, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if next(calls) == at:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    return call


CAUSES = {
    errno.ENOSPC: "free space",
    errno.EROFS: "not mounted read-only",
    errno.EMFILE: "ulimit -n",
    errno.ENXIO: "fix the cause",
}


def test_a_disk_that_fails_at_any_call(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is typed and says what to do about its cause; the last checkpoint is whole; the next save succeeds."""
    root = tmp_path / "runs"
    save(root, *model, keep=1)
    for at in range(1000):
        advance(*model)
        last = find(root)
        calls = iter(range(10_000))
        code, advice = list(CAUSES.items())[at % len(CAUSES)]
        with monkeypatch.context() as full:
            for name in _CHANGING:
                full.setattr(files, name, failing(calls, at, code, getattr(files, name)))
            try:
                save(root, *model, keep=1)
            except CheckpointError as error:
                assert os.strerror(code) in str(error) and advice in str(error) and "whole" in str(error)
            else:
                break
        assert find(root) == last or find(root).name > last.name
        assert not verify(find(root))
        saved = save(root, *model, keep=1)
        assert sorted(os.listdir(root)) == sorted([saved.name, LATEST]), at
    assert at > 20


def test_what_is_not_ours_stays(tmp_path: Path, model: Any) -> None:
    root = tmp_path / "runs"
    first = save(root, *model)
    (root / "notes.txt").write_text("mine")
    (root / f"saving-{'0' * 16}").mkdir()  # ended before its owner's sign was there
    foreign = root / f"saving-{'1' * 16}"  # looks like ours, and has no sign
    foreign.mkdir()
    (foreign / "rank-00000.safetensors").write_text("mine")
    mixed = root / f"removing-{'2' * 16}"  # ours, with a file that is not
    mixed.mkdir()
    for name in (f"owner-{'2' * 16}", "rank-00000.safetensors", "thesis.tex"):
        (mixed / name).write_text("mine")
    (root / f"latest-{'3' * 16}").write_text("left")
    (root / "linked").mkdir()
    link = root / f"saving-{'4' * 16}"
    link.symlink_to(root / "linked")
    old = os.umask(0)
    try:
        last = save(root, *model, keep=1)
    finally:
        os.umask(old)
    names = {path.name for path in root.iterdir()}
    assert names == {last.name, "latest", "notes.txt", foreign.name, mixed.name, "linked", link.name}
    assert (foreign / "rank-00000.safetensors").read_text() == (mixed / "thesis.tex").read_text() == "mine"
    assert not first.exists()
    assert last.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in last.iterdir())


def test_a_running_save_is_not_collected(tmp_path: Path, model: Any) -> None:
    root = tmp_path / "runs"
    save(root, *model)
    target = publish.begin(root, 1)
    with raises(CheckpointError, "another job saves into this directory"):
        save(root, *model)
    assert target.owner.exists()
    assert target.lock is not None
    files.close(target.lock)
    save(root, *model)
    assert not target.saving.exists()


def test_rotation_waits_for_a_successor_that_reads_back(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "runs"
    first = save(root, *model, keep=1)
    real = files.write

    def rotten(file: int, data: memoryview) -> None:
        real(file, memoryview(bytes(len(data))) if len(data) == 16 else data)  # a state of 4 elements

    with monkeypatch.context() as bad:
        bad.setattr(files, "write", rotten)
        advance(*model)
        with raises(CheckpointError, "reads back with other bytes"):
            save(root, *model, keep=1)
    assert find(root) == first and not verify(first)


@pytest.mark.slow
def test_two_hundred_kills(tmp_path: Path, model: Any) -> None:
    """A process that saves without pause is killed at a moment of chance."""
    root, draw, killed = tmp_path / "runs", random.Random(3), 0
    save(root, *model, keep=2)
    for _ in range(200):
        before = publish.sequence_of(find(root))
        child = os.fork()
        if child == 0:
            try:
                while True:
                    save(root, *model, keep=2)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.0, 0.06))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        assert publish.sequence_of(find(root)) >= before
        assert not verify(find(root))
    assert killed == 200
    save(root, *model, keep=2)
    assert len(os.listdir(root)) == 3
    shardopt.load_checkpoint(root, *model)

"""Directories of checkpoints: made under a name that no reader looks for, published by one rename, removed by another.

[Note: What a crash leaves] This depends on the order in which files and names become durable:

1. ``saving-<token>/owner-<token>``: it marks the directory as made by shardopt;
2. the ranks' files, then the manifest: content first, then names;
3. the rename to ``<sequence>-step<step>-<token>``: from here on the checkpoint exists, whole;
4. ``latest``, replaced by a rename too: it names a checkpoint that exists;
5. old checkpoints, once the new one is verified: each is renamed to ``removing-<token>`` before its files are removed.

Leftovers are ``saving-`` and ``removing-`` directories whose owner's lock is free, because its process ended. A save
begins under a lock of the whole directory: it looks for live owners and removes leftovers. It holds its own owner's
lock until all of the above is done. So no save removes files that another save writes: the second save gets an error.
"""

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from . import files

MANIFEST, LATEST, LOCK = "manifest.json", "latest", "beginning.lock"
LONGEST_BEGINNING = 30.0  # seconds: listing and removing a crash's leftovers on a slow file system
TOKEN = r"(?P<token>[0-9a-f]{16})"
PUBLISHED = re.compile(r"(?P<sequence>\d{6,})-step(?P<step>\d+)-" + TOKEN)
_LEFTOVER = re.compile(r"(saving|removing)-" + TOKEN)
_POINTER = re.compile(r"latest-" + TOKEN)
_OURS = re.compile(r"rank-\d{5}\.(safetensors|json|json-new|failed|failed-new)|manifest\.json|owner-[0-9a-f]{16}")
_PART = re.compile(r"rank-\d{5}\.json")
_MOST_OF_A_POINTER = 256


@dataclass
class NewCheckpoint:
    """A checkpoint that is being written: its directory, and the name that it is published under.

    Attributes:
        lock: on rank 0, of the owner's file, until :meth:`release`; all else is the same on all ranks.
    """

    root: Path
    sequence: int
    step: int
    token: str
    lock: int | None = None

    @property
    def saving(self) -> Path:
        return self.root / f"saving-{self.token}"

    @property
    def published(self) -> Path:
        return self.root / f"{self.sequence:06d}-step{self.step}-{self.token}"

    @property
    def owner(self) -> Path:
        return _owner_file(self.saving)

    def release(self) -> None:
        """Releases the lock: nothing is written any more."""
        if self.lock is not None:
            files.release(self.lock)
            self.lock = None


def begin(root: Path, step: int) -> NewCheckpoint:
    """Rank 0: removes what crashes left, and makes the directory to write in, locked.

    Raises:
        CheckpointError: another save into ``root`` is under way.
    """
    if not files.leads_to_directory(root):
        files.make_directories(root)
    with _alone(root):
        _check_free(root)
        collect(root)
        return _make_target(root, step)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Holds the lock under which saves into ``root`` begin."""
    last, path = time.monotonic() + LONGEST_BEGINNING, root / LOCK
    while (lock := files.lock(path)) is None:
        if time.monotonic() > last:
            raise _taken(root, path)
        time.sleep(0.01)
    try:
        yield
    finally:
        files.unlock(path, lock)


def _check_free(root: Path) -> None:
    """Raises CheckpointError if a checkpoint in ``root`` is being written. The caller holds the lock of ``root``."""
    for name in files.names(root):
        if _LEFTOVER.fullmatch(name):
            _check_unowned(root, root / name)
    # Listed after the loop: a directory that was published during the loop is among these. Listed before, it would be
    # in neither list, and its `latest-` file would be removed. Test:
    # test_a_checkpoint_that_is_published_meanwhile_is_another_jobs.
    there = published(root)
    for path in there:
        if sequence_of(path) == sequence_of(there[-1]):
            _check_unowned(root, path)


def _check_unowned(root: Path, path: Path) -> None:
    if _is_ours(path):
        try:
            is_held = files.is_held(_owner_file(path))
        except CheckpointError:  # renamed just now; it is checked under its new name
            return
        if is_held:
            raise _taken(root, path)


def _taken(root: Path, found: Path) -> CheckpointError:
    return CheckpointError(
        "give each job a directory of its own, and call wait() on an asynchronous save before another module is saved "
        f"there: another job saves into this directory, {root}, now ({found.name} is its own). Nothing was saved."
    )


def _make_target(root: Path, step: int) -> NewCheckpoint:
    target = NewCheckpoint(root, 1 + max(map(sequence_of, published(root)), default=0), step, secrets.token_hex(8))
    files.make_directory(target.saving)
    target.lock = files.create(target.owner)
    try:
        files.hold(target.lock)
        files.sync(target.lock)
        files.sync_directory(target.saving)
        files.sync_directory(root)
    except BaseException:
        target.release()  # a lock that stays held makes the directory look as if it were being written
        raise
    return target


def publish(target: NewCheckpoint, manifest: bytes) -> None:
    """Rank 0: publishes the checkpoint once all ranks' files are durable. On return the checkpoint is durable."""
    files.write_file(target.saving / MANIFEST, manifest)
    for name in files.names(target.saving):
        if _PART.fullmatch(name):  # its content is in the manifest
            files.remove(target.saving / name)
    files.sync_directory(target.saving)
    files.rename(target.saving, target.published)
    files.sync_directory(target.root)
    pointer = target.root / f"{LATEST}-{target.token}"
    files.write_file(pointer, f"{target.published.name}\n".encode())
    files.rename(pointer, target.root / LATEST)
    files.sync_directory(target.root)


def published(root: Path) -> list[Path]:
    """Returns the checkpoints in this directory, the oldest first."""
    found = [root / name for name in files.names(root) if PUBLISHED.fullmatch(name)]
    return sorted(filter(files.is_directory, found), key=lambda path: (sequence_of(path), path.name))


def sequence_of(path: Path) -> int:
    match = PUBLISHED.fullmatch(path.name)
    assert match is not None
    return int(match["sequence"])


def find(directory: Path) -> Path:
    """Returns the checkpoint that a user means by a directory: itself, else the one in ``latest``, else the newest.

    Raises:
        CheckpointError: there is no checkpoint, or ``latest`` names a missing one.
    """
    if files.is_file(directory / MANIFEST):
        return directory
    if not files.leads_to_directory(directory):
        raise CheckpointError(
            "give the directory that save_checkpoint() was given, on a file system that every rank sees: "
            f"{directory} is not a directory, so there is no checkpoint to load."
        )
    there = published(directory)
    if not files.is_file(directory / LATEST):
        if there:  # a process ended after it published the first checkpoint and before it wrote `latest`
            return there[-1]
        raise CheckpointError(
            "give the directory that save_checkpoint() was given, or start without a checkpoint: "
            f"{directory} holds no checkpoint (no {LATEST!r}, no {MANIFEST!r})."
        )
    name = files.read_file(directory / LATEST, _MOST_OF_A_POINTER)
    target = next((path for path in there if f"{path.name}\n".encode() == name), None)
    if target is None:
        raise CheckpointError(
            f"load one of these by its own path: {[path.name for path in there]}. {directory / LATEST} names "
            f"{name[:80]!r}, which is not there: the file was changed, or somebody removed the checkpoint."
        )
    return target


# -- removing ----------------------------------------------------------------------------------------------------------


def rotate(root: Path, keep: int, newest: Path) -> None:
    """Rank 0: removes all but the ``keep`` newest checkpoints; ``newest``, which was just verified, always stays."""
    older = [path for path in published(root) if path != newest]
    for path in filter(_is_ours, older[: max(len(older) - (keep - 1), 0)]):
        leaving = root / f"removing-{_token_of(path)}"
        files.rename(path, leaving)
        files.sync_directory(root)
        _empty(leaving)


def collect(root: Path) -> None:
    """Removes what crashes left in ``root``: only directories of ours that no process is writing."""
    for name in files.names(root):
        path = root / name
        if _POINTER.fullmatch(name) and files.is_file(path):
            files.remove(path)
        elif _LEFTOVER.fullmatch(name) and files.is_directory(path):
            if not files.names(path):  # its process ended before it made the owner's file, or after it removed it
                files.remove_directory(path)
            elif _is_ours(path) and not files.is_held(_owner_file(path)):
                _empty(path)


def _token_of(path: Path) -> str:
    """Returns the token of a directory of ours: the end of its name, whatever it is renamed to."""
    return path.name[-16:]


def _owner_file(path: Path) -> Path:
    return path / f"owner-{_token_of(path)}"


def _is_ours(path: Path) -> bool:
    return files.is_file(_owner_file(path))


def _empty(path: Path) -> None:
    """Removes the files that we make and, if nothing else is there, the directory; the owner's file is removed last."""
    owner = _owner_file(path)
    there = files.names(path)
    for name in there:
        if _OURS.fullmatch(name) and name != owner.name and files.is_file(path / name):
            files.remove(path / name)
    if all(_OURS.fullmatch(name) for name in there):
        files.sync_directory(path)
        files.remove(owner)
        files.remove_directory(path)


def abandon(target: NewCheckpoint) -> None:
    """Rank 0: removes the directory of a checkpoint that failed; what it cannot remove, the next save removes."""
    if files.is_directory(target.saving) and _is_ours(target.saving):
        _empty(target.saving)

"""Directories of checkpoints: made under a name that nobody reads, published by one rename, removed by another.

[Note: What a crash leaves] The order in which things become durable decides it:

1. ``saving-<token>/owner-<token>``: from here on the directory is known as ours;
2. the ranks' files, then the manifest: content first, then names;
3. the rename to ``<sequence>-step<step>-<token>``: the checkpoint exists, whole, for whoever lists the directory;
4. ``latest``, by a rename too: it names a checkpoint that exists;
5. old ones, once the new one was verified: renamed to ``removing-<token>`` before their first file goes.

Leftovers are ``saving-`` and ``removing-`` directories whose owner's lock is free, because its process ended. A save
begins under one lock of the directory: it looks for live owners and collects leftovers. It holds its own owner's lock
until all of the above is done. So no save removes files that another one writes: the second save gets an error.
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


@dataclass(frozen=True)
class Site:
    """The directory that one checkpoint is written in, and its name once it is published. The same on all ranks."""

    root: Path
    sequence: int
    step: int
    token: str

    @property
    def saving(self) -> Path:
        return self.root / f"saving-{self.token}"

    @property
    def published(self) -> Path:
        return self.root / f"{self.sequence:06d}-step{self.step}-{self.token}"

    @property
    def owner(self) -> Path:
        return _sign_of(self.saving)


def begin(root: Path, step: int) -> tuple[Site, int]:
    """Rank 0: collects what crashes left, and makes the directory to write in; its lock is released at the end.

    Raises:
        CheckpointError: another save into ``root`` goes on.
    """
    if not files.is_directory(root):
        files.make_directories(root)
    with _alone(root):
        _check_free(root)
        collect(root)
        return _make_site(root, step)


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
    """Raises CheckpointError if what lies in ``root`` is being written; called alone, so that none begins meanwhile."""
    for name in files.names(root):
        if _LEFTOVER.fullmatch(name):
            _check_unowned(root, root / name)
    # Only now: a directory that was renamed before its turn came is among these. Listed sooner, it was in neither list,
    # and its pointer to the latest was collected (test_a_checkpoint_that_is_published_meanwhile_is_another_jobs).
    there = published(root)
    for path in there:
        if sequence_of(path) == sequence_of(there[-1]):
            _check_unowned(root, path)


def _check_unowned(root: Path, path: Path) -> None:
    if _is_ours(path):
        try:
            is_held = files.is_held(_sign_of(path))
        except CheckpointError:  # renamed just now, and looked at under its new name
            return
        if is_held:
            raise _taken(root, path)


def _taken(root: Path, found: Path) -> CheckpointError:
    return CheckpointError(
        "give each job a directory of its own, and call wait() on an asynchronous save before another module is saved "
        f"there: another job saves into this directory, {root}, now ({found.name} is its own). Nothing was saved."
    )


def _make_site(root: Path, step: int) -> tuple[Site, int]:
    site = Site(root, 1 + max(map(sequence_of, published(root)), default=0), step, secrets.token_hex(8))
    files.make_directory(site.saving)
    lock = files.create(site.owner)
    try:
        files.hold(lock)
        files.sync(lock)
        files.sync_directory(site.saving)
        files.sync_directory(root)
    except BaseException:
        files.release(lock)  # if it stayed held, the directory would look as if a save went on
        raise
    return site, lock


def publish(site: Site, manifest: bytes) -> None:
    """Rank 0: publishes the checkpoint, once all ranks' files are durable. When this returns, the checkpoint is too."""
    files.write_file(site.saving / MANIFEST, manifest)
    for name in files.names(site.saving):
        if _PART.fullmatch(name):  # all of it is in the manifest
            files.remove(site.saving / name)
    files.sync_directory(site.saving)
    files.rename(site.saving, site.published)
    files.sync_directory(site.root)
    pointer = site.root / f"{LATEST}-{site.token}"
    files.write_file(pointer, f"{site.published.name}\n".encode())
    files.rename(pointer, site.root / LATEST)
    files.sync_directory(site.root)


def published(root: Path) -> list[Path]:
    """Returns the checkpoints in this directory, the oldest first."""
    found = [root / name for name in files.names(root) if PUBLISHED.fullmatch(name)]
    return sorted(filter(files.is_directory, found), key=lambda path: (sequence_of(path), path.name))


def sequence_of(path: Path) -> int:
    match = PUBLISHED.fullmatch(path.name)
    assert match is not None
    return int(match["sequence"])


def find(directory: Path) -> Path:
    """The checkpoint that a user means by a directory: itself, or the one that ``latest`` names, or else the newest.

    Raises:
        CheckpointError: there is none, or ``latest`` names one that is not there.
    """
    if files.is_file(directory / MANIFEST):
        return directory
    if not files.is_directory(directory):
        raise CheckpointError(
            "give the directory that save_checkpoint() was given, on a file system that every rank sees: "
            f"{directory} is not a directory, so there is no checkpoint to load."
        )
    there = published(directory)
    if not files.is_file(directory / LATEST):
        if there:  # the process ended between the publication of the very first one and its pointer
            return there[-1]
        raise CheckpointError(
            f"{directory} holds no checkpoint (no {LATEST!r}, no {MANIFEST!r}): give the directory that "
            "save_checkpoint() was given, or start without one."
        )
    name = files.read_file(directory / LATEST, _MOST_OF_A_POINTER)
    target = next((path for path in there if f"{path.name}\n".encode() == name), None)
    if target is None:
        raise CheckpointError(
            f"{directory / LATEST} names {name[:80]!r}, which is not there: it was changed, or others removed the "
            f"checkpoint. Load one of these by its own path: {[path.name for path in there]}."
        )
    return target


# -- removing ----------------------------------------------------------------------------------------------------------


def rotate(root: Path, keep: int, newest: Path) -> None:
    """Rank 0: removes all but the ``keep`` newest checkpoints; ``newest``, just verified, stays in any case."""
    older = [path for path in published(root) if path != newest]
    for path in filter(_is_ours, older[: max(len(older) - (keep - 1), 0)]):
        leaving = root / f"removing-{_token_of(path)}"
        files.rename(path, leaving)
        files.sync_directory(root)
        _empty(leaving)


def collect(root: Path) -> None:
    """Removes what crashes left in ``root``; not what has no token of ours, or is being written by a process."""
    for name in files.names(root):
        path = root / name
        if _POINTER.fullmatch(name) and files.is_file(path):
            files.remove(path)
        elif _LEFTOVER.fullmatch(name) and files.is_directory(path):
            if not files.names(path):  # its process ended before it made the owner's file, or after it removed that
                files.remove_directory(path)
            elif _is_ours(path) and not files.is_held(_sign_of(path)):
                _empty(path)


def _token_of(path: Path) -> str:
    """Returns the token of a directory of ours, with which its name ends in all its life."""
    return path.name[-16:]


def _sign_of(path: Path) -> Path:
    return path / f"owner-{_token_of(path)}"


def _is_ours(path: Path) -> bool:
    return files.is_file(_sign_of(path))


def _empty(path: Path) -> None:
    """Removes the files that we make and, if nothing else is there, the directory; the owner's sign goes last."""
    sign = _sign_of(path)
    there = files.names(path)
    for name in there:
        if _OURS.fullmatch(name) and name != sign.name and files.is_file(path / name):
            files.remove(path / name)
    if all(_OURS.fullmatch(name) for name in there):
        files.sync_directory(path)
        files.remove(sign)
        files.remove_directory(path)


def abandon(site: Site) -> None:
    """Rank 0: gives the checkpoint up: removes its directory, or leaves it to be collected."""
    if files.is_directory(site.saving) and _is_ours(site.saving):
        _empty(site.saving)

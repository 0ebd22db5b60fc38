"""Kernels on disk: whatever happens to a file or its folder, a process finds a whole kernel of its own, or none."""

import logging
import os
import resource
import signal
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from shardopt.compilers import cache

SYMBOL, CODE = "kernel", bytes(range(256)) * 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "a" / "kernels"
    monkeypatch.setenv(cache.VARIABLE, str(found))
    cache._say_foreign.cache_clear()
    return found


def key() -> str:
    found = cache.key_of("text", "qf")
    assert found is not None
    return found


def in_a_process(act: Callable[[], None]) -> int:
    """Returns the status of a process that does this and ends."""
    child = os.fork()
    if not child:
        with suppress(BaseException):
            act()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1]


def test_what_is_kept_is_found(folder: Path) -> None:
    assert cache.find(key()) is None and not folder.exists()
    cache.keep(key(), SYMBOL, CODE)
    assert cache.find(key()) == (SYMBOL, CODE)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(file.stat().st_mode) == 0o600
    others = {cache.key_of("text", "qq"), cache.key_of("other", "qf"), cache.key_of("text")}
    assert len(others) == 3 and not others & {key()}


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.VARIABLE)
    for root, expected in (("/caches", "/caches"), ("relative", "/home/me/.cache"), ("", "/home/me/.cache")):
        monkeypatch.setenv("HOME", "/home/me")
        monkeypatch.setenv("XDG_CACHE_HOME", root)
        assert cache.folder() == Path(expected, "shardopt", "kernels")
    monkeypatch.setenv(cache.VARIABLE, "0")
    assert cache.folder() is None and cache.key_of("text") is None and cache.find(None) is None
    cache.keep(None, SYMBOL, CODE)
    monkeypatch.setenv(cache.VARIABLE, "off")
    with pytest.raises(ValueError, match=f"set {cache.VARIABLE} to an absolute path, or to 0.*'off'"):
        cache.key_of("text")


def test_damage_is_seen(folder: Path) -> None:
    """A flipped bit anywhere, a file that ends early, the file of another kernel, a file that is none."""
    cache.keep(key(), SYMBOL, CODE)
    file = folder / key()
    whole = file.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (0, 31, 32, 40, len(whole) - 1)]
    for damaged in (*flipped, b"", whole[:99], whole[:-1], whole + b"x"):
        file.write_bytes(damaged)
        assert cache.find(key()) is None
    other = cache.key_of("other")
    assert other is not None
    (folder / other).write_bytes(whole)
    assert cache.find(other) is None
    file.rename(folder / "elsewhere")
    for make in (lambda: os.symlink("elsewhere", file), lambda: os.mkfifo(file), file.mkdir):
        (folder / "elsewhere").write_bytes(whole)
        make()
        assert cache.find(key()) is None
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
    cache.keep(key(), SYMBOL, CODE)
    assert cache.find(key()) == (SYMBOL, CODE)


@pytest.mark.parametrize("how", ["readable by others", "of another user"])
def test_a_folder_of_others_is_not_read(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.keep(key(), SYMBOL, CODE)
    if how == "readable by others":
        folder.chmod(0o750)
    else:
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert cache.find(key()) is None
            cache.keep(key(), SYMBOL, b"new")
    (said,) = caplog.messages
    assert said.startswith(f"run chmod 700 {folder}, or set {cache.VARIABLE}")
    monkeypatch.undo()
    folder.chmod(0o700)
    monkeypatch.setenv(cache.VARIABLE, str(folder))
    assert cache.find(key()) == (SYMBOL, CODE)


def test_nothing_is_made_in_the_home_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root with the HOME of a user, who could then not write there."""
    os.chown(folder.parent.parent, os.geteuid(), -1)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    if me:  # what root has is everyone's to go below
        cache.keep(key(), SYMBOL, CODE)
        assert not folder.parent.exists()


def test_no_room(folder: Path) -> None:
    """A home that cannot be written to, and a disk that is full, fail no step and leave nothing."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        cache.keep(key(), SYMBOL, CODE)

    assert in_a_process(full) == 0
    assert list(folder.iterdir()) == [] and cache.find(key()) is None

    def below_a_file() -> None:
        (folder / "file").touch()
        os.environ[cache.VARIABLE] = str(folder / "file" / "kernels")
        cache.keep(key(), SYMBOL, CODE)
        assert cache.find(key()) is None

    assert in_a_process(below_a_file) == 0


def test_killed_while_it_writes(folder: Path) -> None:
    """All is written but not yet under its name: nobody finds it, and it does not stay for ever."""

    def killed() -> None:
        os.rename = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        cache.keep(key(), SYMBOL, CODE)

    assert in_a_process(killed) == signal.SIGKILL
    (draft,) = folder.iterdir()
    assert cache.find(key()) is None
    cache.keep(key(), SYMBOL, CODE)
    assert cache.find(key()) == (SYMBOL, CODE) and draft.exists()
    long_ago = time.time() - 2 * cache._UNFINISHED
    os.utime(draft, (long_ago, long_ago))
    cache.keep(key(), SYMBOL, CODE)
    assert [file.name for file in folder.iterdir()] == [key()]


def test_many_at_once(folder: Path) -> None:
    """Ranks that begin together write one kernel, and read what another one is writing: always a whole one."""
    go, start = os.pipe()
    children = []
    for number in range(4):
        child = os.fork()
        if not child:
            code = 1
            with suppress(BaseException):
                os.close(start)
                os.read(go, 1)
                for _ in range(50):
                    cache.keep(key(), SYMBOL, bytes([number]) * 100_000)
                    found = cache.find(key())
                    assert found is not None and len(set(found[1])) == 1 and len(found[1]) == 100_000
                code = 0
            os._exit(code)
        children.append(child)
    os.close(start)  # all go on at once
    os.close(go)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert [file.name for file in folder.iterdir()] == [key()]

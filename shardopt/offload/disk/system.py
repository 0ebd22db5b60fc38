"""The system calls that a file of ours needs; tests replace them by failing ones."""

import os


def open(name: str, flags: int, mode: int, folder: int) -> int:
    return os.open(name, flags, mode, dir_fd=folder)


def read(fd: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(fd, [buffer], offset)


def write(fd: int, buffer: memoryview, offset: int) -> int:
    return os.pwritev(fd, [buffer], offset)


reserve, truncate, sync = os.posix_fallocate, os.ftruncate, os.fdatasync

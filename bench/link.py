"""A link between two network namespaces, of a given rate, or one that holds every packet for a while. Linux, as root.

Each namespace belongs to a thread of this process, and to the ranks that enter it. It has no name and no file: when
these are gone, however they ended, the system takes it away with its devices.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

DEVICE = "wire"  # the name of the link's end in either namespace
T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# No packet is lost on this link. So TCP need not start slowly after each pause, nor remember how fast an earlier delay
# let it be, and a whole message may be under way at once: a delay makes each message late, and not slow.
_SYSCTLS = {
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_rmem": f"4096 {16 << 20} {32 << 20}",
    "ipv4/tcp_wmem": f"4096 {16 << 20} {32 << 20}",
}
_PACKETS_AT_ONCE = 500  # without an acknowledgment
_BURST = 128 << 10  # bytes that pass at full speed after a pause: 1 ms of 1 Gbit/s, and more than one packet
_MOST_PACKET = 65_000  # bytes; a relay that takes each packet by itself wants few of them


class CannotLink(Exception):
    """What this machine lacks."""


# ---- Namespaces ------------------------------------------------------------------------------------------------------


def _system_call(name: str, *arguments: int) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), name)
    if call(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def enter(namespace: str) -> None:
    """Moves this thread, and those that it starts from here on, into the namespace at this path."""
    with open(namespace) as file:
        _system_call("setns", file.fileno(), _CLONE_NEWNET)


class Namespace:
    """A network namespace and the one thread of this process that is in it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        try:
            self.path = self.run(self._leave)
        except BaseException:
            self.close()
            raise

    def _leave(self) -> str:
        _system_call("unshare", _CLONE_NEWNET)
        self.thread = threading.get_native_id()
        return f"/proc/{os.getpid()}/task/{self.thread}/ns/net"

    def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Calls it inside of the namespace."""
        return self._thread.submit(call, *arguments).result()

    def command(self, line: str) -> None:
        """Runs a command inside of the namespace."""
        done = self.run(lambda: subprocess.run(line.split(), capture_output=True, text=True))
        if done.returncode:
            raise CannotLink(f"`{line}` failed: {done.stderr.strip() or done.stdout.strip()}")

    def close(self) -> None:
        self._thread.shutdown()


def bytes_moved() -> tuple[int, int]:
    """Received and sent by this thread's end of the link so far, as its counters say."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == DEVICE:
            numbers = [int(each) for each in counters.split()]
            return numbers[0], numbers[8]
    raise CannotLink(f"this namespace has no device {DEVICE!r}")


# ---- Links -----------------------------------------------------------------------------------------------------------


class Link:
    """Two namespaces, joined.

    Attributes:
        paths: of the namespaces, for :func:`enter`.
        delay: seconds that each packet is held, by a link that was made with ``delays``.
    """

    def __init__(self, gigabits: float | None, delays: bool):
        """
        Args:
            gigabits: a second, each way; None: as fast as the machine.
            delays: packets pass through this process, which holds them.
        """
        self.delay = 0.0
        self._tunnels: list[int] = []
        self._relay: threading.Thread | None = None
        self._closing = False
        _check_tools()
        self._ends: list[Namespace] = []
        try:
            for _ in range(2):
                self._ends.append(Namespace())
            self.paths = [each.path for each in self._ends]
            if delays:
                self._tunnels = [each.run(_tunnel) for each in self._ends]
            else:
                self._ends[0].command(f"ip link add {DEVICE} type veth peer name {DEVICE} netns {self._ends[1].thread}")
            for number, end in enumerate(self._ends, 1):
                end.run(_set_up_tcp)
                end.command("ip link set lo up")
                end.command(f"ip address add 10.77.0.{number}/24 dev {DEVICE}")
                end.command(f"ip link set {DEVICE} {f'mtu {_MOST_PACKET} ' if delays else ''}up")
                end.command(
                    f"ip route change 10.77.0.0/24 dev {DEVICE} initcwnd {_PACKETS_AT_ONCE} initrwnd {_PACKETS_AT_ONCE}"
                )
                if gigabits is not None:
                    end.command(
                        f"tc qdisc add dev {DEVICE} root tbf rate {1000 * gigabits:g}mbit burst {_BURST} latency 50ms"
                    )
            if delays:
                self._relay = threading.Thread(target=self._carry, daemon=True)
                self._relay.start()
        except OSError as error:
            self.close()
            raise CannotLink(
                f"{error}. It takes Linux and root, or at least `unshare --user --map-root-user` before the command"
                + (", and /dev/net/tun for delays" if delays else "")
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """The namespaces go when the ranks in them have ended too."""
        self._closing = True
        if self._relay is not None:
            self._relay.join()
        for each in self._tunnels:
            os.close(each)
        self._tunnels = []
        for end in self._ends:
            end.close()

    def _carry(self) -> None:
        """Takes packets from each end, holds them, gives them to the other end."""
        held: list[deque[tuple[float, bytes]]] = [deque(), deque()]
        while not self._closing:
            now = time.monotonic()
            for packets, to in zip(held, reversed(self._tunnels), strict=True):
                while packets and packets[0][0] <= now:
                    with contextlib.suppress(OSError):  # the other end is going away
                        os.write(to, packets.popleft()[1])
            due = min((packets[0][0] for packets in held if packets), default=now + 0.1)
            ready, _, _ = select.select(self._tunnels, [], [], max(0.0, due - time.monotonic()))
            for packets, origin in zip(held, self._tunnels, strict=True):
                if origin in ready:
                    packets.extend(self._arrived(origin))

    def _arrived(self, origin: int) -> Iterator[tuple[float, bytes]]:
        for _ in range(16):
            try:
                packet = os.read(origin, 1 << 16)
            except OSError:  # no more of them
                return
            yield time.monotonic() + self.delay, packet


@contextlib.contextmanager
def linked(gigabits: float | None, delays: bool = False) -> Iterator[Link]:
    """A :class:`Link`, closed in the end.

    Raises:
        CannotLink: with what is missing.
    """
    link = Link(gigabits, delays)
    try:
        yield link
    finally:
        link.close()


def _check_tools() -> None:
    if sys.platform != "linux":
        raise CannotLink("network namespaces are Linux's, and this is another system")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise CannotLink(f"there is no `{'`, no `'.join(missing)}`: install iproute2")


def _set_up_tcp() -> None:
    for name, value in _SYSCTLS.items():
        Path("/proc/sys/net", name).write_text(value)


def _tunnel() -> int:
    """A device of this namespace whose packets this process reads and writes."""
    tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    except BaseException:
        os.close(tunnel)
        raise
    return tunnel

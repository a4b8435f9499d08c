"""The network interface over which gloo and nccl speak."""

import fcntl
import os
import socket
import struct
import sys

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.launch.environment import MACHINE_0, Placement


def choose_interface(placement: Placement) -> None:
    """Keeps one machine's traffic on loopback, and several machines' on the way to the master."""
    # gloo would take the interface that the host's name resolves to, nccl the first: on one machine
    # a port open to others, on several often the wrong one.
    # A process that goes on begins alone in its world, also on several machines.
    if placement.one_machine and MACHINE_0 not in os.environ:
        loopback = _loopback()
        if loopback is not None:
            # Ranks whose user chose another interface can do without loopback.
            if "GLOO_SOCKET_IFNAME" not in os.environ:
                require_loopback()
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    elif "MASTER_ADDR" in os.environ and sys.platform.startswith("linux"):
        # With `start_ranks`, MASTER_ADDR is loopback, where this machine's parent passes on.
        master = os.environ.get(MACHINE_0, os.environ["MASTER_ADDR"])
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((master, 1))  # sends nothing, asks for the route
                address = probe.getsockname()[0]
        except OSError:  # an IPv6 address or a wrong name: left to the connection itself
            return
        names = (name for _, name in socket.if_nameindex())
        found = next((name for name in names if _address(name) == address), None)
        if found is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
            # Where NCCL's ranks meet; data goes by InfiniBand all the same, where there is any. It
            # takes a name for the beginning of one, unless it comes after "=".
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={found}")


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def require_loopback() -> None:
    """Requires a loopback interface that is up, for ranks of one machine and mpirun. Linux only.

    Raises:
        UsageError: it is down, as in a new network namespace.
    """
    siocgifflags, iff_up = 0x8913, 1
    name = _loopback()
    if name is None or not sys.platform.startswith("linux"):
        return
    if not struct.unpack_from("16xH", _ask(siocgifflags, name))[0] & iff_up:
        raise UsageError(
            f"the loopback interface {name} is down, and ranks of one machine need it: "
            f"ip link set {name} up"
        )


def _address(interface: str) -> str | None:
    """The interface's IPv4 address (Linux)."""
    siocgifaddr = 0x8915
    try:
        return socket.inet_ntoa(_ask(siocgifaddr, interface)[20:24])
    except OSError:
        return None


def _ask(request: int, interface: str) -> bytes:
    """The kernel's answer to a request for an interface (Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", interface.encode()[:15]))

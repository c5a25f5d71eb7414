"""Sockets of processes on Linux, as /proc lists them, and addresses of this machine."""

import fcntl
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

LISTENS = "0A"
SIOCGIFADDR = 0x8915

Address = IPv4Address | IPv6Address


def listening_addresses(pids: Iterable[int]) -> set[tuple[Address, int]]:
    """List addresses and ports at which processes listen."""
    own = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                own.add(str(path.readlink()))
    addresses = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS and f"socket:[{inode}]" in own:
                host, port = local.split(":")
                addresses.add((_address(host), int(port, 16)))
    return addresses


def _address(text: str) -> Address:
    words = struct.unpack(f">{len(text) // 8}I", bytes.fromhex(text))  # each in the host's order
    address = ip_address(struct.pack(f"={len(words)}I", *words))
    return getattr(address, "ipv4_mapped", None) or address


def outside() -> tuple[str, str] | None:
    """Find an interface of this machine that is not the loopback one, and its IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                given = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                address = ip_address(given[20:24])
                if not address.is_loopback:
                    return name, str(address)
    return None

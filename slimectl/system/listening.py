"""Listening sockets of servers, and interfaces of this machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import sys

from slimectl.errors import BackendError, SettingsError

BACKLOG = 4096
SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def bound(host: str, port: int) -> socket.socket:
    """Bind a listening socket. Port 0 is any free one. Raises BackendError if taken, SettingsError for a bad host."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except (socket.gaierror, UnicodeError):
        raise SettingsError(f"--host: {host} is not an address. Give one of this machine, or 0.0.0.0 for all") from None
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BackendError(f"{host}:{port}: address already in use. Try --port {_free_port(host)}") from None
        reason = os.strerror(error.errno or 0).lower()
        raise BackendError(f"{host}:{port}: cannot listen here: {reason}. Give another --host or --port") from None


def _free_port(host: str) -> int:
    with bound(host, 0) as probe:
        return int(probe.getsockname()[1])


def address_towards(host: str) -> str:
    """Return the local address from which `host` is reached. Raises OSError if there is no route."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    # Connecting a datagram socket sends nothing, but picks the route.
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def own_address() -> str:
    """Return the address where other machines reach this one, or 127.0.0.1 without a network."""
    try:
        return address_towards("192.0.2.1")  # of the documentation range (RFC 5737)
    except OSError:
        return "127.0.0.1"


def interface(address: str) -> str | None:
    """Return the network interface that has an IPv4 address, or None if the system does not provide it (not Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None

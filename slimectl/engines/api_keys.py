"""Chooses the API key of each request, and stores the key of a local server."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from slimectl.system.redaction import remember

ASKING = (
    "/generate",
    "/inference/v1/generate",
    "/tokenize",
    "/v1/",
    "/server_info",
    "/get_server_info",
    "/model_info",
    "/get_model_info",
    "/health",
    "/ping",
)
"""Paths with these prefixes need the API key. All others need the admin key."""
KEY_BYTES = 32


@dataclass(frozen=True)
class ServerKeys:
    """API keys for servers, as in SGLang: `api_key` for generation, `admin_api_key` for everything that changes state.

    If only `api_key` is set, it is used for both. With `finds_local`, a missing admin key is read from the file that a
    server on this machine has stored for this user.
    """

    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    finds_local: bool = False

    def headers(self, url: str, path: str) -> dict[str, str]:
        """Return the headers of a request for `path` of the server at `url`."""
        if "@" in urlsplit(url).netloc:
            return {}  # the URL contains the credentials
        key = self.api_key if path.startswith(ASKING) else self._admin(url)
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _admin(self, url: str) -> str | None:
        return self.admin_api_key or (local_key(url) if self.finds_local else None) or self.api_key


NO_KEYS = ServerKeys()


def new_key() -> str:
    """Generate a random key."""
    return remember(secrets.token_urlsafe(KEY_BYTES))


def key_file(port: int) -> Path:
    """Return the admin key file of the server at a port.

    It includes the host name because machines may share a home.
    """
    return Path.home() / ".cache" / "slimectl" / "keys" / f"{socket.gethostname()}-{port}"


def leave_key(key: str, port: int) -> Path:
    """Write the key where only this user can read it. Raises OSError, or RuntimeError without a home directory."""
    path = key_file(port)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    staged = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(key + "\n")
    os.replace(staged, path)
    return path


def local_key(url: str) -> str | None:
    """Return the key that a server on this machine has stored for this user, or None."""
    parts = urlsplit(url)
    try:
        if not parts.hostname or not parts.port or not _is_here(parts.hostname):
            return None
        path = key_file(parts.port)
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return None
        return remember(path.read_text(encoding="ascii").strip()) or None
    except (OSError, RuntimeError, ValueError):
        return None


def _is_here(host: str) -> bool:
    """Return whether a host is this machine. Only local addresses can be bound."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True

"""Access control of a server: host names, cross-site requests, and the two keys.

- The Host header must be one of the server's own names. A page that uses DNS rebinding sends its own name instead.
- The Origin header, if a browser sends one, must be the server's own. Pages of other sites are rejected.
- Endpoints that change state require the admin key. The others require the API key, if set. As in SGLang.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

from aiohttp import web

from slimectl.engines.server.errors import Handler, RequestError

HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::\d{1,5})?")
"""Pattern of a Host header: a name or address (IPv6 in brackets) and an optional port."""

SAME_SITE = ("same-origin", "none")
"""Values of Sec-Fetch-Site that browsers send for pages of this server and for typed addresses."""


class Access(Enum):
    """The key that an endpoint requires."""

    OPEN = "open"
    API_KEY = "API key"
    ADMIN_KEY = "admin key"


@dataclass(frozen=True)
class Guard:
    """A server's names and keys. Without `api_key`, generation is open."""

    admin_key: str = field(repr=False)
    api_key: str | None = field(default=None, repr=False)
    names: frozenset[str] = frozenset({"localhost"})
    """Host names that requests may use, in addition to addresses."""
    loopback_only: bool = True
    """Whether the server listens only on the loopback, so that no other address is its own."""

    def check(self, request: web.Request, access: Access) -> None:
        """Raise RequestError for a request without access."""
        host = self._check_host(request)
        _check_origin(request, host)
        self._check_key(request, access)

    def _check_host(self, request: web.Request) -> str:
        """Return the Host header after checking that it is a name of this server."""
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1:
            raise RequestError(f"Host: {len(hosts)} headers instead of one", status=400)
        target = request.raw_path
        # The request target has the host too if the request came through a proxy.
        candidates = [hosts[0], *([] if target.startswith("/") else [urlsplit(target).netloc])]
        for host in candidates:
            match = HOST.fullmatch(host)
            if match is None:
                raise RequestError(f"Host: {host[:100]!a} is not a valid host", status=400)
            name = match[1].strip("[]").rstrip(".").lower()
            if not self._is_own(name):
                raise RequestError(
                    f"Host: {name[:100]!a} is not a name of this server. Use its address, or start it with "
                    f"--allow-host {name[:100]}",
                    status=403,
                )
        return hosts[0].lower()

    def _is_own(self, name: str) -> bool:
        """Return whether a request may use this host. No page can make a browser send another address as Host."""
        if name in self.names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self.loopback_only

    def _check_key(self, request: web.Request, access: Access) -> None:
        if access is Access.OPEN or (access is Access.API_KEY and self.api_key is None):
            return
        keys = [self.admin_key, *([self.api_key] if access is Access.API_KEY and self.api_key else [])]
        sent = request.headers.getall("Authorization", [])
        # Anthropic clients send the key in a separate header, without a scheme.
        sent = sent or [f"bearer {key}" for key in request.headers.getall("x-api-key", [])]
        scheme, _, token = (sent[0] if len(sent) == 1 else "").partition(" ")
        bearer = token.encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""
        # Every key is compared, so that the duration reveals nothing about them.
        matches = [hmac.compare_digest(bearer, key.encode()) for key in keys]
        if not any(matches):
            raise RequestError(
                f"{request.path[:100]}: needs the {access.value} of this server. Send the header "
                f'"Authorization: Bearer KEY" (docs/serving.md tells where to find the key)',
                status=401,
            )


def _check_origin(request: web.Request, host: str) -> None:
    for origin in request.headers.getall("Origin", []):
        if urlsplit(origin).netloc.lower() != host:
            raise RequestError(
                f"Origin: {origin[:100]!a} is another site, which is not allowed to use this server", status=403
            )
    site = request.headers.get("Sec-Fetch-Site", "none")
    if site not in SAME_SITE:
        raise RequestError(
            f"Sec-Fetch-Site: {site[:100]!a}: another site is not allowed to use this server", status=403
        )


def own_names(host: str, allowed: Collection[str] = ()) -> tuple[frozenset[str], bool]:
    """Return the names of a server that listens on `host`, and whether only this machine can reach it."""
    name = host.strip("[]").lower()
    try:
        loopback = ipaddress.ip_address(name).is_loopback
    except ValueError:
        loopback = name == "localhost"
    machine = [] if loopback else [socket.gethostname().lower()]
    return frozenset({"localhost", name, *machine, *(alias.rstrip(".").lower() for alias in allowed)}), loopback


GUARD: web.AppKey[Guard] = web.AppKey("guard", Guard)
ACCESS: web.AppKey[dict[object, Access]] = web.AppKey("access", dict)
"""The access that each handler requires."""


@web.middleware
async def admitted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reject requests without access before reading their body."""
    access = request.app[ACCESS].get(request.match_info.handler, Access.OPEN)
    request.app[GUARD].check(request, access)
    return await handler(request)

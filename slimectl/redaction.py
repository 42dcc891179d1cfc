"""Secrets kept out of what is written down: run.toml, manifests, messages, samples, what trackers are told.

Three things are secrets: a value whose name says so (`api_key`, `password`), what stands before the @ of an address or
in a parameter such as `?token=`, and every value that was taken from settings or the environment as one (`remember`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MASK = "__SECRET__"
"""Stands where a secret was; settings that hold it cannot be used before it is given again."""
REFERENCES = ("env:", "file:")
"""How a value begins that only says where a secret is."""

ALWAYS = {
    "apikey", "authorization", "bearer", "cookie", "credential", "credentials", "passphrase", "passwd", "password",
    "pwd", "secret", "secrets",
}  # fmt: skip
"""Last words of names that are secrets in any company."""
OF_KEYS = {"access", "account", "api", "auth", "encryption", "private", "secret", "signing"}
OF_TOKENS = {"access", "api", "auth", "bearer", "hf", "id", "refresh", "security", "session"}
"""What stands before `key` or `token` in the name of a secret: `stop_token` and `reward_key` are none."""
PARAMETERS = {"key", "sig", "signature", "token"}
"""Names that are secrets as parameters of an address, beside those above."""

USER = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)(?P<user>[^/\s?#\"'<>]+)@")
SLASHED = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)(?P<user>[^/\s?#@:\[]+:(?!\d+(?:[/?#]|$))[^\s\"'<>]*)@")
"""A password with a slash in it, which no client could use, but a message would show."""
ALONE = ("http://", "https://")
"""Schemes of addresses whose user is a secret without a password too; that of ssh://git@host is none."""
PARAMETER = re.compile(r"(?P<name>[?&;][A-Za-z0-9_.\-]+=)(?P<value>[^&#;\s\"'<>]+)")
BEARER = re.compile(r"(?i)\b(?P<scheme>bearer)\s+[A-Za-z0-9+/=._~\-]{16,}")
TABLES = ("data", "values")
"""Tables whose names are the user's own words: data sets in eval.data, verdicts in `values` of judge."""
SHORTEST = 6
"""Characters of a value that is looked for in texts: a shorter one stands in half of all words."""

_SECRETS: set[str] = set()
"""Values that this process has seen as secrets: they are masked wherever they turn up."""


def is_secret_name(name: str) -> bool:
    """Return whether a value of that name is a secret."""
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name)).lower()
    *front, last = re.findall(r"[a-z0-9]+", snake_case) or [""]
    before = front[-1] if front else ""
    if last in ALWAYS or (last == "token" and not front):
        return True
    return (last == "key" and before in OF_KEYS) or (last == "token" and before in OF_TOKENS)


def remember(secret: str) -> str:
    """Mask this value from now on in every text; returns it."""
    if len(secret) >= SHORTEST and not is_reference(secret):
        _SECRETS.add(secret)
    return secret


def is_reference(value: Any) -> bool:
    """Return whether a value is only a word on where the secret is."""
    return isinstance(value, str) and value.startswith(REFERENCES)


def redact_text(text: str) -> str:
    """The text without passwords of addresses, keys of headers, and any secret that was remembered."""
    for secret in sorted((secret for secret in _SECRETS if secret in text), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return BEARER.sub(rf"\g<scheme> {MASK}", mask_addresses(text))


def mask_addresses(text: str) -> str:
    """The text without users, passwords and secret parameters of the addresses in it."""
    if "://" not in text:
        return text
    return PARAMETER.sub(_parameter, USER.sub(_user, SLASHED.sub(_user, text)))


def redact(value: Any, *, name: str = "") -> Any:
    """The value with every secret in it masked; tables and lists are copied, references stay."""
    if value is None or isinstance(value, bool | float):
        return value
    if hasattr(value, "get_secret_value"):
        value, name = value.get_secret_value(), "secret"
    if is_reference(value):
        return value
    if is_secret_name(name) and value != "":
        return MASK
    if isinstance(value, dict):
        return {key: redact(item, name=_name(name, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return mask_addresses(value) if isinstance(value, str) else value


def without_secrets(value: Any, *, name: str = "") -> Any:
    """The value as its hash sees it: equal for the same work, whatever its secrets and wherever they come from."""
    if isinstance(value, dict):
        return {
            key: without_secrets(item, name=_name(name, key))
            for key, item in value.items()
            if not is_secret_name(_name(name, key))
        }
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return mask_addresses(value).replace(f"{MASK}@", "") if isinstance(value, str) else value


def _name(table: str, key: Any) -> str:
    """The name of an entry of a table, empty where it says nothing of the value."""
    return "" if table in TABLES else str(key)


def secrets_in(value: Any, *, name: str = "") -> Iterator[str]:
    """Every secret of a value that stands there itself."""
    if hasattr(value, "get_secret_value"):
        value, name = value.get_secret_value(), "secret"
    if isinstance(value, dict):
        for key, item in value.items():
            yield from secrets_in(item, name="secret" if is_secret_name(name) else _name(name, key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from secrets_in(item, name=name)
    elif isinstance(value, str) and not is_reference(value):
        if is_secret_name(name):
            if value and value != MASK:
                yield value
        elif "://" in value:
            matches = [*USER.finditer(value), *SLASHED.finditer(value)]
            users = [match["user"] for match in matches if _user(match) != match[0]]
            yield from (user.partition(":")[2] or user for user in users if user != MASK)
            yield from (match["value"] for match in PARAMETER.finditer(value) if _is_parameter(match["name"]))


def masked_names(value: Any, *, name: str = "") -> Iterator[str]:
    """Dotted names of values whose secret is not there any more."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from masked_names(item, name=f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        if any(True for item in value for _ in masked_names(item, name=name)):
            yield name
    else:
        text = value.get_secret_value() if hasattr(value, "get_secret_value") else value
        if isinstance(text, str) and MASK in text:
            yield name


def _user(match: re.Match[str]) -> str:
    is_login = ":" not in match["user"] and match["scheme"].lower() not in ALONE
    return match[0] if is_login else f"{match['scheme']}{MASK}@"


def _parameter(match: re.Match[str]) -> str:
    return match["name"] + (MASK if _is_parameter(match["name"]) else match["value"])


def _is_parameter(name: str) -> bool:
    bare = name[1:-1]
    return is_secret_name(bare) or re.split(r"[^a-z0-9]+", bare.lower())[-1] in PARAMETERS

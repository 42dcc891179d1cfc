"""Redacts secrets from all output: run.toml, manifests, messages, samples, trackers.

Three kinds of values are secrets: values with a secret name (`api_key`, `password`), credentials in addresses (before
the @, or in a parameter such as `?token=`), and every value registered as a secret (`remember`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

MASK = "__SECRET__"
"""Replaces a secret. Settings that contain it cannot be used until the secret is set again."""
REFERENCES = ("env:", "file:")
"""Prefixes of values that refer to a secret."""

ALWAYS = {
    "apikey", "authorization", "bearer", "cookie", "credential", "credentials", "passphrase", "passwd", "password",
    "pwd", "secret", "secrets",
}  # fmt: skip
"""Last parts that make any name secret."""
OF_KEYS = {"access", "account", "api", "auth", "encryption", "private", "secret", "signing"}
OF_TOKENS = {"access", "api", "auth", "bearer", "hf", "id", "refresh", "security", "session"}
"""Words before `key` or `token` that make a name secret. `stop_token` and `reward_key` are not secret."""
PARAMETERS = {"key", "sig", "signature", "token"}
"""Further names that are secret as parameters of an address."""

USER = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)(?P<user>[^/\s?#\"'<>]+)@")
SLASHED = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)(?P<user>[^/\s?#@:\[]+:(?!\d+(?:[/?#]|$))[^\s\"'<>]*)@")
"""Matches a password that contains a slash: no client could use it, but a message would show it."""
ALONE = ("http://", "https://")
"""Schemes of addresses whose user is secret even without a password. The user in ssh://git@host is not."""
PARAMETER = re.compile(r"(?P<name>[?&;][A-Za-z0-9_.\-]+=)(?P<value>[^&#;\s\"'<>]+)")
BEARER = re.compile(r"(?i)\b(?P<scheme>bearer)\s+[A-Za-z0-9+/=._~\-]{16,}")
TABLES = ("data", "values")
"""Tables with user-defined keys: data sets in eval.data, verdicts in `values` of judge."""
SHORTEST = 6
"""Minimum length of a value that is masked in texts: a shorter one would match ordinary words."""

_SECRETS: set[str] = set()
"""Secret values known to this process. They are masked in every text."""


@lru_cache(maxsize=4096)  # every settings object asks about the same few hundred names
def is_secret_name(name: str) -> bool:
    """Return whether a value of that name is a secret."""
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name)).lower()
    *leading, last = re.findall(r"[a-z0-9]+", snake_case) or [""]
    qualifier = leading[-1] if leading else ""
    if last in ALWAYS or (last == "token" and not leading):
        return True
    return (last == "key" and qualifier in OF_KEYS) or (last == "token" and qualifier in OF_TOKENS)


def remember(secret: str) -> str:
    """Register a secret, which is then masked in every text. Return it."""
    if len(secret) >= SHORTEST and not is_reference(secret):
        _SECRETS.add(secret)
    return secret


def is_reference(value: Any) -> bool:
    """Return whether a value is a reference to a secret (env:NAME, file:PATH)."""
    return isinstance(value, str) and value.startswith(REFERENCES)


def redact_text(text: str) -> str:
    """Return the text without passwords of addresses, keys of headers, and registered secrets."""
    for secret in sorted((secret for secret in _SECRETS if secret in text), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return BEARER.sub(rf"\g<scheme> {MASK}", mask_addresses(text))


def mask_addresses(text: str) -> str:
    """Return the text with users, passwords and secret parameters of its addresses masked."""
    if "://" not in text:
        return text
    return PARAMETER.sub(_mask_parameter, USER.sub(_mask_user, SLASHED.sub(_mask_user, text)))


def redact(value: Any, *, name: str = "") -> Any:
    """Return the value with every secret in it masked. Tables and lists are copied, references stay."""
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
    """Return the value without its secrets, for hashing: settings that differ in secrets only give the same hash."""
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
    """Return the name of a table's entry. Empty if it is user-defined and does not describe the value."""
    return "" if table in TABLES else str(key)


def secrets_in(value: Any, *, name: str = "") -> Iterator[str]:
    """Yield every secret that a value contains literally, not as a reference."""
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
            users = [match["user"] for match in matches if _mask_user(match) != match[0]]
            yield from (user.partition(":")[2] or user for user in users if user != MASK)
            yield from (match["value"] for match in PARAMETER.finditer(value) if _is_parameter(match["name"]))


def masked_names(value: Any, *, name: str = "") -> Iterator[str]:
    """Yield the dotted names of values whose secret has been masked."""
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


def _mask_user(match: re.Match[str]) -> str:
    is_login = ":" not in match["user"] and match["scheme"].lower() not in ALONE
    return match[0] if is_login else f"{match['scheme']}{MASK}@"


def _mask_parameter(match: re.Match[str]) -> str:
    return match["name"] + (MASK if _is_parameter(match["name"]) else match["value"])


def _is_parameter(name: str) -> bool:
    parameter = name[1:-1]
    return is_secret_name(parameter) or re.split(r"[^a-z0-9]+", parameter.lower())[-1] in PARAMETERS

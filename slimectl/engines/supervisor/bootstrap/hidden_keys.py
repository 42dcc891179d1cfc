"""Passes secret arguments to a server through its environment instead of the command line (standard library only)."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Iterable
from typing import Any

FLAGS, KEYS = "SLIMECTL_FLAGS", "SLIMECTL_KEYS"
"""Variables with a JSON list of command-line arguments, and with [API key, admin key], where null means none."""
MASK = "__SECRET__"


def flags(fields: Collection[str]) -> list[str]:
    """Return the arguments to append to the command line: the flags, and the keys without a flag.

    `fields` are the arguments of the installed server. An old SGLang may support only one key.
    """
    arguments = list(json.loads(os.environ.get(FLAGS, "[]")))
    for field, key in zip(("api_key", "admin_api_key"), keys(), strict=True):
        flag = f"--{field.replace('_', '-')}"
        if key and field in fields and flag not in arguments:
            arguments += [flag, key]
    return joined(arguments)


def joined(arguments: Iterable[str]) -> list[str]:
    """Return the arguments, with a value that begins with a dash joined to its flag.

    argparse takes such a value for a flag, unless it is a number. One in 64 random keys begins with a dash.

    >>> joined(["--admin-api-key", "-x7", "--port", "1", "--bias", "-2.5"])
    ['--admin-api-key=-x7', '--port', '1', '--bias', '-2.5']
    """
    result: list[str] = []
    for word in arguments:
        if result and result[-1].startswith("--") and re.match(r"-(?!-|\d+$|\d*\.\d+$)", word):
            result[-1] += f"={word}"
        else:
            result.append(word)
    return result


def mask_logs() -> None:
    """Mask secrets in all log lines of this process, because SGLang logs all of its arguments when it starts."""
    secrets = [word for word in json.loads(os.environ.get(FLAGS, "[]")) if not word.startswith("--")]
    secrets += [key for key in keys() if key]
    if not secrets:
        return
    make = logging.getLogRecordFactory()

    def masked(*args: Any, **options: Any) -> logging.LogRecord:
        record = make(*args, **options)
        text = record.getMessage()
        if any(secret in text for secret in secrets):
            for secret in secrets:
                text = text.replace(secret, MASK)
            record.msg, record.args = text, ()
        return record

    logging.setLogRecordFactory(masked)


def keys() -> list[str | None]:
    return list(json.loads(os.environ.get(KEYS, "[null, null]")))

"""Manifests: provenance of an output file or folder (stage, settings, inputs, counts)."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slimectl import __version__
from slimectl.data.atomic_replace import write_text
from slimectl.data.ownership import MANIFEST
from slimectl.redaction import mask_addresses, redact, without_secrets


def manifest_path(out: Path) -> Path:
    """`OUT.manifest.json` beside a file, `manifest.json` inside a folder."""
    return out / MANIFEST if out.is_dir() else out.with_name(out.name + f".{MANIFEST}")


def is_manifest(path: Path) -> bool:
    """Return whether a file is a manifest that a stage of this program wrote."""
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"slimectl", "stage"} <= manifest.keys()


def settings_hash(settings: dict[str, Any]) -> str:
    """Hash of settings without their secrets: a new API key does not change the work."""
    return hashlib.sha256(json.dumps(without_secrets(settings), sort_keys=True, default=str).encode()).hexdigest()


class Manifest:
    """Provenance of one stage's work, written beside its output."""

    def __init__(self, stage: str, settings: dict[str, Any], inputs: dict[str, str]) -> None:
        self.facts: dict[str, Any] = {
            "slimectl": __version__,
            "stage": stage,
            "settings": redact(settings),
            "settings_sha256": settings_hash(settings),
            "inputs": {mask_addresses(name): digest for name, digest in inputs.items()},
            "host": socket.gethostname(),
            "started": _now(),
        }

    def unchanged(self, out: Path) -> bool:
        """Whether the same stage made `out` from the same settings and inputs."""
        return self._agrees(out, "stage", "settings_sha256", "inputs")

    def same_inputs(self, out: Path) -> bool:
        """Whether the same stage made `out` from prompts and a model of the same names; they may have changed since."""
        return self._agrees(out, "stage", "rollout.data", "model.path")

    def _agrees(self, out: Path, *keys: str) -> bool:
        try:
            old = json.loads(manifest_path(out).read_text())
        except (OSError, ValueError):
            return False
        return out.exists() and all(_fact(old, key) == _fact(self.facts, key) for key in keys)

    def signed(self, counts: dict[str, int], *, parents: Iterable[str] = ()) -> dict[str, Any]:
        """The complete manifest of the finished work; manifests of the inputs (`parents`) are named if present."""
        parent_manifests = [str(path) for path in map(manifest_path, map(Path, parents)) if path.exists()]
        return {**self.facts, "finished": _now(), "counts": counts, "parents": parent_manifests}

    def write(self, out: Path, *, counts: dict[str, int], parents: Iterable[str] = ()) -> None:
        """Write the manifest of the finished `out`."""
        manifest = self.signed(counts, parents=parents)
        write_text(manifest_path(out), json.dumps(manifest, indent=2, default=str) + "\n")


def _fact(manifest: dict[str, Any], key: str) -> Any:
    """Return an entry of a manifest, or by a dotted key one of its settings."""
    section, _, name = key.rpartition(".")
    return manifest.get("settings", {}).get(section, {}).get(name) if section else manifest.get(key)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

"""Options shared by commands, and their conversion to settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimectl import stdio
from slimectl.errors import SettingsError
from slimectl.redaction import redact, secrets_in

if TYPE_CHECKING:  # the settings' classes take a quarter of a second to build, which help avoids
    from slimectl.settings import Layer, Resolved

STDOUT_NAMES = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


def output_name(out: str | None) -> str | None:
    """Return the name of an output, with every alias of stdout as `-`: records do not go to its file descriptor."""
    return "-" if out in STDOUT_NAMES else out


Config = Annotated[
    list[Path] | None,
    typer.Option("-c", "--config", metavar="FILE", help="Settings file (TOML); several may be given, later ones win"),
]
Assign = Annotated[
    list[str] | None,
    typer.Option("-s", "--set", metavar="KEY=VALUE", help="One setting, e.g. -s train.lr=1e-5"),
]
Model = Annotated[str | None, typer.Option("--model", metavar="DIR", help="Model: a Hugging Face directory")]
Data = Annotated[list[str] | None, typer.Option("--data", metavar="PROMPTS", help="Prompt source; - is stdin")]
Backend = Annotated[str | None, typer.Option("--backend", help="What trains: fsdp or megatron")]
Executor = Annotated[str | None, typer.Option("--executor", help="Where work runs: local or ray")]
RayAddress = Annotated[
    str | None, typer.Option("--ray-address", metavar="HOST:PORT", help="A running Ray cluster; implies --executor ray")
]
Engine = Annotated[str | None, typer.Option("--engine", help="What samples: embedded, sglang or vllm")]
Engines = Annotated[int | None, typer.Option("--engines", help="Engines to start")]
EngineUrl = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-url", metavar="URL", help="Running server (SGLang, vLLM, `slimectl serve`); may be repeated"
    ),
]
EvalConfig = Annotated[
    Path | None, typer.Option("--eval-config", metavar="FILE", help="Datasets and their settings (YAML or TOML)")
]
Out = Annotated[
    str, typer.Option("--out", "-o", metavar="FILE", help="Where samples go; - is stdout", callback=output_name)
]
Samples = Annotated[str, typer.Argument(metavar="SAMPLES", help="Samples (JSONL, .gz, .zst); - is stdin")]
RmType = Annotated[
    str | None, typer.Option("--rm-type", help="Verifier: math, dapo, gpqa, f1, code, exact, … (docs/verifiers.md)")
]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Worker processes that grade; 0 is this process, without a time limit")
]
OnError = Annotated[str, typer.Option("--on-error", help="A bad line: stop, or skip (counted and reported)")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the settings with their origins and do nothing")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is already there")]


def resolved(
    config: list[Path] | None,
    assign: list[str] | None,
    flags: dict[str, Any],
    recipe: Layer | None = None,
    eval_config: Path | None = None,
) -> Resolved:
    """Resolve settings: defaults < recipe < files < environment < -s < flags; unset flags (None, []) are ignored."""
    from slimectl.settings import Layer, resolve
    from slimectl.settings.loading import from_assignments, from_environment, from_eval_config, from_file

    layers = [recipe] if recipe else []
    layers += [from_file(path) for path in config or []]
    layers += [from_eval_config(eval_config)] if eval_config else []
    assigned = from_assignments(assign or [])
    if next(secrets_in(assigned.values), None) is not None:
        print("slimectl: -s: everybody on this machine can read a command line; give a secret as env:NAME or file:PATH",
              file=sys.stderr)  # fmt: skip
    layers += [from_environment(), assigned]
    values: dict[str, dict[str, Any]] = {}
    for name, value in flags.items():
        if value is not None and value != []:
            section, key = name.split(".")
            values.setdefault(section, {})[key] = value
    return resolve([*layers, Layer("flag", values)])


def cluster_flags(executor: str | None, ray_address: str | None) -> dict[str, Any]:
    """Settings of the executor from its flags."""
    if ray_address and executor is None:
        executor = "ray"
    return {"cluster.executor": executor, "cluster.ray_address": ray_address}


def engine_flags(engine: str | None, engines: int | None, engine_url: list[str] | None) -> dict[str, Any]:
    """Settings of the engine from its flags."""
    return {"engine.backend": engine, "engine.num_engines": engines, "engine.url": engine_url}


def print_settings(resolution: Resolved) -> None:
    """Print every setting with the layer that set it, on stdout."""
    width = max(len(name) for name in resolution.origins)
    for name, value in shown(resolution):
        stdio.emit(f"{name:<{width}}  {toml_value(value):<24}  # {resolution.origins[name]}")


def shown(resolution: Resolved) -> Iterator[tuple[str, Any]]:
    """Yield every dotted key with its value, secrets masked."""
    from pydantic import SecretStr

    from slimectl.settings.loading import flat

    for name, value in flat(resolution.settings):
        yield name, redact(value, name=name.rpartition(".")[2] if isinstance(value, SecretStr) else "")


def toml_value(value: Any) -> str:
    """Format a value in the syntax of `-s`."""
    import tomli_w

    if value is None:
        return "none"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


def needs_destination(out: str) -> None:
    """Raise SettingsError if records would be written to a terminal."""
    if out == "-" and stdio.is_terminal():
        raise SettingsError("stdout is a terminal; add --out FILE, or pipe into the next stage")


def check_on_error(on_error: str) -> None:
    if on_error not in ("stop", "skip"):
        raise SettingsError(f"--on-error: {on_error!r} is neither stop nor skip")

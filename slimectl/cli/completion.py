"""Shell completion: the candidates for the last word of a command line, and `slimectl completion SHELL`.

The scripts in completions/ call `slimectl` with the shell's name in _SLIMECTL_COMPLETE and the line up to the cursor
in _SLIMECTL_LINE. Each line of the output is a candidate: its text, a tab, its description. To be fast, it does not
build the settings. Their keys come from a cache, which is rewritten when slimectl changes. Names of components that
other packages add are read each time.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from slimectl import __version__
from slimectl.errors import SettingsError

SHELLS = ("bash", "fish", "zsh")
PACKAGE = Path(__file__).parents[1]

Candidate = tuple[str, str]
"""A word and its description."""


def completion(shell: Annotated[str, typer.Argument(help="Shell: bash, zsh or fish")]) -> None:
    """Print a shell completion script.

    Example:

        slimectl completion bash > slimectl-completion.bash
    """
    if shell not in SHELLS:
        raise SettingsError(f"completion: {shell!r} is not supported. Choose one of {', '.join(SHELLS)}")
    installed = PACKAGE / "completions"
    folder = installed if installed.is_dir() else PACKAGE.parent / "completions"
    print((folder / f"slimectl.{shell}").read_text(encoding="utf-8"), end="")


def print_candidates(app: typer.Typer, shell: str, line: str) -> None:
    """Print the candidates for the last word of `line`, or nothing if the shell should complete file names."""
    words, last = split(line)
    # bash completes what follows the last = or : of a word.
    start = max(last.rfind("="), last.rfind(":")) + 1 if shell == "bash" else 0
    for word, text in candidates(typer.main.get_command(app), words[1:], last):
        if word.startswith(last):
            summary = (
                "" if shell == "bash" else "\t" + shorten(text.partition(". ")[0].rstrip("."), 80, placeholder="…")
            )
            print(word[start:] + summary)


def split(line: str) -> tuple[list[str], str]:
    """Split a line into its complete words and the last one, which may be empty.

    >>> split("slimectl run -s train."), split("slimectl run "), split("slimectl run 'my r")
    ((['slimectl', 'run', '-s'], 'train.'), (['slimectl', 'run'], ''), (['slimectl', 'run'], 'my r'))
    """
    for closing in ("", '"', "'"):
        with suppress(ValueError):
            words = shlex.split(line + closing)
            return (words, "") if not closing and line[-1:].isspace() else (words[:-1], "".join(words[-1:]))
    return line.split(), ""


def candidates(command: Any, words: Iterable[str], last: str) -> Iterator[Candidate]:
    """Yield the candidates for the next word. `words` are the complete words after the command's name."""
    option, position, path = None, 0, ""
    for word in words:
        if option is not None:
            option = None
        elif word.startswith("-"):
            name, equals, _ = word.partition("=")
            taken = _option(command, name)
            option = taken if taken is not None and not taken.is_flag and not equals else None
        elif word in getattr(command, "commands", {}):
            command, position, path = command.commands[word], 0, f"{path} {word}".strip()
        else:
            position += 1
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    if option is not None:
        yield from _values(path, option, last)
    elif last.startswith("-"):
        for param in command.params:
            for name in param.opts if param.param_type_name == "option" and not param.hidden else ():
                yield name, param.help or ""
    elif hasattr(command, "commands"):
        for name, sub in command.commands.items():
            yield name, sub.get_short_help_str(limit=80)
    elif position < len(arguments) or (arguments and arguments[-1].nargs == -1):
        yield from _values(path, arguments[min(position, len(arguments) - 1)], last)


def _option(command: Any, name: str) -> Any:
    options = [param for param in command.params if param.param_type_name == "option"]
    return next((param for param in options if name in param.opts), None)


def _values(path: str, param: Any, last: str) -> Iterator[Candidate]:
    """Yield the values of an option or argument, by its type or else by its name."""
    if choices := _choices(param):
        yield from ((str(choice), "") for choice in choices)
    elif complete := VALUES.get(f"{path} {param.name}", VALUES.get(param.name)):
        yield from complete(last)


def _choices(param: Any) -> tuple[Any, ...]:
    """Return the values of an option that is a Literal."""
    descriptor = getattr(param, "type_descriptor", None)  # typer before 0.27 uses click's type
    if descriptor is None:
        return tuple(getattr(param.type, "choices", ()))
    kinds = [descriptor.annotation, *get_args(descriptor.annotation)]
    return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())


def _settings(last: str, *, trains_on: str | None = None) -> Iterator[Candidate]:
    """Yield `section.key=`, or after the = the values of a setting with named values, or the files for a path.

    If `trains_on` is given, only algorithms that train on it are included.
    """
    key, equals, _ = last.partition("=")
    for name, (kind, text) in _reference().items():
        if not equals:
            yield f"{name}=", text
        elif name == key:
            values = [part.strip() for part in kind.replace(" or ", " | ").split(" | ")]
            named = [*_named_values(name, trains_on), *(value for value in values if value.isidentifier())]
            types = ("string", "integer", "number", "object", "boolean", "any")
            yield from ((f"{key}={value}", "") for value in dict.fromkeys(named) if value not in types)
            yield from ((f"{key}={value}", "") for value in ("true", "false") if "boolean" in values)
            if name.endswith(PATH_ENDINGS):
                yield from ((f"{key}={file}", "") for file in _files(last.partition("=")[2]))


def _files(last: str) -> Iterator[str]:
    """Yield the files and folders whose path begins with `last`. Folders end in /."""
    parent = last[: last.rfind("/") + 1]
    with suppress(OSError):
        for file in sorted(Path(parent or ".").iterdir()):
            if file.name.startswith(".") <= last[len(parent) :].startswith("."):
                yield f"{parent}{file.name}{'/' if file.is_dir() else ''}"


def _named_values(key: str, trains_on: str | None) -> list[str]:
    """Return the values of a setting that selects an algorithm or another component."""
    if key == "algorithm.name":
        return [name for name, (_, kind) in _cached()["algorithms"].items() if trains_on in (None, kind)]
    complete = NAMED.get(key)
    return [value for value, _ in complete("")] if complete else []


def _keys(last: str) -> Iterator[Candidate]:
    return ((name, text) for name, (_, text) in _reference().items())


def _algorithms(last: str) -> Iterator[Candidate]:
    return ((name, text) for name, (text, _) in _cached()["algorithms"].items())


def _recipes(last: str) -> Iterator[Candidate]:
    yield from ((file.stem, "built-in recipe") for file in sorted((PACKAGE / "recipes").glob("*.toml")))
    yield from ((str(file), "") for file in sorted(Path().glob(f"{last}*.toml")))


def _sweeps(last: str) -> Iterator[Candidate]:
    return ((str(file), "") for file in sorted(Path().glob(f"{last}*.toml")))


def _tasks(last: str) -> Iterator[Candidate]:
    folder = PACKAGE / "recipes" / "benchmark_tasks"
    yield from ((file.stem, "built-in task") for file in sorted(folder.glob("*.toml")))
    yield from ((str(file), "") for file in sorted(Path().glob(f"{last}*.toml")))


def _templates(last: str) -> Iterator[Candidate]:
    for file in sorted((PACKAGE / "recipes" / "templates").glob("*/slimectl.toml")):
        yield file.parent.name, file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _runs(last: str) -> Iterator[Candidate]:
    """Yield the folders of runs in runs/ and in the folder that the word names."""
    parents = {Path("runs"), Path(last) if last.endswith("/") else Path(last).parent}
    for parent in sorted(parents):
        yield from ((str(file.parent), "run") for file in sorted(parent.glob("*/run.toml")))


def _paths(last: str) -> Iterator[Candidate]:
    """Yield the runs that begin with the word. Without any, the shell completes file names."""
    return (run for run in _runs(last) if last and run[0].startswith(last))


def _cards(last: str) -> Iterator[Candidate]:
    from slimectl.architectures import cards

    return ((name, "model card") for name in cards.names())


def _verifiers(last: str) -> Iterator[Candidate]:
    from slimectl.plugins.registry import VERIFIERS

    return ((name, "verifier") for name in VERIFIERS.names())


def _parts(registry: str) -> Callable[[str], Iterator[Candidate]]:
    def names(last: str) -> Iterator[Candidate]:
        from slimectl.plugins import registry as registries

        table = getattr(registries, registry)
        return ((name, table.kind) for name in table.names())

    return names


def _words(*names: str) -> Callable[[str], Iterator[Candidate]]:
    return lambda last: ((name, "") for name in names)


def _metrics(last: str) -> Iterator[Candidate]:
    from slimectl.data.metrics_catalogue import CATALOGUE

    return ((metric.name, metric.definition) for metric in CATALOGUE)


def _environments(last: str) -> Iterator[Candidate]:
    from slimectl.plugins.registry import ENVIRONMENTS

    return ((f"{name}:", "environment") for name in ENVIRONMENTS.names())


def _token_figures(last: str) -> Iterator[Candidate]:
    from slimectl.cli.tokens import NAMES

    return ((name, "") for name in NAMES)


def _sorting_fields(last: str) -> Iterator[Candidate]:
    return ((f"{'-' if last.startswith('-') else ''}{name}", "") for name in SORTING_FIELDS)


SORTING_FIELDS = ("reward", "response_length", "index", "group_index", "status", "mismatch", "advantage", "version")
"""Fields of samples and of their index that are offered for `inspect --sort`."""
PATH_ENDINGS = ("path", "_paths", "_load", "_dir", ".dir", "engine.load", "rollout.data", "sft_warmup.data")
"""Suffixes of settings whose values are files or folders."""
NAMED: dict[str, Callable[[str], Iterator[Candidate]]] = {
    "model.card": _cards,
    "score.rm_type": _verifiers,
    "engine.backend": _parts("ENGINES"),
    "train.backend": _parts("POLICIES"),
    "cluster.executor": _parts("EXECUTORS"),
    "rollout.env": _environments,
}
"""Completion of settings that select a component."""
VALUES: dict[str, Callable[[str], Iterator[Candidate]]] = {
    "assign": _settings,
    "run assign": partial(_settings, trains_on="rollouts"),
    "recipe": _recipes,
    "sweep file": _sweeps,
    "tasks": _tasks,
    "resume": _runs,
    "model": _paths,
    "inspect paths": _paths,
    "card": _cards,
    "algorithm": _algorithms,
    "rm_type": _verifiers,
    "engine": _parts("ENGINES"),
    "backend": _parts("POLICIES"),
    "executor": _parts("EXECUTORS"),
    "on_error": _words("stop", "skip"),
    "naming": _words("slime", "roll"),
    "shell": _words(*SHELLS),
    "models action": _words("list", "show", "check", "create"),
    "models name": _cards,
    "convert to": _words("hf", "torch_dist"),
    "quantize": _words("fp8", "fp8_tensor", "fp8_channel", "int4"),
    "env": _environments,
    "inspect sort": _sorting_fields,
    "inspect metric": _metrics,
    "axis": _words("step", "round", "time"),
    "report paths": _paths,
    "color_by": _token_figures,
    "init template": _templates,
    "metrics pattern": _metrics,
    "diff before": _paths,
    "diff after": _paths,
    "settings explain key": _keys,
}
"""Completion by parameter name, or by command and parameter name."""


def _reference() -> dict[str, list[str]]:
    reference: dict[str, list[str]] = _cached()["settings"]
    return reference


def _cached() -> dict[str, Any]:
    """Return keys and algorithms from the cache of this installation. Computes and caches them if there is none."""
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slimectl" / f"completion-{_state()}.json"
    )
    with suppress(OSError, ValueError):
        cached: dict[str, Any] = json.loads(cache.read_text(encoding="utf-8"))
        return cached
    content = _computed()
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        for outdated in cache.parent.glob("completion-*"):
            outdated.unlink(missing_ok=True)
        staged = cache.with_suffix(f".{os.getpid()}")
        staged.write_text(json.dumps(content), encoding="utf-8")
        staged.replace(cache)
    return content


def _state() -> str:
    """Return a digest of the installation and its settings modules, on which the cache depends."""
    stamps = [file.stat().st_mtime_ns for file in sorted((PACKAGE / "settings").glob("*.py"))]
    return sha256(json.dumps([__version__, str(PACKAGE), stamps]).encode()).hexdigest()[:16]


def _computed() -> dict[str, Any]:
    from slimectl.settings.algorithm import ALGORITHMS
    from slimectl.settings.reference import descriptions, entries

    settings = {entry.key: [entry.kind, entry.text] for entry in entries() if entry.key.count(".") == 1}
    for name, cls in ALGORITHMS.items():
        settings.pop(f"algorithm.{name}", None)
        texts = descriptions(cls)
        for field, info in cls.model_fields.items():
            settings.setdefault(f"algorithm.{info.alias or field}", ["any", " ".join(texts.get(field, "").split())])
    summaries = {
        name: [(cls.__doc__ or "").strip().partition("\n")[0], cls.trains_on] for name, cls in ALGORITHMS.items()
    }
    return {"settings": settings, "algorithms": summaries}

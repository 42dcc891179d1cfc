"""Options shared by commands, and their conversion to settings."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from slimectl.cli import tokens
from slimectl.errors import SettingsError, SlimectlError
from slimectl.system import stdio
from slimectl.system.redaction import redact, secrets_in

if TYPE_CHECKING:  # building the settings classes takes a quarter of a second, which --help avoids
    from slimectl.cli.viewer.library import Library, SamplesFile
    from slimectl.settings import Layer, Resolved

STDOUT_NAMES = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


def output_name(out: str | None) -> str | None:
    """Return the name of an output, with aliases of stdout as `-`: records are not written to its file descriptor."""
    return "-" if out in STDOUT_NAMES else out


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line for a list")]
SystemMessage = Annotated[str | None, typer.Option("--system", help="System message")]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", help="Maximum tokens of a response. Default: as in the model's run, or 1024", min=1),
]
Temperature = Annotated[float | None, typer.Option("--temperature", help="Softmax temperature. 0 is greedy", min=0.0)]
SamplingSeed = Annotated[int | None, typer.Option("--seed", help="Sampling seed", min=0)]
CLUSTER = "executor ray_address"
ENGINES = "engine engines engine_url"
SETTINGS = "config assign"
"""Names of options that commands use together."""


MAX_ANSWER = 1024
"""Default maximum tokens of a response of `ask` and `chat`."""


def set_log_level(level: str | None) -> str | None:
    """Apply --log-level to this process and its children. Raises BadParameter for an unknown level."""
    if level is not None:
        if level.lower() not in stdio.LEVELS:
            levels = ", ".join(stdio.LEVELS)
            raise typer.BadParameter(f"{level!r} is not one of {levels}")
        os.environ[stdio.LOG_LEVEL] = level.lower()
        stdio.log_to_stderr()
    return level


def set_quiet(quiet: bool) -> bool:
    """Apply --quiet to this process and its children: show only errors."""
    if quiet:
        set_log_level("error")
    return quiet


@dataclass(kw_only=True, eq=False, repr=False)
class MessageOptions:
    """Options of every command for the messages to show (see `with_messages`)."""

    log_level: Annotated[
        str | None,
        typer.Option(
            "--log-level",
            metavar="LEVEL",
            envvar=stdio.LOG_LEVEL,
            callback=set_log_level,
            help="Messages to show: debug (with time and location), info, warning or error",
        ),
    ] = None
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", callback=set_quiet, help="Show only errors and the result, like --log-level error"
        ),
    ] = False


@dataclass(kw_only=True, eq=False, repr=False)
class CommonOptions:
    """Options that several commands share. A command selects its own with `with_options`, in the order of its help."""

    config: Annotated[
        list[Path] | None,
        typer.Option(
            "-c",
            "--config",
            metavar="FILE",
            help="Settings file (TOML or YAML, repeatable). Later files override earlier ones",
        ),
    ] = None
    assign: Annotated[
        list[str] | None,
        typer.Option(
            "-s", "--set", metavar="KEY=VALUE", help="Override one setting, e.g. -s train.lr=1e-5 (repeatable)"
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Model directory (Hugging Face format)")
    ] = None
    data: Annotated[list[str] | None, typer.Option("--data", metavar="PROMPTS", help="Prompt source, - for stdin")] = (
        None
    )
    input_key: Annotated[
        str | None, typer.Option("--input-key", metavar="KEY", help="Column of the prompt, e.g. question")
    ] = None
    label_key: Annotated[
        str | None,
        typer.Option("--label-key", metavar="KEY", help="Column of the ground truth, e.g. reward_model.ground_truth"),
    ] = None
    n: Annotated[int | None, typer.Option("--n", "-n", help="Responses per prompt")] = None
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate")] = None
    backend: Annotated[str | None, typer.Option("--backend", help="Training backend: fsdp or megatron")] = None
    executor: Annotated[str | None, typer.Option("--executor", help="Executor: local or ray")] = None
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address", metavar="HOST:PORT", help="Address of a running Ray cluster. Implies --executor ray"
        ),
    ] = None
    engine: Annotated[
        str | None, typer.Option("--engine", help="Inference engine: auto, embedded, transformers, sglang or vllm")
    ] = None
    engines: Annotated[int | None, typer.Option("--engines", help="Number of engines to start")] = None
    engine_url: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-url", metavar="URL", help="URL of a running server: SGLang, vLLM or `slimectl serve` (repeatable)"
        ),
    ] = None
    agent: Annotated[
        str | None,
        typer.Option("--agent", metavar="COMMAND", help="Program to run for each attempt, e.g. 'python agent.py'"),
    ] = None
    env: Annotated[
        str | None,
        typer.Option("--env", metavar="KIND:ID", help="Environment to act in, e.g. gymnasium:FrozenLake-v1"),
    ] = None
    eval_config: Annotated[
        Path | None,
        typer.Option("--eval-config", metavar="FILE", help="Evaluation datasets and their settings (YAML or TOML)"),
    ] = None
    custom_config: Annotated[
        Path | None,
        typer.Option(
            "--custom-config", metavar="FILE", help="Settings for your own functions: [custom] (YAML or TOML)"
        ),
    ] = None
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="Output file, - for stdout", callback=output_name)
    ] = "-"
    samples: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SAMPLES",
            help="Sample files in order (JSONL, .gz, .zst, FILE@[a:b] for a slice). Default: - for stdin",
        ),
    ] = None
    rm_type: Annotated[
        str | None, typer.Option("--rm-type", help="Verifier: math, dapo, gpqa, f1, code, exact, … (docs/verifiers.md)")
    ] = None
    workers: Annotated[
        int | None,
        typer.Option("--workers", help="Worker processes for grading. 0 grades in this process, without time limits"),
    ] = None
    on_error: Annotated[str, typer.Option("--on-error", help="On a bad line: stop, or skip and count it")] = "stop"
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run all preflight checks, print non-default settings, and exit")
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Replace existing output")] = False

    @property
    def sample_paths(self) -> list[str]:
        """Sample files, `-` if none is given. Raises SettingsError if stdin is given twice."""
        paths = self.samples or ["-"]
        if paths.count("-") > 1:
            raise SettingsError("SAMPLES: - is given twice, but stdin can only be read once")
        return paths

    def flags(self) -> dict[str, Any]:
        """Return the settings that the options set. An option that is not given is None."""
        return {
            "model.path": self.model,
            "rollout.data": self.data,
            "rollout.input_key": self.input_key,
            "rollout.label_key": self.label_key,
            "rollout.agent": self.agent,
            "rollout.env": self.env,
            "rollout.n_samples_per_prompt": self.n,
            "train.lr": self.lr,
            "train.backend": self.backend,
            "cluster.executor": "ray" if self.ray_address and self.executor is None else self.executor,
            "cluster.ray_address": self.ray_address,
            "engine.backend": self.engine,
            "engine.num_engines": self.engines,
            "engine.url": self.engine_url,
            "score.rm_type": self.rm_type,
            "score.workers": self.workers,
        }

    def resolve(
        self,
        flags: Mapping[str, Any] = MappingProxyType({}),
        *,
        recipe: Layer | None = None,
        lent: Sequence[str] = (),
        smoke: Mapping[str, Any] = MappingProxyType({}),
    ) -> Resolved:
        """Resolve settings: defaults < recipe < files < environment < -s < flags. Unset flags (None, []) are ignored.

        `flags` are the values of the command's own options. The settings `lent` default to the values in the run that
        made the model, and are logged if used. `smoke` has the values of a smoke run, which replace files and
        environment. Raises SettingsError with a line for every error.
        """
        from slimectl.settings import Layer, resolve
        from slimectl.settings.layers import nested

        layers, problems = self._layers(flags, recipe)
        if smoke:
            layers = [Layer("--smoke", nested(smoke)), *layers[-2:]]
        if not lent:
            return resolve(layers, problems)
        from slimectl.data.lent_settings import lent_layer
        from slimectl.settings.keys import toml_value

        layer = lent_layer(layers, lent)
        resolution = resolve([layer, *layers] if layer else layers, problems)
        used = [
            f"{name}={toml_value(value)}"
            for name, value in shown(resolution)
            if layer and resolution.origins[name] == layer.origin
        ]
        if layer and used:
            stdio.note(f"using {', '.join(used)} from {layer.origin}")
        return resolution

    def examine(self) -> tuple[Resolved, list[str]]:
        """Resolve the settings as far as they are valid. Also return a line for every error."""
        from slimectl.settings.loading import examine

        layers, problems = self._layers({}, None)
        resolution, errors = examine(layers)
        return resolution, [*problems, *errors]

    def _layers(self, flags: Mapping[str, Any], recipe: Layer | None) -> tuple[list[Layer], list[str]]:
        """Return the layers, lowest priority first, and the errors of layers that cannot be read."""
        from slimectl.settings import Layer
        from slimectl.settings.layers import (
            from_custom_config,
            from_environment,
            from_eval_config,
            from_file,
            read_assignments,
            read_layers,
        )

        if self.on_error not in ("stop", "skip"):
            raise SettingsError(f"--on-error: {self.on_error!r} is neither stop nor skip")
        files = [functools.partial(from_file, path) for path in self.config or []]
        files += [functools.partial(from_eval_config, self.eval_config)] if self.eval_config else []
        files += [functools.partial(from_custom_config, self.custom_config)] if self.custom_config else []
        read, problems = read_layers(files)
        assigned, mistakes = read_assignments(self.assign or [])
        if next(secrets_in(assigned.values), None) is not None:
            remedy = "Give a secret as env:NAME or file:PATH"
            stdio.note(f"slimectl: -s: all users of this machine can read the command line. {remedy}", level="warning")
        values: dict[str, dict[str, Any]] = {}
        for name, value in {**self.flags(), **flags}.items():
            if value is not None and value != []:
                section, key = name.split(".")
                values.setdefault(section, {})[key] = value
        layers = [*([recipe] if recipe else []), *read, from_environment(), assigned, Layer("flag", values)]
        return layers, [*problems, *mistakes]


@dataclass
class Selection:
    """Which samples `slimectl inspect` shows, and how."""

    rows: Annotated[int, typer.Option("--rows", help="Number of samples to print", min=0)] = 3
    condition: Annotated[
        str, typer.Option("--where", metavar="EXPR", help="Filter samples: \"reward < 0.5 and 'so' in response\"")
    ] = ""
    sort: Annotated[
        str, typer.Option("--sort", metavar="FIELD", help="Sort samples by a field. -FIELD sorts in descending order")
    ] = ""
    color_by: Annotated[
        str, typer.Option("--color-by", metavar="NUMBER", help=f"Colour tokens by {', '.join(tokens.NAMES)}")
    ] = ""
    as_json: AsJson = False
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain each reward by grading again with the run's verifier")
    ] = False
    model: str | None = None
    """Folder of the tokenizer, overrides the files' manifests."""
    _decoders: dict[Path | None, Any] = field(default_factory=dict)

    def decoder(self, library: Library, file: SamplesFile) -> Any:
        """Return the decoder of a file's tokens, or None if it has none, which is logged once."""
        folder = Path(self.model) if self.model else library.model_folder(file)
        if folder not in self._decoders:
            self._decoders[folder] = tokens.decoder(folder)
            if self._decoders[folder] is None:
                reason = f"the tokenizer of {folder} cannot be loaded" if folder else "no manifest names the model"
                stdio.note(f"{file.path}: {reason}, so tokens are shown as numbers. Add --model DIR")
        return self._decoders[folder]


def with_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options `names` (separated by blanks, in the order of its help) as parameters for typer.

    A name is a parameter of the command, or a field of a dataclass that is the type of one of its parameters. This
    parameter gets an instance with the values of the selected fields and the defaults of all others. The name of such
    a parameter selects all its fields. The command's own parameters take precedence over fields of the same name, and
    fields of an earlier parameter over fields of a later one.
    """
    requested = " ".join(names).split()

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        groups = {name: param for name, param in signature.parameters.items() if is_dataclass(param.annotation)}
        options = {name: param for name, param in signature.parameters.items() if name not in groups}
        order = [
            option
            for name in requested
            for option in (_options_of(groups[name].annotation) if name in groups else [name])
        ]
        group_of: dict[str, str] = {}
        for group, param in groups.items():
            for name, field_option in _options_of(param.annotation).items():
                if name in order and name not in options:
                    options[name], group_of[name] = field_option, group

        @functools.wraps(command)
        def body(**values: Any) -> None:
            arguments: dict[str, Any] = {group: {} for group in groups}
            for name, value in values.items():
                (arguments[group_of[name]] if name in group_of else arguments)[name] = value
            command(**arguments | {group: param.annotation(**arguments[group]) for group, param in groups.items()})

        params = [options[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in order]
        body.__signature__ = signature.replace(parameters=params)  # type: ignore[attr-defined]
        body.__annotations__ = {param.name: param.annotation for param in params}
        return body

    return decorate


def with_messages(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of MessageOptions after its own. Their callbacks apply them."""
    options = _options_of(MessageOptions)

    @functools.wraps(command)
    def body(**values: Any) -> None:
        command(**{name: value for name, value in values.items() if name not in options})

    signature = inspect.signature(command, eval_str=True)
    params = [*signature.parameters.values(), *options.values()]
    params = [param.replace(kind=inspect.Parameter.KEYWORD_ONLY) for param in params]
    body.__signature__ = signature.replace(parameters=params)  # type: ignore[attr-defined]
    body.__annotations__ = {param.name: param.annotation for param in params}
    return body


@functools.cache
def _options_of(group: Any) -> dict[str, inspect.Parameter]:
    """Return the fields of a dataclass as parameters. A field that is annotated with a text has it as its help."""
    types = get_type_hints(group, include_extras=True)
    options = {}
    for each in fields(group):
        annotation = types[each.name]
        if isinstance(text := getattr(annotation, "__metadata__", (None,))[0], str):
            annotation = Annotated[annotation.__origin__, typer.Option(help=text)]
        options[each.name] = inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=annotation
        )
    return options


def print_settings(resolution: Resolved, *, only_changed: bool = False) -> None:
    """Print settings with the layers that set them to stdout: all, or only those that differ from their defaults."""
    from slimectl.settings.keys import changed, toml_value, unused_interpreters

    unused = unused_interpreters(resolution.settings.engine.backend)
    own = [name for name in changed(resolution.settings) if name not in unused]
    names = own if only_changed else list(resolution.origins)
    width = max(map(len, names), default=0)
    for name, value in shown(resolution):
        if name in names:
            stdio.emit(f"{name:<{width}}  {toml_value(value):<24}  # {resolution.origins[name]}")


def print_preflight(
    resolution: Resolved, *checks: str, samples: Sequence[str] = (), new_run: bool = False, resumed: bool = False
) -> None:
    """Print the results of `checks` (see runtime/preflight.py) and the settings that differ from their defaults.

    Raises SlimectlError, with the exit code of the first check that failed.
    """
    from slimectl.runtime.preflight import preflight

    results = []
    for result in preflight(resolution.settings, checks, samples=samples, new_run=new_run, resumed=resumed):
        results.append(result)
        stdio.emit(str(result))
    stdio.emit("")
    print_settings(resolution, only_changed=True)
    if failed := [result for result in results if result.fine is False]:
        error = SlimectlError(f"{len(failed)} of {len(results)} checks failed: {', '.join(r.what for r in failed)}")
        error.exit_code = failed[0].exit_code
        raise error


def shown(resolution: Resolved) -> Iterator[tuple[str, Any]]:
    """Yield every dotted key with its value. Secrets are masked."""
    from pydantic import SecretStr

    from slimectl.settings.keys import flat

    for name, value in flat(resolution.settings):
        yield name, redact(value, name=name.rpartition(".")[2] if isinstance(value, SecretStr) else "")


def sends_plain_text(resolution: Resolved) -> bool:
    """Return whether a layer sets that texts are sent without the chat template."""
    name = "rollout.apply_chat_template"
    return resolution.origins[name] != "default" and not resolution.settings.rollout.apply_chat_template


def answer_tokens(resolution: Resolved, max_tokens: int | None) -> int:
    """Return the maximum tokens of a response of `ask` and `chat`, from the option, a layer or the default."""
    if max_tokens is not None:
        return max_tokens
    is_set = resolution.origins["rollout.max_response_len"] != "default"
    return resolution.settings.rollout.max_response_len if is_set else MAX_ANSWER


def needs_destination(out: str) -> None:
    """Raise SettingsError if records would be written to a terminal."""
    if out == "-" and stdio.is_terminal():
        raise SettingsError("stdout is a terminal. Add --out FILE, or pipe into the next stage")

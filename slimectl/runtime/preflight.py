"""Preflight: checks model, data, reward, hooks, packages, memory and disk of a command without writing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from slimectl.data.io import is_pipe
from slimectl.data.prompts import ordered_rows
from slimectl.data.run_dir import RunDir
from slimectl.data.source_identity import check_data
from slimectl.errors import RecordError, SettingsError, SlimectlError, missing_library
from slimectl.hooks import HOOKS, check_hooks, hooks
from slimectl.runtime import builders
from slimectl.runtime.capacity import configuration, disk, is_readable, memory, shape_of
from slimectl.runtime.check_result import CheckResult
from slimectl.runtime.first_prompts import (
    check_grading,
    check_source,
    check_training_samples,
    first_prompts,
    name_model_tokens,
    shown,
)
from slimectl.settings import Settings
from slimectl.settings.needs import Need
from slimectl.settings.score import ScoreSettings
from slimectl.stages.evaluate import resolve_dataset_settings

Check = Callable[[Settings], str]
"""A check that returns a description, empty if there is nothing to check. It raises SlimectlError if it fails."""


def preflight(
    settings: Settings,
    names: Sequence[str],
    *,
    samples: Sequence[str] = (),
    new_run: bool = False,
    resumed: bool = False,
) -> Iterator[CheckResult]:
    """Run the named checks: keys of CHECKS, and DATASETS for the rows and reward of every dataset of [eval].

    `samples` are the input files of the command, if any. A `new_run` needs a free folder, and a `resumed` one needs the
    data of its checkpoint. Nothing is written, and no weight is read.
    """
    if new_run:
        yield from _results("folder", _folder, settings)
    if resumed:
        yield from _results("resume", partial(_resume, sources=samples or settings.rollout.data), settings)
    if samples:
        trains = "trainer" in names
        yield from _results("samples", partial(_first_samples, paths=samples, trains=trains), settings)
    for name in names:
        if name != DATASETS:
            yield from _results(name, CHECKS[name], settings)
            continue
        for dataset in settings.eval.data:
            for what, check in DATASET_CHECKS.items():
                yield from _results(f"{what} of {dataset}", partial(check, dataset=dataset), settings)


def of_values(settings: Settings) -> Iterator[CheckResult]:
    """Run the checks that apply to the given settings, which may lack a model, data or a reward."""
    score = settings.score
    named = {
        "model": settings.model.path or settings.model.card,
        "reward": score.rm_type or score.rm or score.custom_rm_path,
        "data": settings.rollout.data,
    }
    yield from preflight(
        settings, ["hooks", *(name for name, value in named.items() if value), DATASETS, "tracker arguments"]
    )
    if named["model"] and find_spec("torch") and (settings.train.backend != "megatron" or find_spec("megatron")):
        # The settings may be for another machine, so devices are not checked.
        train = settings.train.model_copy(update={"device": "auto"})
        yield from preflight(settings.model_copy(update={"train": train}), ["training"])


def _results(name: str, check: Check, settings: Settings) -> Iterator[CheckResult]:
    """Yield the result of a check, or one result per line of its error."""
    try:
        detail = check(settings)
    except ModuleNotFoundError as error:
        missing = missing_library(error, wanted_by=name)
        if missing is None:
            raise
        yield CheckResult(name, False, str(missing), missing.exit_code)
        return
    except SlimectlError as error:
        for line in str(error).splitlines():
            yield CheckResult(name, False, line, error.exit_code)
        return
    yield CheckResult(name, True if detail else None, detail or "none")


def _folder(settings: Settings) -> str:
    folder = RunDir(Path(settings.run.dir) / (settings.run.name or "run"))
    folder.check_start()
    folder.check_free()
    return str(folder.path)


def _resume(settings: Settings, *, sources: Sequence[str]) -> str:
    """Compare the data with the data of the newest checkpoint."""
    folder = RunDir(Path(settings.run.dir) / (settings.run.name or "run"))
    number = check_data(folder, settings, builders.data_identities(settings.eval, sources))
    return f"{folder.path}, after round {number}"


def _model(settings: Settings) -> str:
    path, card = settings.model.path, settings.model.card
    if path is None and card is None:
        raise SettingsError("model.path: no model is given. Add --model DIR, or model.card to build a new one.")
    if path is not None and builders.is_gguf(path):
        return f"{builders.source_of(path)}, to be converted"
    name_model_tokens(settings)
    return f"{path or f'new, from the card {card}'}: {shape_of(settings)}"


def _data(settings: Settings) -> str:
    if settings.rollout.data_source_path is not None:
        return f"rollout.data_source_path = {settings.rollout.data_source_path}"
    if not settings.rollout.data:
        raise SettingsError("rollout.data: no prompts are given. Add --data FILE.")
    builders.check_pipes(settings)
    lines = [check_source(settings, source) for source in settings.rollout.data]
    builders.check_images(settings, settings.rollout.data, servers=settings.uses_servers)
    lines += [check_source(settings, source, demonstrations=True) for source in settings.sft_warmup.data]
    return "; ".join(lines)


def _first_samples(settings: Settings, *, paths: Sequence[str], trains: bool) -> str:
    """Read the first row of each file of samples, demonstrations or preferences, and describe its keys.

    If the command `trains`, the first rows are read as training reads them.
    """
    if any(map(is_pipe, paths)):
        return "stdin or a pipe, which is not read"
    lines = []
    for path in paths:
        _, row = next(ordered_rows([path]), ("", None))
        if row is None:
            raise RecordError(f"{path}: no rows. Check the messages of the stage that wrote the file.")
        lines.append(f"{path}: {', '.join(row) if isinstance(row, dict) else shown(row)}")
    if trains:
        check_training_samples(settings, paths)
    return "; ".join(lines)


def _reward(settings: Settings) -> str:
    """Build the grader, and grade empty answers to the first prompts of rollout.data."""
    return _reward_of(settings, settings.rollout.data)


def _reward_of(settings: Settings, sources: Sequence[str]) -> str:
    """Build the grader and try it. If the settings have none, the first prompts must name a verifier."""
    score = settings.score
    grader = builders.reward(settings)
    if score.custom_rm_path:
        return score.custom_rm_path
    is_named = bool(score.rm_type or score.rm)
    if not is_named and Need.REWARDS not in settings.algorithm.needs:
        return ""
    if settings.has_agent or settings.rollout.function_path:
        return _named(score) if is_named else "by the agent or the rollout function, or none"
    prompt_types = set[str | None]()
    for source in sources:
        prompts = [] if is_pipe(source) else first_prompts(settings, source)
        prompt_types |= {prompt.metadata.get("rm_type") for prompt in prompts}
        if not is_named and not all(prompt.metadata.get("rm_type") for prompt in prompts):
            raise SettingsError(
                f"score.rm_type: no reward is set, neither in the settings nor in the rows of {source}. Set "
                f"--rm-type, score.rm or score.custom_rm_path."
            )
        check_grading(grader, prompts)
    if is_named and prompt_types.isdisjoint({None, score.rm_type}) and prompt_types:
        listed = ", ".join(sorted(map(str, prompt_types)))
        return f"{_named(score)}, but metadata.rm_type of the prompts overrides it: {listed}"
    return _named(score) if is_named else "by metadata.rm_type of the prompts"


def _named(score: ScoreSettings) -> str:
    parts = ((part.get("weight", 1), part.get("type") or part["path"]) for part in score.rm)
    return score.rm_type or " + ".join(f"{weight:g} x {name}" for weight, name in parts)


def _hooks(settings: Settings) -> str:
    check_hooks(settings)
    for name in settings.eval.data:
        check_hooks(resolve_dataset_settings(settings, name), "rollout.", "score.")
    builders.agent(settings)
    rollout = settings.rollout
    program = [f"rollout.{key} = {name}" for key in ("agent", "env") if (name := getattr(rollout, key))]
    return ", ".join([*program, *(setting for setting in HOOKS if hooks(settings, setting))])


def _trainer(settings: Settings) -> str:
    builders.check_policy(settings)
    trainer = builders.check_training(settings) if is_readable(settings) else settings.train.backend
    ranks = settings.cluster.ranks
    where = f"{ranks} rank{'s' if ranks > 1 else ''} on {builders.device(settings.train.device)}"
    return f"{trainer}; {settings.algorithm.name}, {where}"


def _algorithm(settings: Settings) -> str:
    from slimectl.runtime.initial_model import check_algorithm  # imports torch, which scoring does not need

    check_algorithm(settings)
    return settings.algorithm.name


def _training(settings: Settings) -> str:
    return builders.check_training(settings) if is_readable(settings) else settings.train.backend


def _engine(settings: Settings) -> str:
    builders.check_engine(settings)
    config = configuration(settings) if is_readable(settings) else None
    if config is not None:
        builders.check_stop_tokens(settings, config)
    builders.keys(settings)
    urls = len(settings.engine.url)
    if urls:
        line = f"{settings.engine.backend}, {urls} running server{'s' if urls > 1 else ''}, not contacted yet"
    else:
        name = settings.engine.backend if config is None else builders.engine_path(settings, config)
        line = f"{name}, {settings.num_engines} to start"
    if settings.train.lora_rank is None or not settings.uses_servers:
        return line
    obstacle = builders.adapter_obstacle(settings)
    pushed = "only the adapter" if obstacle is None else f"merged weights ({obstacle})"
    return f"{line}, updates send {pushed}"


def _executor(settings: Settings) -> str:
    builders.executor_backend(settings).check(settings)
    return settings.cluster.executor


def _trackers(settings: Settings) -> str:
    builders.check_trackers(settings)
    return ", ".join(settings.track.with_)


def _tracker_arguments(settings: Settings) -> str:
    builders.check_tracker_arguments(settings)
    return ", ".join(settings.track.kwargs)


def _dataset_rows(settings: Settings, *, dataset: str) -> str:
    from slimectl.runtime.initial_model import check_best  # imports torch, which scoring does not need

    check_best(settings)
    return check_source(resolve_dataset_settings(settings, dataset), settings.eval.sources[dataset], evaluation=True)


def _dataset_reward(settings: Settings, *, dataset: str) -> str:
    return _reward_of(resolve_dataset_settings(settings, dataset), [settings.eval.sources[dataset]])


CHECKS: Mapping[str, Check] = {
    "model": _model,
    "data": _data,
    "reward": _reward,
    "hooks": _hooks,
    "algorithm": _algorithm,
    "trainer": _trainer,
    "training": _training,
    "engine": _engine,
    "executor": _executor,
    "trackers": _trackers,
    "tracker arguments": _tracker_arguments,
    "memory": memory,
    "training memory": partial(memory, with_engine=False),
    "disk": disk,
}
"""All checks by name."""

DATASETS = "datasets"
OF_RUN = (
    "model", "data", "reward", DATASETS, "hooks", "algorithm", "trainer", "engine", "executor", "trackers", "memory",
    "disk",
)  # fmt: skip
"""Checks of `slimectl run`."""

DATASET_CHECKS: Mapping[str, Callable[..., str]] = {"data": _dataset_rows, "reward": _dataset_reward}
"""Checks of a dataset of [eval]."""

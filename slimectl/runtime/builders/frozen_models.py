"""Builds the frozen models: a reference, which may be updated from the policy during a run, and teachers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.data.chat import render
from slimectl.data.ownership import CHECKPOINT_FILES, MANIFEST, remove_made
from slimectl.data.run_dir import write_folder
from slimectl.errors import SettingsError
from slimectl.hooks import TRAINING_HOOKS, check_hooks
from slimectl.plugins.registry import ENGINES
from slimectl.runtime.builders.backends import backend
from slimectl.runtime.builders.engines import EngineBackend
from slimectl.runtime.builders.models import model_folder, tokenizer
from slimectl.runtime.builders.policies import critic, frozen, policy, total_steps
from slimectl.settings import Settings
from slimectl.settings.needs import Need
from slimectl.settings.secret import reveal
from slimectl.settings.teachers import Teacher
from slimectl.stages.teachers import AlignedTeacher
from slimectl.system.model_files import TRAINER_STATE
from slimectl.types import Prompt

if TYPE_CHECKING:
    from slimectl.protocols import Executor, LogProbModel, Policy


def reference(settings: Settings, start: Path, *, executor: Executor | None = None) -> Policy | None:
    """Build the frozen reference from algorithm.ref_load or the model at `start`, or None if no KL is measured."""
    if Need.REFERENCE not in settings.algorithm.needs:
        return None
    path = settings.algorithm.reference_load
    folder = model_folder(path, setting="algorithm.ref_load") if path else start
    return frozen(settings, folder, executor=executor)


def teachers(
    settings: Settings, start: Path, *, executor: Executor | None = None
) -> dict[str, LogProbModel | AlignedTeacher]:
    """Build the frozen teachers of on-policy distillation, by their names in scoring passes.

    They share the vocabulary of the model at `start`, unless tokens are aligned by text. A teacher that the policy's
    ranks hold is only checked. Raises SettingsError for distillation without a teacher or with a teacher of another
    vocabulary. Raises BackendError if a teacher server does not answer.
    """
    options = settings.algorithm.teacher_options
    if options is None or options.self_teacher == "current":
        return {}
    if options.self_teacher == "start":
        return {teacher.name: frozen(settings, start, "teacher", executor=executor) for teacher in options.teachers}
    models: dict[str, LogProbModel | AlignedTeacher] = {}
    with ExitStack() as opened:
        for teacher in options.teachers:
            model = _served(settings, teacher, start) if teacher.urls else _loaded(settings, teacher, start, executor)
            if model is not None:
                models[teacher.name] = model
                opened.callback(model.close)
        opened.pop_all()
    return models


def _served(settings: Settings, teacher: Teacher, start: Path) -> LogProbModel:
    """Return the client of a teacher's servers."""
    from slimectl.engines.http.log_prob_client import RemoteLogProbModel

    api = backend(ENGINES, teacher.api, EngineBackend).api()
    urls, limit = reveal(list(teacher.urls), setting=teacher.url_setting), settings.engine.request_timeout_s
    remote_model = RemoteLogProbModel(urls, api=api, setting=teacher.url_setting, timeout_s=limit)
    remote_model.check_vocabulary(tokenizer(start), of=start)
    return remote_model


def _loaded(
    settings: Settings, teacher: Teacher, start: Path, executor: Executor | None
) -> LogProbModel | AlignedTeacher | None:
    """Load a teacher from its directory, or only check it if the policy's ranks hold it."""
    folder = model_folder(teacher.load, setting=teacher.load_setting)
    policy_tokenizer, teacher_tokenizer = tokenizer(start), tokenizer(folder)
    has_other_vocabulary = teacher_tokenizer.get_vocab() != policy_tokenizer.get_vocab()
    options = settings.algorithm.teacher_options
    if has_other_vocabulary and not (options and options.by_text):
        raise SettingsError(
            f"{teacher.load_setting}: {folder} has another vocabulary than {start}. Use a teacher with the same "
            f"vocabulary, or align the tokens by their text with algorithm.opd_align = text."
        )
    if options and options.in_trainer:
        return None  # the policy's ranks hold it
    model = frozen(settings, folder, "teacher", executor=executor)
    if not has_other_vocabulary:
        return model
    return AlignedTeacher(model, teacher_tokenizer, policy_tokenizer, settings.rollout)


class PeriodicReference:
    """Replaces `reference` with the policy every `interval` rounds (algorithm.ref_update_interval).

    A snapshot stays in the run's folder as long as a checkpoint needs it.
    """

    def __init__(self, interval: int | None, reference: Policy | None, run: Path) -> None:
        self._interval = interval if reference is not None else None
        self._reference, self._folder = reference, run / "reference"

    def resume(self, rollout_id: int) -> None:
        """Load the snapshot in use after round `rollout_id`. Raises CheckpointError if it is gone."""
        if self._interval and (snapshot := rollout_id // self._interval * self._interval):
            self._load(snapshot)

    def follow(self, rollout_id: int, policy: Policy, needed: list[int]) -> None:
        """Copy the policy's weights if round `rollout_id` ends an interval. `needed` are the checkpoints' rounds."""
        if not self._interval or rollout_id % self._interval:
            return
        self._folder.mkdir(exist_ok=True)
        write_folder(self._snapshot_folder(rollout_id), policy.save, names=CHECKPOINT_FILES)
        self._load(rollout_id)
        oldest = min([*needed, rollout_id])
        for child in self._folder.iterdir():
            if child.name.isdecimal() and int(child.name) + self._interval <= oldest:
                remove_made(child, CHECKPOINT_FILES)

    def _load(self, snapshot: int) -> None:
        assert self._reference is not None
        self._reference.load(self._snapshot_folder(snapshot))

    def _snapshot_folder(self, snapshot: int) -> Path:
        return self._folder / f"{snapshot:06d}"


NOT_OF_THE_MODEL = "".join(f"/{name}\n" for name in (f"{TRAINER_STATE}/", "critic/", MANIFEST))
"""Content of .gitignore for a saved model: files that do not belong to the model itself."""


@dataclass
class TrainableModels:
    """Policy and critic, initialized from the model in `folder`, and the models whose log-probabilities they need.

    A reward model is policy and critic in one. `frozen` has the models that score responses, by their names in
    scoring passes. A run that samples may update its `reference`.
    """

    folder: Path
    policy: Any
    critic: Any
    frozen: dict[str, LogProbModel | AlignedTeacher] = field(default_factory=dict)
    reference: Policy | None = None
    total_steps: int | None = None
    """Expected number of training steps, at which a schedule ends."""
    render: Callable[[Prompt], list[int]] | None = None
    """Returns the tokens of a prompt that a teacher reads in place of the policy's."""

    @property
    def separate_critic(self) -> Any:
        """The critic, unless it is the same model as the policy."""
        return None if self.critic is self.policy else self.critic

    def save(self, path: Path) -> None:
        """Save the policy into `path`, and a separate critic into `path`/critic.

        `hf upload` skips the files in .gitignore.
        """
        self.policy.save(path)
        (path / ".gitignore").write_text(NOT_OF_THE_MODEL)
        if self.separate_critic is not None:
            (path / "critic").mkdir()
            self.critic.save(path / "critic")

    def close(self) -> None:
        for part in (self.policy, *self.frozen.values(), self.separate_critic):
            if part is not None:
                part.close()


def sampling_models(settings: Settings, folder: Path, *, executor: Executor) -> TrainableModels:
    """Build the models of a run that samples its own rounds, initialized from the model in `folder`."""
    with ExitStack() as opened:
        steps = total_steps(settings)
        models = TrainableModels(
            folder,
            policy(settings, folder, total_steps=steps, executor=executor),
            None,
            total_steps=steps,
            render=_render(settings, folder),
        )
        opened.callback(models.close)
        if (ref_model := reference(settings, folder, executor=executor)) is not None:
            models.reference = models.frozen["reference"] = ref_model
        models.frozen |= teachers(settings, folder, executor=executor)
        models.critic = critic(settings, folder, executor=executor)
        opened.pop_all()
    return models


def trainable_models(
    settings: Settings, folder: Path, *, executor: Executor, rollouts: int | None = None
) -> TrainableModels:
    """Build the models that train on samples, initialized from the model in `folder`.

    `rollouts` is the number of rollouts in the samples' file, if a schedule ends there.
    """
    check_hooks(settings, *TRAINING_HOOKS)
    steps, algorithm = total_steps(settings, rollouts=rollouts), settings.algorithm
    values = critic(settings, folder, total_steps=steps, executor=executor)
    if algorithm.trained_output == "values":
        return TrainableModels(folder, values, values, total_steps=steps)
    trained = policy(settings, folder, total_steps=steps, executor=executor)
    models = TrainableModels(folder, trained, values, total_steps=steps, render=_render(settings, folder))
    # The score stage computes the KL divergence, unless a reference is part of the algorithm itself.
    if Need.PAIRS in algorithm.needs and (ref_model := reference(settings, folder, executor=executor)):
        models.frozen["reference"] = ref_model
    options = algorithm.teacher_options
    if options and (options.self_teacher or any(teacher.load or teacher.urls for teacher in options.teachers)):
        models.frozen |= teachers(settings, folder, executor=executor)
    return models


def _render(settings: Settings, folder: Path) -> Callable[[Prompt], list[int]] | None:
    """Return the function that tokenizes prompts like the rollout stage, if a teacher reads prompts of its own."""
    options, rollout = settings.algorithm.teacher_options, settings.rollout
    if options is None or options.template is None:
        return None
    return partial(
        render,
        tokenizer=tokenizer(folder),
        apply_chat_template=rollout.apply_chat_template,
        template_kwargs=rollout.template_kwargs,
    )

"""Models in memory between stages: a sampler, a trainer, one that chats. And models on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from slimectl import builders
from slimectl.data.atomic_replace import refuse_existing
from slimectl.data.chat import encode_raw, render
from slimectl.data.manifest import check_integrity
from slimectl.data.ownership import read_manifest
from slimectl.data.run_dir import write_folder
from slimectl.data.streams import of_type
from slimectl.errors import RecordError, SettingsError
from slimectl.hooks import check_hooks
from slimectl.hooks.user_hooks import UserHooks
from slimectl.protocols import NO_PROGRESS, Critic, Engine, Policy, Progress, WeightReceiver
from slimectl.runtime.recorder import load_state, warn_of_changed_schedule
from slimectl.settings import Settings
from slimectl.stages.generation import sampling_params
from slimectl.stages.rollout import demonstrations
from slimectl.stages.score import attach_log_probs
from slimectl.stages.train import TrainState
from slimectl.stages.train import train as train_stage
from slimectl.types import Chat, Completion, Prompt, Sample, SamplingParams, StepReport

OnSkipped = Callable[[Prompt], Any]
"""Called with every prompt that is too long."""
CREATED = "create_model"
"""Stage in the manifest of a model with random weights, which no training has changed."""


class _Closing:
    """A part that is closed at the end of its `with` block, or by `close`."""

    def __init__(self) -> None:
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what was started. Safe to call twice."""
        self._closing.close()


class Sampler(_Closing):
    """The engine of [engine] with a model's weights. It stays up between calls of `rollout`.

    `folder` is the model's directory, model.path where not given.
    """

    def __init__(self, settings: Settings, folder: Path | None = None) -> None:
        super().__init__()
        check_hooks(settings, "rollout.")
        builders.agent(settings)  # refuses a missing program before a model is loaded
        self.settings = settings
        self.folder = folder or builders.model_folder(settings.model.path, verify=settings.model.verify)
        self.tokenizer: Any = builders.tokenizer(self.folder)
        self.engine: Engine = self._closing.enter_context(builders.start_engines(settings, self.folder, self.tokenizer))

    def rollout(
        self, prompts: Iterable[Prompt], *, source: Any = None, on_skipped: OnSkipped = lambda prompt: None
    ) -> Iterator[Sample]:
        """Sample rollout.n_samples_per_prompt answers to every prompt, lazily.

        A `source` of the user's own (rollout.data_source_path) replaces the prompts. Prompts that leave no room for an
        answer go to `on_skipped`.
        """
        prompts = of_type(prompts, Prompt, "make it with slimectl.Prompt(…), or read a file with slimectl.prompts")
        return builders.rollout_samples(
            self.settings, prompts, self.engine, self.tokenizer, source=source, on_skipped=on_skipped
        )


class Trainer(_Closing):
    """The policy of [train] and its optimizer, with the algorithm's other models. It stays between calls of `train`.

    It starts from `folder`, model.path where not given. With `load`, a checkpoint of a run or of `save`, it goes on
    with the optimizer and the step of that checkpoint. `rollouts` is the number that it will train on, which a learning
    rate that falls until the last step needs if run.num_rollout and train.lr_decay_iters are not set.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path | None = None,
        *,
        load: Path | None = None,
        rollouts: int | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        path = settings.model.path if load is None else str(load)
        self.folder = folder or builders.model_folder(path, verify=settings.model.verify)
        with ExitStack() as opened:  # closed again if a model cannot be built
            executor = opened.enter_context(closing(builders.executor(settings)))
            self._models = opened.enter_context(
                closing(builders.trainable_models(settings, self.folder, executor=executor, rollouts=rollouts))
            )
            self.policy: Policy = self._models.policy
            self.critic: Critic | None = self._models.critic
            self.state = TrainState() if load is None else self._resume()
            self._closing = opened.pop_all()

    def _resume(self) -> TrainState:
        load = self.folder.parent if self.folder.name == "policy" else self.folder
        check_integrity(load, full=True)  # the optimizer too, as a resumed run does
        self.policy.load(self.folder)
        warn_of_changed_schedule(self.folder, self.settings, self._models.total_steps)
        if self.critic is not None and self.critic is not self._models.policy:
            self.critic.load(load / "critic")
        return load_state(load, self.policy)

    def train(
        self,
        samples: Iterable[Sample] | Iterable[Prompt],
        *,
        on_skipped: OnSkipped = lambda prompt: None,
        progress: Progress = NO_PROGRESS,
    ) -> Iterator[StepReport]:
        """Train on scored samples, lazily. Yield a report for every optimizer step, and for a round that fills none.

        The algorithm sft also takes prompts with labels. Those that are too long go to `on_skipped`. `progress` is
        told the phase under way.
        """
        stream = self._samples(samples, on_skipped)
        for field, model in self._models.asked.items():
            stream = attach_log_probs(stream, model, field, temperature=self.settings.policy_temperature)
        hooks = UserHooks(self.settings)
        return train_stage(
            stream, self.policy, self.settings, critic=self.critic, state=self.state, hooks=hooks, progress=progress
        )

    def _samples(self, items: Iterable[Any], on_skipped: OnSkipped) -> Iterator[Sample]:
        """Yield samples, and for prompts their demonstrations."""
        items = iter(items)
        first = next(items, None)
        if first is None:
            return
        items = chain([first], items)
        if not isinstance(first, Prompt):
            yield from of_type(items, Sample, "train on samples, of slimectl.rollout or of a file")
        elif self.settings.algorithm.trains_on == "demonstrations":
            tokenizer, context = builders.tokenizer(self.folder), builders.context_length(self.settings, self.folder)
            yield from demonstrations(items, tokenizer, self.settings.rollout, context=context, on_skipped=on_skipped)
        else:
            name = self.settings.algorithm.name
            raise SettingsError(
                f"algorithm.name: {name} trains on scored samples, and these are prompts. Sample them first."
            )

    def push(self, sampler: Sampler) -> None:
        """Give the policy's weights to the engine of a sampler, if that lives in this process.

        Raises SettingsError for servers: `run` pushes to those.
        """
        if self.settings.uses_servers:
            raise SettingsError("engine.backend: servers get weights from `run`; push takes one engine in this process")
        engine: WeightReceiver = sampler.engine  # type: ignore[assignment]
        engine.load_weights(self.policy.weights(), version=self.policy.weight_version)

    def save(self, path: Path | str, *, force: bool = False, manifest_fields: dict[str, Any] | None = None) -> None:
        """Write weights, optimizer and a separate critic to a directory, which is also a model.

        `force` replaces a checkpoint that slimectl wrote. Anything else there is refused with SettingsError.
        """
        refuse_existing(Path(path), force=force)
        write_folder(Path(path), self._models.save, manifest_fields=manifest_fields)


def create_model(card: str, folder: Path | str, *, seed: int = 1234) -> Path:
    """Make a model of random weights from a model card (`slimectl models` lists them) in a directory. Return its path.

    An earlier result of this function there is replaced. Anything else, a trained model too, is refused with
    SettingsError.
    """
    path = Path(folder)
    if (read_manifest(path) or {"stage": CREATED}).get("stage") != CREATED:
        raise SettingsError(f"{path}: holds a model that was trained or converted. Name another folder, or remove it.")
    fields = {"stage": CREATED, "card": card, "seed": seed}
    write_folder(path, lambda staged: builders.create_model(card, staged, seed=seed), manifest_fields=fields)
    return path


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Literal["hf", "torch_dist"] = "hf",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    quantize: Literal["fp8", "fp8_tensor", "fp8_channel", "int4"] | None = None,
    force: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Convert a model between layouts. Return a summary of what was written and whether it was verified.

    `source` is a directory, a step of a run, a .gguf file or package:NAME. `options` are block, group, config, card,
    verify and logits, as the command has them.
    """
    return builders.convert(str(source), Path(target), to=to, dtype=dtype, quantize=quantize, force=force, **options)


class ChatModel(Sampler):
    """The engine of [engine] with a model's weights, for questions of a person."""

    def __init__(self, settings: Settings, folder: Path | None = None) -> None:
        super().__init__(settings, folder)
        self.has_template = bool(getattr(self.tokenizer, "chat_template", None))

    def params(self, *, max_tokens: int, temperature: float | None = None, seed: int | None = None) -> SamplingParams:
        """Return the sampling parameters of [rollout], with these in their place. Temperature 0 is greedy."""
        params = dataclasses.replace(sampling_params(self.settings.rollout), max_tokens=max_tokens, seed=seed)
        return params if temperature is None else dataclasses.replace(params, temperature=temperature)

    def tokens(self, prompt: str | Chat) -> list[int]:
        """Render a chat with the model's template, or tokenize a text that the model continues."""
        if isinstance(prompt, str):
            return encode_raw(self.tokenizer, prompt)
        kwargs = self.settings.rollout.template_kwargs
        return render(Prompt(text=prompt), self.tokenizer, template_kwargs=kwargs)

    def answer(
        self, prompt: str | Chat, params: SamplingParams, *, show: Callable[[str], Any], stoppable: bool = False
    ) -> Completion:
        """Answer, and `show` each piece of text as it comes. With `stoppable` Ctrl-C ends the answer.

        Raises RecordError for a prompt that is empty or that the template refuses, SettingsError for one that leaves no
        room in the context.
        """
        tokens = self.tokens(prompt)
        if not tokens:
            raise RecordError("the question is empty. Write a text, or give it on stdin.")
        return builders.stream_answer(self.engine, self.tokenizer, tokens, params, show=show, stoppable=stoppable)


def messages(question: str, *, system: str | None, chat_model: ChatModel) -> str | Chat:
    """Return a question as a chat. As a plain text for a model without a chat template. Raises SettingsError."""
    if not chat_model.has_template:
        if system is not None:
            raise SettingsError(f"--system: {chat_model.folder} has no chat template. Put it into the text itself.")
        return question
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": question}]

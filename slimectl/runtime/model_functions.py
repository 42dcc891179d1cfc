"""Models in memory between stages (sampler, trainer, chat model), and models on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from slimectl.data.atomic_replace import refuse_existing
from slimectl.data.chat import encode_raw, render
from slimectl.data.convert_options import ConvertOptions
from slimectl.data.manifest import check_integrity
from slimectl.data.model_card import TrainingProgress, write_cards
from slimectl.data.ownership import read_manifest
from slimectl.data.run_dir import write_folder
from slimectl.data.streams import of_type
from slimectl.errors import RecordError, SettingsError
from slimectl.hooks import check_hooks
from slimectl.hooks.user_hooks import UserHooks
from slimectl.protocols import NO_PROGRESS, Critic, Engine, Policy, Progress, WeightReceiver
from slimectl.runtime import builders
from slimectl.runtime.capacity import estimated_pack, with_pack_tokens
from slimectl.runtime.memory_fit import fit_packs
from slimectl.runtime.recorder import load_state
from slimectl.settings import Settings
from slimectl.stages.advantages import Models
from slimectl.stages.generation import GroupGenerator, sampling_params
from slimectl.stages.prompt_groups import PromptSource, UserDataSource, source_length
from slimectl.stages.rollout import demonstrations, rollout
from slimectl.stages.round_timer import RoundTimer
from slimectl.stages.train import TrainState
from slimectl.stages.train import train as train_stage
from slimectl.stages.whole_rounds import GroupSource
from slimectl.types import Chat, Completion, Prompt, Sample, SamplingParams, StepReport

OnSkipped = Callable[[Prompt], Any]
"""Called with every prompt that is too long."""
CREATED = "create_model"
"""Stage in the manifest of an untrained model with random weights."""


class _Closing:
    """An object that is closed at the end of its `with` block, or by `close`."""

    def __init__(self) -> None:
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close everything that was started. Safe to call twice."""
        self._closing.close()


class Sampler(_Closing):
    """The engine of [engine] with a model's weights. It stays up between calls of `rollout`.

    `folder` is the model's directory. Default: model.path.
    """

    def __init__(self, settings: Settings, folder: Path | None = None) -> None:
        super().__init__()
        check_hooks(settings, "rollout.")
        builders.agent(settings)  # reports a missing program before a model is loaded
        self.settings = settings
        self.folder = folder or builders.model_folder(settings.model.path, verify=settings.model.verify)
        self.tokenizer: Any = builders.tokenizer(self.folder)
        self.engine: Engine = self._closing.enter_context(builders.start_engines(settings, self.folder, self.tokenizer))

    @cached_property
    def generator(self) -> GroupGenerator:
        """Generates the responses of rollouts. Evaluations derive theirs from it."""
        return builders.generator(builders.hook_settings(self.settings, self.engine), self.engine, self.tokenizer)

    def rollout(
        self, prompts: Iterable[Prompt], *, source: Any = None, on_skipped: OnSkipped = lambda prompt: None
    ) -> Iterator[Sample]:
        """Sample rollout.n_samples_per_prompt responses to every prompt, lazily.

        The user's own `source` (rollout.data_source_path) replaces the prompts. Prompts that leave no room for a
        response go to `on_skipped`.
        """
        prompts = of_type(prompts, Prompt, "create it with slimectl.Prompt(…), or read a file with slimectl.prompts")
        generator, run = dataclasses.replace(self.generator, on_skipped=on_skipped), self.settings.run
        groups: GroupSource = PromptSource(prompts, generator)
        if source is not None:  # for all epochs, or for run.num_rollout rounds of a source without a length
            rounds = None if hasattr(source, "__len__") else run.num_rollout
            last = rounds * run.rollout_batch_size if rounds else (run.num_epoch or 1) * source_length(source)
            groups = UserDataSource(source, generator, max_groups=last)
        return rollout(groups, max_rounds=run.num_rollout)


class Trainer(_Closing):
    """The policy of [train] with its optimizer and the algorithm's other models, kept between calls of `train`.

    It starts from `folder`, by default model.path. With `load`, a checkpoint of a run or of `save`, it continues with
    the optimizer and the step of that checkpoint. `rollouts` is the number of rollouts that it will train on. It is
    needed if the learning rate decays and neither run.num_rollout nor train.lr_decay_iters is set.
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
        is_open = settings.train.max_tokens_per_gpu == "auto"
        self.settings = settings = with_pack_tokens(settings, estimated_pack(settings)) if is_open else settings
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
            if is_open:
                fit_packs(self._models, self.settings)
            self._closing = opened.pop_all()

    def _resume(self) -> TrainState:
        load = self.folder.parent if self.folder.name == "policy" else self.folder
        check_integrity(load, full=True)  # including the optimizer, like a resumed run
        self.policy.load(self.folder)
        builders.warn_of_changed_schedule(self.settings.train, self.folder, self._models.total_steps)
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
        """Train on scored samples, lazily. Yield a report for every optimizer step, and for a round without one.

        Algorithm sft also accepts prompts with labels. Prompts that are too long go to `on_skipped`. `progress`
        receives the current phase.
        """
        timer = RoundTimer(progress=progress)
        models = Models(self.policy, self.critic, self._models.frozen, timer, render=self._models.render)
        stream, hooks = self._samples(samples, on_skipped), UserHooks(self.settings)
        return train_stage(stream, models, self.settings, state=self.state, hooks=hooks)

    def _samples(self, items: Iterable[Any], on_skipped: OnSkipped) -> Iterator[Sample]:
        """Yield samples, and the demonstrations of prompts."""
        items = iter(items)
        first = next(items, None)
        if first is None:
            return
        items = chain([first], items)
        if not isinstance(first, Prompt):
            yield from of_type(items, Sample, "train on samples from slimectl.rollout or from a file")
        elif self.settings.algorithm.trains_on == "demonstrations":
            tokenizer, context = (
                builders.tokenizer(self.folder),
                builders.context_length(self.settings.rollout, self.folder),
            )
            yield from demonstrations(items, tokenizer, self.settings.rollout, context=context, on_skipped=on_skipped)
        else:
            name = self.settings.algorithm.name
            raise SettingsError(
                f"algorithm.name: {name} trains on scored samples, but these are prompts. Sample them first."
            )

    def push(self, sampler: Sampler) -> None:
        """Push the policy's weights to the engine of a sampler in this process.

        Raises SettingsError for servers, to which only `run` pushes.
        """
        if self.settings.uses_servers:
            raise SettingsError("engine.backend: push needs an engine in this process. Use `run` with servers.")
        engine: WeightReceiver = sampler.engine  # type: ignore[assignment]
        engine.load_weights(self.policy.weights(), version=self.policy.weight_version)

    def save(self, path: Path | str, *, force: bool = False, manifest_fields: dict[str, Any] | None = None) -> None:
        """Write weights, optimizer and a separate critic to a directory that is also a model directory.

        `force` replaces a checkpoint that slimectl wrote. Raises SettingsError if anything else is there.
        """
        refuse_existing(Path(path), force=force)

        def fill(staged: Path) -> None:
            self._models.save(staged)
            write_cards(staged, self.settings, TrainingProgress(self.state.rollout_id, self.state.step))

        write_folder(Path(path), fill, manifest_fields=manifest_fields)


def create_model(card: str, folder: Path | str, *, seed: int = 1234) -> Path:
    """Create a model with random weights from a model card (see `slimectl models`) in a directory. Return its path.

    An earlier result of this function is replaced. Raises SettingsError if anything else, such as a trained model, is
    there.
    """
    path = Path(folder)
    if (read_manifest(path) or {"stage": CREATED}).get("stage") != CREATED:
        raise SettingsError(f"{path}: contains a trained or converted model. Use another folder, or remove it.")
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

    `source` is a directory, a step of a run, a .gguf file or package:NAME. `options` are the options of the command:
    block, group, config, card, verify and logits.
    """
    chosen = ConvertOptions(to, dtype, quantize, **options)
    return builders.convert_checkpoint(str(source), Path(target), chosen, force=force)


class ChatModel(Sampler):
    """The engine of [engine] with a model's weights, for interactive questions."""

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def params(self, *, max_tokens: int, temperature: float | None = None, seed: int | None = None) -> SamplingParams:
        """Return the sampling parameters of [rollout] with these changes. Temperature 0 is greedy."""
        params = dataclasses.replace(sampling_params(self.settings.rollout), max_tokens=max_tokens, seed=seed)
        return params if temperature is None else dataclasses.replace(params, temperature=temperature)

    def tokens(self, prompt: str | Chat) -> list[int]:
        """Render a chat with the model's template, or tokenize a plain text for the model to continue."""
        if isinstance(prompt, str):
            return encode_raw(self.tokenizer, prompt)
        kwargs = self.settings.rollout.template_kwargs
        return render(Prompt(text=prompt), self.tokenizer, template_kwargs=kwargs)

    def answer(
        self, prompt: str | Chat, params: SamplingParams, *, show: Callable[[str], Any], stoppable: bool = False
    ) -> Completion:
        """Respond, and call `show` with each new piece of text. With `stoppable`, Ctrl-C ends the response.

        Raises RecordError for a prompt that is empty or that the template rejects, and SettingsError for one that
        leaves no room in the context.
        """
        tokens = self.tokens(prompt)
        if not tokens:
            raise RecordError("the question is empty. Write it as an argument or on stdin.")
        return builders.stream_answer(self.engine, self.tokenizer, tokens, params, show=show, stoppable=stoppable)


def messages(question: str, *, system: str | None, chat_model: ChatModel) -> str | Chat:
    """Return a question as a chat, or as plain text if the model has no chat template. Raises SettingsError."""
    if not chat_model.has_template:
        if system is not None:
            raise SettingsError(
                f"--system: {chat_model.folder} has no chat template. Put the system message into the prompt."
            )
        return question
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": question}]

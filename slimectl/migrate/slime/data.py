"""Data sets and data sources with slime's interface, over the files that slimectl reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slimectl.algorithms.packing import first_fit
from slimectl.chats.template import Template
from slimectl.data.atomic_replace import write_text
from slimectl.data.chat import as_chat, render
from slimectl.data.columns import PromptOptions
from slimectl.data.prompts import open_prompts, ordered_rows, shuffled_order
from slimectl.errors import CheckpointError
from slimectl.migrate.slime.arguments import load_function
from slimectl.migrate.slime.tokens import load_tokenizer
from slimectl.types import Prompt, Sample

__all__ = ["Sample"]


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that slimectl can read. `path@[a:b]` is a slice of them."""
    return (row for _, row in ordered_rows([path]) if isinstance(row, dict))


def get_minimum_num_micro_batch_size(total_lengths: Sequence[int], max_tokens_per_gpu: int) -> int:
    """Return the number of packs that first-fit packing needs for sequences of these lengths."""
    return len(first_fit(total_lengths, max_tokens_per_gpu))


def filter_long_prompt(
    origin_samples: Sequence[Sample], tokenizer: Any, processor: Any, max_length: int | None
) -> list[Sample]:
    """Return the samples whose prompt has at most `max_length` tokens after the chat template is applied."""
    if max_length is None:
        return list(origin_samples)
    return [sample for sample in origin_samples if _prompt_length(sample, tokenizer) <= max_length]


def _prompt_length(sample: Sample, tokenizer: Any) -> int:
    return len(render(Prompt(sample.prompt, tools=sample.metadata.get("tools")), tokenizer))


class Dataset:
    """The prompts of a file as samples, each with its label and metadata. Prompts that are too long are skipped.

    With `apply_chat_template` the prompts are rendered chats. Otherwise they stay as they are in the file.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        tokenizer: Any,
        processor: Any = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "text",
        multimodal_keys: Any = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if isinstance(processor, int):  # older calls pass the length here
            processor, max_length = None, processor
        keys = {"label_key": label_key, "tool_key": tool_key, "image_key": (multimodal_keys or {}).get("image")}
        options: dict[str, Any] = {name: key for name, key in keys.items() if key is not None}
        sources = [path] if isinstance(path, str) else list(path)
        prompts = open_prompts(sources, PromptOptions(prompt_key, metadata_key=metadata_key, **options))
        samples = [_as_sample(prompt, has_label=label_key is not None) for prompt in prompts]
        self.origin_samples = filter_long_prompt(samples, tokenizer, processor, max_length)
        if apply_chat_template:
            for sample in self.origin_samples:
                sample.prompt = _rendered(sample, tokenizer, apply_chat_template_kwargs)
        self.samples, self.seed, self.epoch_id = self.origin_samples, seed, -1
        self._position = 0

    def shuffle(self, new_epoch_id: int) -> None:
        """Put the samples into the order of an epoch, which depends on the seed and the epoch."""
        if self.epoch_id != new_epoch_id:
            order = shuffled_order(len(self.origin_samples), self.seed, new_epoch_id)
            self.samples, self.epoch_id = [self.origin_samples[i] for i in order], new_epoch_id

    def sample(self, num_samples: int) -> list[Any]:
        """Return the next prompts. After the last one it starts again with the first."""
        places = range(self._position, self._position + num_samples)
        self._position += num_samples
        return [self.samples[place % len(self.samples)].prompt for place in places]

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


def _as_sample(prompt: Prompt, *, has_label: bool) -> Sample:
    metadata = dict(prompt.metadata) | ({"tools": prompt.tools} if prompt.tools else {})
    images = {"images": list(prompt.images)} if prompt.images else None
    label = prompt.label if has_label else None
    return Sample(prompt=prompt.text, label=label, metadata=metadata, extra=prompt.extra, multimodal_inputs=images)


def _rendered(sample: Sample, tokenizer: Any, template_kwargs: dict[str, Any] | None) -> str:
    template = Template(tokenizer, Prompt(sample.prompt, tools=sample.metadata.get("tools")), template_kwargs)
    return template.prompt_text(as_chat(sample.prompt))


class DataSource:
    """Base class of data sources. They have get_samples, add_samples, save, load and a length."""


class RolloutDataSource(DataSource):
    """Groups from the prompts of rollout.data, in the order of its seed. Called with `(args)` or `(dataset, args)`.

    The run renders the prompts as set in [rollout]. The position is kept in a file in the run's folder.
    """

    def __init__(self, args: Any, other_args: Any = None) -> None:
        self.args = args if other_args is None else other_args
        self.epoch_id = self.sample_group_index = self.sample_index = self.sample_offset = 0
        self.metadata: dict[str, Any] = {}
        self.dataset: Any = _dataset_of(args) if other_args is None else args
        self._shuffle()

    def _shuffle(self) -> None:
        """Put the data set into the order of the epoch, if it can be shuffled."""
        if self.args.rollout_shuffle and hasattr(self.dataset, "shuffle"):
            self.dataset.shuffle(self.epoch_id)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next groups, each with n_samples_per_prompt samples of one prompt."""
        return [self._group(sample) for sample in self._next_prompts(num_samples)]

    def _next_prompts(self, count: int) -> list[Sample]:
        if self.dataset is None:
            return [Sample() for _ in range(count)]
        if not hasattr(self.dataset, "samples"):  # the user's own data set
            drawn = self.dataset.sample(count)
            return [item if isinstance(item, Sample) else Sample(prompt=item) for item in drawn]
        prompts: list[Sample] = []
        while len(prompts) < count and len(self.dataset):
            samples = self.dataset.samples[self.sample_offset : self.sample_offset + count - len(prompts)]
            prompts += samples
            self.sample_offset += len(samples)
            if self.sample_offset == len(self.dataset):
                self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
                self._shuffle()
        return prompts

    def _group(self, prompt: Sample) -> list[Sample]:
        group = [copy.deepcopy(prompt) for _ in range(self.args.n_samples_per_prompt)]
        for sample in group:
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Raise RuntimeError, because samples cannot be added to a data set."""
        raise RuntimeError(
            f"{type(self).__name__} does not take samples back. Use RolloutDataSourceWithBuffer, or define add_samples."
        )

    def save(self, rollout_id: int) -> None:
        """Write the position to the run's folder."""
        path = self._state_file(rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(self.state_dict()) + "\n")

    def load(self, rollout_id: int | None = None) -> None:
        """Return to the position of a round. Raises CheckpointError if it was not saved."""
        if rollout_id is None:
            return
        path = self._state_file(rollout_id)
        if not path.exists():
            raise CheckpointError(f"{path}: the position of the data source is missing. Start the run again.")
        self.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
        self._shuffle()

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON."""
        return {name: getattr(self, name) for name in _POSITION}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to the position of `state_dict`."""
        for name in _POSITION:
            setattr(self, name, state[name])

    def _state_file(self, rollout_id: int) -> Path:
        return Path(self.args.save) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)


_POSITION = ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")


def _dataset_of(args: Any) -> Dataset | None:
    """Return the data set of args.prompt_data, or None if that is unset."""
    if not args.prompt_data:
        return None
    return Dataset(
        args.prompt_data,
        load_tokenizer(args.hf_checkpoint),
        max_length=args.rollout_max_prompt_len,
        prompt_key=args.input_key,
        label_key=args.label_key,
        tool_key=args.tool_key,
        metadata_key=args.metadata_key,
        multimodal_keys={"image": args.rollout.image_key},
        seed=args.rollout_seed,
    )


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """A data source that first returns groups that were added back. rollout.buffer_filter_path selects among them."""

    def __init__(self, args: Any, other_args: Any = None) -> None:
        super().__init__(args, other_args)
        self.buffer: list[list[Sample]] = []
        path = self.args.buffer_filter_path
        if not hasattr(type(self), "buffer_filter"):
            self.buffer_filter = pop_first if path is None else load_function(path)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return groups from the buffer, then new ones."""
        groups: list[list[Sample]] = (
            self.buffer_filter(self.args, None, self.buffer, num_samples) if self.buffer else []
        )
        return [*groups, *super().get_samples(num_samples - len(groups))]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Put groups into the buffer. Raises ValueError if a group does not have n_samples_per_prompt samples."""
        for group in samples:
            if not isinstance(group, list) or len(group) != self.args.n_samples_per_prompt:
                raise ValueError(
                    f"add_samples: give groups, which are lists of {self.args.n_samples_per_prompt} samples"
                )
        self.buffer += samples

    def state_dict(self) -> dict[str, Any]:
        buffer = [[sample.to_dict() for sample in group] for group in self.buffer]
        return {**super().state_dict(), "buffer": buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer = [[Sample.from_dict(sample) for sample in group] for group in state["buffer"]]

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Add entries to the metadata, which is saved with the position."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata."""
        return self.metadata

    def get_buffer_length(self) -> int:
        """Return the number of groups in the buffer."""
        return len(self.buffer)


def pop_first(args: Any, rollout_id: int | None, buffer: list[Any], num_samples: int) -> list[Any]:
    """Remove the oldest groups from the buffer and return them."""
    groups = buffer[:num_samples]
    del buffer[:num_samples]
    return groups

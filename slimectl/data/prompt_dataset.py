"""The prompts of rollout.data as a sequence, for user-defined data sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from slimectl.data.prompts import shuffled_order
from slimectl.types import Prompt, Sample, json_copy


class PromptText(str):
    """A prompt that is a string, with its row."""

    row: Prompt


class PromptChat(list[Any]):
    """A prompt that is a chat, with its row."""

    row: Prompt


class PromptDataset(Sequence[Any]):
    """The prompts as strings and chats. A sample of a prompt gets the label and the metadata of its row.

    >>> dataset = PromptDataset(lambda: [Prompt("1+1=", label="2"), Prompt("2+2=", label="4")], seed=0)
    >>> len(dataset), dataset[0], sorted(dataset.sample(2)), restored(Sample(prompt=dataset[1])).label
    (2, '1+1=', ['1+1=', '2+2='], '4')
    """

    def __init__(self, rows: Callable[[], Iterable[Prompt]], seed: int) -> None:
        self._rows, self._seed = rows, seed
        self.drawn = 0
        """Number of prompts that `sample` has drawn."""

    @cached_property
    def _items(self) -> list[PromptText | PromptChat]:
        return list(map(_item, self._rows()))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, position: Any) -> Any:
        return self._items[position]

    def sample(self, count: int) -> list[Any]:
        """Return the next prompts in an order that is shuffled for each epoch. None repeats within an epoch."""
        places = [divmod(number, len(self)) for number in range(self.drawn, self.drawn + count)]
        orders = {epoch: shuffled_order(len(self), self._seed, epoch) for epoch in {epoch for epoch, _ in places}}
        self.drawn += count
        return [self[orders[epoch][position]] for epoch, position in places]


def _item(row: Prompt) -> PromptText | PromptChat:
    item = PromptText(row.text) if isinstance(row.text, str) else PromptChat(json_copy(row.text))
    item.row = row
    return item


def restored(sample: Sample) -> Sample:
    """Fill in missing fields of a sample from its prompt's row, if the prompt comes from a PromptDataset."""
    row = getattr(sample.prompt, "row", None)
    if isinstance(row, Prompt):
        sample.prompt = json_copy(row.text)
        sample.label = row.label if sample.label is None else sample.label
        tools = {"tools": row.tools} if row.tools else {}
        sample.metadata = json_copy(tools | row.metadata) | sample.metadata
        sample.extra = json_copy(row.extra) | sample.extra
        if row.images and sample.multimodal_inputs is None:
            sample.multimodal_inputs = {"images": list(row.images)}
    return sample

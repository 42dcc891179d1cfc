"""Rewards from a trained reward model in this process.

B samples · T tokens of the longest · E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slimectl.chats.messages import content_text
from slimectl.chats.template import Template
from slimectl.chats.tokenizer import load_tokenizer
from slimectl.errors import SettingsError, first_line
from slimectl.rewards.base import Grade, Verifier
from slimectl.system.model_files import check_model_files
from slimectl.types import Prompt, Sample

if TYPE_CHECKING:
    from slimectl.system.client import HttpClient

WHERE = "score.rm_options"
LOADING_S = 120.0
"""Seconds for a worker process to load the model, which do not count for its first sample."""


@dataclass(frozen=True)
class RewardModel(Verifier):
    """Score of the reward model in the folder `path` for a prompt and its response: one unbounded number.

    The model was saved by `slimectl train --algorithm reward_model`, or is any Hugging Face sequence classifier with
    one output. `input` "tokens" passes the sample's tokens unchanged, which requires the policy's vocabulary. With
    "text" (or for a sample without tokens) the model's own tokenizer and chat template encode prompt and response.
    Sequences longer than the context are truncated at the start. `device` is a torch device.
    """

    bounds = (-math.inf, math.inf)
    patience_s = LOADING_S

    path: str
    batch_size: int = 16
    input: Literal["tokens", "text"] = "tokens"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not (Path(self.path) / "config.json").exists():
            raise SettingsError(
                f"{WHERE}.path: {self.path} is not a model directory. Make one with "
                f"`slimectl train --algorithm reward_model --save DIR`"
            )
        if self.batch_size < 1:
            raise SettingsError(f"{WHERE}.batch_size: {self.batch_size} is below 1")

    @property
    def together(self) -> int:
        return self.batch_size

    def prepare(self) -> None:
        """Load the model before the time limit of a sample starts."""
        _load_model(self.path, self.device)

    def explain(self, sample: Sample) -> Grade:
        return self._verdicts([sample])[0]

    async def grade_async(self, samples: Sequence[Sample], http: HttpClient) -> list[Grade]:
        return self._verdicts(samples)

    def extract(self, sample: Sample) -> str | None:
        return sample.response

    def _verdicts(self, samples: Sequence[Sample]) -> list[Grade]:
        model = _load_model(self.path, self.device)
        rewards = model.rewards([self._tokens(sample, model) for sample in samples])
        return [
            Grade(reward, "prompt and response", f"{self.path} gives {reward:.4g}", sample.response,
                    (0, len(sample.response)))
            for reward, sample in zip(rewards, samples, strict=True)
        ]  # fmt: skip

    def _tokens(self, sample: Sample, model: _Model) -> list[int]:
        if self.input == "text" or not sample.tokens:
            return model.encode_sample(sample)
        if max(sample.tokens) >= model.vocabulary:
            raise SettingsError(
                f"{WHERE}.input: token {max(sample.tokens)} of sample {sample.index} is outside the vocabulary of "
                f'{self.path} ({model.vocabulary} tokens). Set input = "text".'
            )
        return sample.tokens


class _Model:
    """A sequence classifier of one output, with its tokenizer."""

    def __init__(self, path: str, device: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        # Never run code that ships with a model, and do not ask for permission.
        local = {"local_files_only": True, "trust_remote_code": False}
        try:
            check_model_files(Path(path))
            self.tokenizer: Any = load_tokenizer(Path(path))
            model, loading_info = AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=1, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **local
            )
            self.model: Any = model.eval().to(device)
        except Exception as error:
            message = first_line(error)
            raise SettingsError(f"{WHERE}.path: {path} cannot be loaded as a reward model: {message}") from error
        if loading_info["missing_keys"]:
            raise SettingsError(
                f"{WHERE}.path: {path} has no {min(loading_info['missing_keys'])}, so it is not a reward model. "
                f"Make one with `slimectl train --algorithm reward_model --save DIR`"
            )
        self.device = device
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.context = int(getattr(model.config, "max_position_embeddings", 0) or 0)

    def encode_sample(self, sample: Sample) -> list[int]:
        """Encode prompt and response with the model's own tokenizer and chat template."""
        response = sample.response.encode(errors="replace").decode()  # half a surrogate pair is not valid text
        if not self.tokenizer.chat_template:
            prompt = sample.prompt
            if not isinstance(prompt, str):
                prompt = "\n\n".join(content_text(turn.get("content")) for turn in prompt)
            return list(self.tokenizer(prompt, response)["input_ids"])
        messages = [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else sample.prompt
        chat = [*messages, {"role": "assistant", "content": response}]
        template = Template(self.tokenizer, Prompt(chat), None)
        return list(self.tokenizer.encode(template.text(template.fit(chat)), add_special_tokens=False))

    def rewards(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """One score per sequence, from the hidden state of its last token."""
        import torch

        truncated = [list(tokens[-self.context :]) if self.context else list(tokens) for tokens in sequences]
        ends_B = torch.tensor([max(1, len(tokens)) for tokens in truncated], device=self.device)
        filler = self.tokenizer.pad_token_id or 0
        longest = int(ends_B.max())
        tokens_BT = torch.tensor(
            [tokens + [filler] * (longest - len(tokens)) for tokens in truncated], device=self.device
        )
        mask_BT = (torch.arange(longest, device=self.device) < ends_B[:, None]).long()
        with torch.inference_mode():
            if not hasattr(self.model, "score"):  # an encoder with its own pooling
                values_B1 = self.model(input_ids=tokens_BT, attention_mask=mask_BT).logits
            else:
                # The classifier's own pooling would treat an end token that is also the pad token as padding.
                hidden_BTE = self.model.base_model(input_ids=tokens_BT, attention_mask=mask_BT).last_hidden_state
                values_B1 = self.model.score(hidden_BTE[torch.arange(len(truncated)), ends_B - 1])
        rewards: list[float] = values_B1[:, 0].float().tolist()
        return rewards


@lru_cache(maxsize=2)
def _load_model(path: str, device: str) -> _Model:
    """Load the model, once per process."""
    return _Model(path, device)

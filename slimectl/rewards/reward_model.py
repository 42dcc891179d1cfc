"""The reward is a trained reward model's, in this process.

B samples · T tokens of the longest · E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slimectl.errors import SettingsError
from slimectl.model_files import check_model_files
from slimectl.rewards.verdict import Verdict, Verifier
from slimectl.types import Sample

if TYPE_CHECKING:
    from slimectl.rewards.asking import Asker

WHERE = "score.rm_options"
LOADING_S = 120.0
"""How long a worker process may take to read the model, which is no fault of its first sample's."""


@dataclass(frozen=True)
class RewardModel(Verifier):
    """What the reward model in the folder `path` gives a prompt and its response: one number, of any size.

    It is what `slimectl train --algorithm reward_model` saved, or any Hugging Face sequence classifier of one output.
    `input` "tokens" hands it the sample's tokens as they are, which is right for the vocabulary that wrote them; with
    "text" (or where a sample has no tokens) its own tokenizer and chat template write out prompt and response. What is
    longer than its context loses its beginning. `device` is torch's name of where it runs.
    """

    path: str
    batch_size: int = 16
    input: Literal["tokens", "text"] = "tokens"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not (Path(self.path) / "config.json").exists():
            raise SettingsError(
                f"{WHERE}.path: {self.path} is no model directory; make one with "
                f"`slimectl train --algorithm reward_model --save DIR`"
            )
        if self.batch_size < 1:
            raise SettingsError(f"{WHERE}.batch_size: {self.batch_size} is below 1")

    @property
    def bounds(self) -> tuple[float, float]:
        return -math.inf, math.inf

    @property
    def together(self) -> int:
        return self.batch_size

    @property
    def patience_s(self) -> float:
        return LOADING_S

    def explain(self, sample: Sample) -> Verdict:
        return self._verdicts([sample])[0]

    async def asked(self, samples: Sequence[Sample], asker: Asker) -> list[Verdict]:
        return self._verdicts(samples)

    def extract(self, sample: Sample) -> str | None:
        return sample.response

    def _verdicts(self, samples: Sequence[Sample]) -> list[Verdict]:
        model = _loaded(self.path, self.device)
        rewards = model.rewards([self._tokens(sample, model) for sample in samples])
        return [
            Verdict(reward, "prompt and response", f"{self.path} gives {reward:.4g}", sample.response,
                    (0, len(sample.response)))
            for reward, sample in zip(rewards, samples, strict=True)
        ]  # fmt: skip

    def _tokens(self, sample: Sample, model: _Model) -> list[int]:
        if self.input == "text" or not sample.tokens:
            return model.written(sample)
        if max(sample.tokens) >= model.vocabulary:
            raise SettingsError(
                f"{WHERE}.input: token {max(sample.tokens)} of sample {sample.index} is outside the vocabulary of "
                f'{self.path} ({model.vocabulary} tokens); set input = "text"'
            )
        return sample.tokens


class _Model:
    """A sequence classifier of one output, with its tokenizer."""

    def __init__(self, path: str, device: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        # Code that travels with a model is not run, and nobody is asked whether it should be.
        local = {"local_files_only": True, "trust_remote_code": False}
        try:
            check_model_files(Path(path))
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, **local)
            model, found = AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=1, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **local
            )
            self.model: Any = model.eval().to(device)
        except BaseException as error:
            # The tokenizers library (0.22) panics at some broken files, which is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            words = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SettingsError(f"{WHERE}.path: {path} cannot be loaded as a reward model: {words}") from error
        if found["missing_keys"]:
            raise SettingsError(
                f"{WHERE}.path: {path} has no {min(found['missing_keys'])}, so it is no reward model; make one with "
                f"`slimectl train --algorithm reward_model --save DIR`"
            )
        self.device = device
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.context = int(getattr(model.config, "max_position_embeddings", 0) or 0)

    def written(self, sample: Sample) -> list[int]:
        """Prompt and response in the words of its own tokenizer."""
        response = sample.response.encode(errors="replace").decode()  # half a surrogate pair is no text
        if not self.tokenizer.chat_template:
            prompt = sample.prompt
            if not isinstance(prompt, str):
                prompt = "\n\n".join(str(turn.get("content") or "") for turn in prompt)
            return list(self.tokenizer(prompt, response)["input_ids"])
        asked = [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else sample.prompt
        chat = [*asked, {"role": "assistant", "content": response}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def rewards(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """One number a sequence, from the state after its last token."""
        import torch

        kept = [list(tokens[-self.context :]) if self.context else list(tokens) for tokens in sequences]
        ends_B = torch.tensor([max(1, len(tokens)) for tokens in kept], device=self.device)
        filler = self.tokenizer.pad_token_id or 0
        longest = int(ends_B.max())
        tokens_BT = torch.tensor([tokens + [filler] * (longest - len(tokens)) for tokens in kept], device=self.device)
        mask_BT = (torch.arange(longest, device=self.device) < ends_B[:, None]).long()
        with torch.inference_mode():
            if not hasattr(self.model, "score"):  # an encoder, which pools in its own way
                values_B1 = self.model(input_ids=tokens_BT, attention_mask=mask_BT).logits
            else:
                # Not by the classifier itself: it takes an end token that is also the padding for padding.
                hidden_BTE = self.model.base_model(input_ids=tokens_BT, attention_mask=mask_BT).last_hidden_state
                values_B1 = self.model.score(hidden_BTE[torch.arange(len(kept)), ends_B - 1])
        rewards: list[float] = values_B1[:, 0].float().tolist()
        return rewards


@lru_cache(maxsize=2)
def _loaded(path: str, device: str) -> _Model:
    """Read once in each process."""
    return _Model(path, device)

"""A causal language model of transformers as a SequenceModel (embedded/model_interface.py).

B sequences · T tokens · C tokens of a chunk · V vocabulary · H hidden size.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from slimectl.architectures.causal_model import OWN_MASKS, CausalModel, check_causal, compute_rows_as_one_chunk
from slimectl.checkpoints.module_tensors import ModuleTensors
from slimectl.engines.embedded.linear import Storage
from slimectl.engines.embedded.model import Inputs, Prefix
from slimectl.engines.embedded.prefix_tree import Node, PrefixTree
from slimectl.engines.embedded.token_scores import TokenScores, token_scores
from slimectl.engines.transformers.cohorts import Cohort, CohortCache, has_known_layers, joined
from slimectl.engines.transformers.module_weights import ModuleWeights
from slimectl.errors import CheckpointError, first_line

SCORED_TOKENS = 8192
"""Maximum number of tokens, with padding, in one pass that scores texts."""

PADDING_TOLERANCE, ROUNDED_PADDING_TOLERANCE = 1e-3, 0.05
"""Maximum mean difference of logits, relative to their deviation, that is rounding: in float32 and below."""


class TransformersModel:
    """Weights and forward passes of any causal language model. The caller owns the cache.

    Prompts do not reuse keys and values of earlier prompts. Siblings share the computation of theirs.
    """

    expert_choices = 0
    pictures = None
    reusable_tokens = 0.0

    def __init__(self, config: Any, *, dtype: torch.dtype, device: torch.device, stored: Collection[str] = ()) -> None:
        """Build the model without weights. `stored`: names of the tensors in its checkpoint, if there is one.

        Raises CheckpointError if transformers does not have this model as a causal language model.
        """
        self._device = device
        self._hf = _empty_model(config, dtype=dtype, device=device)
        self.weights = ModuleWeights(self._hf, ModuleTensors(self._hf, stored=stored), Storage(dtype, device))
        self.vocabulary = int(config.get_text_config().vocab_size)
        self._causal = CausalModel(self._hf)
        self._accepted = frozenset(inspect.signature(self._hf.forward).parameters)
        self._cache_name = "cache_params" if "cache_params" in self._accepted else "past_key_values"
        # Rotary frequencies that depend on the length follow the longest row of a batch.
        self._mixes_lengths = not _has_frequencies_by_length(config.get_text_config())
        self._batches_prompts = False  # until the class of the cache is known

    def new_cache(self) -> CohortCache:
        """Create an empty cache. Sequences of different lengths share a pass if the model takes positions."""
        takes_padding = self._mixes_lengths and {"position_ids", "attention_mask"} <= self._accepted
        return CohortCache(pads=lambda: takes_padding and self._padding_is_exact)

    @cached_property
    @torch.inference_mode()
    def _padding_is_exact(self) -> bool:
        """Whether a padded sequence has the same next token's logits, tried once with the loaded weights.

        A model may ignore the mask, or add biases by position.
        """
        texts = [tuple(i % self.vocabulary for i in range(1, length)) for length in (18, 8)]
        long, short = (self.prefill([text], [None])[0].keys_values for text in texts)
        pair = joined([long.select([0]), short.select([0])])
        positions_B1 = torch.tensor([[len(text)] for text in texts], device=self._device)
        tokens_B1 = torch.ones_like(positions_B1)
        alone_1V = self._forward(tokens_B1[1:], short.cache, positions_B1[1:])[0][:, -1]
        padded_1V = self._forward(tokens_B1, pair.cache, positions_B1, pair.mask(self._device))[0][1:, -1]
        tolerance = PADDING_TOLERANCE if alone_1V.dtype == torch.float32 else ROUNDED_PADDING_TOLERANCE
        return bool((padded_1V - alone_1V).float().abs().mean() <= tolerance * alone_1V.float().std())

    def new_tree(self, capacity: int) -> PrefixTree:
        """Create a tree that stays empty."""
        return PrefixTree(capacity=0, token_bytes=1, layers=1)

    def padded_rows(self, rows: int) -> int:
        return rows

    def prefill(self, prompts: list[tuple[int, ...]], nodes: Sequence[Node | None]) -> list[Prefix]:
        """Compute prompts, with one pass for those of the same length: padding would enter recurrent states."""
        computed: dict[int, Prefix] = {}
        while waiting := [i for i in range(len(prompts)) if i not in computed]:
            length = len(prompts[waiting[0]])
            members = [i for i in waiting if len(prompts[i]) == length] if self._batches_prompts else waiting[:1]
            tokens_BT = torch.tensor([prompts[i] for i in members], device=self._device)
            logits_B1V, cache = self._forward(tokens_BT, self._empty_cache())
            self._batches_prompts = has_known_layers(cache)
            tokens = list(prompts[members[0]]) if cache is None else []
            cohort = Cohort(cache, length, [0] * len(members), tokens=tokens)
            for row, i in enumerate(members):
                alone = cohort if len(members) == 1 else cohort.select([row])
                computed[i] = Prefix(None, alone, logits_B1V[row, -1], 0)
        return [computed[i] for i in range(len(prompts))]

    def decode(self, inputs: Inputs, cache: CohortCache, *, rows: int) -> tuple[Tensor, None]:
        """Return logits [B, V] after one more token in each of the first B slots."""
        parts, slots = [], []
        for cohort in cache.cohorts:
            parts.append(self._decode(cohort, inputs))
            slots += cohort.slots
        logits_BV = parts[0] if len(parts) == 1 else torch.cat(parts)
        if slots != list(range(len(slots))):
            slots_B = torch.tensor(slots, device=self._device)
            logits_BV = torch.empty_like(logits_BV).index_copy_(0, slots_B, logits_BV)
        return logits_BV, None

    def sequence_scores(self, sequences: list[tuple[int, ...]], starts: list[int], *, top: int) -> list[TokenScores]:
        """Score the tokens after position `start` of each sequence, with the `top` likeliest at each."""
        scores: dict[int, TokenScores] = {}
        for members in self._batches(list(map(len, sequences))):
            longest = max(len(sequences[i]) for i in members)
            # A causal model computes nothing from the tokens after a position, so the padding needs no mask.
            rows = [[*sequences[i], *[0] * (longest - len(sequences[i]))] for i in members]
            tokens_BT = torch.tensor(rows, device=self._device)
            states_BTH = self._causal.states(input_ids=tokens_BT)
            for row, i in enumerate(members):
                tokens_T = tokens_BT[row, : len(sequences[i])]
                scores[i] = token_scores(
                    tokens_T, states_BTH[row], self._causal.logits, start=starts[i], top=top, vocabulary=self.vocabulary
                )
        return [scores[i] for i in range(len(sequences))]

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the texts of each pass, sorted by length. Padding must not change a model that mixes no lengths."""
        batch: list[int] = []
        for i in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
            if batch and (
                (len(batch) + 1) * lengths[batch[0]] > SCORED_TOKENS
                or (lengths[i] != lengths[batch[0]] and not self._mixes_lengths)
            ):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _decode(self, cohort: Cohort, inputs: Inputs) -> Tensor:
        """Return logits [B, V] after one more token in each row of a cohort."""
        slots_B = torch.tensor(cohort.slots, device=self._device)
        tokens_B1, positions_B1 = inputs.tokens_B[slots_B, None], inputs.positions_B[slots_B, None]
        if cohort.cache is None:
            cohort.tokens += tokens_B1[0].tolist()
            logits_B1V, _ = self._forward(torch.tensor([cohort.tokens], device=self._device), None)
            return logits_B1V[:, -1]
        mask_BT = cohort.mask(self._device)
        logits_B1V, cohort.cache = self._forward(tokens_B1, cohort.cache, positions_B1, mask_BT)
        cohort.width += 1
        return logits_B1V[:, -1]

    def _forward(
        self, tokens_BT: Tensor, cache: Any, positions_BT: Tensor | None = None, mask_BT: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Return logits [B, 1 or T, V] and the cache after the tokens, or None if the model has no cache."""
        arguments = {
            "input_ids": tokens_BT, "use_cache": True, self._cache_name: cache, "position_ids": positions_BT,
            "attention_mask": None if mask_BT is None else mask_BT.long(), "logits_to_keep": 1,
        }  # fmt: skip
        output = self._hf(**{name: value for name, value in arguments.items() if name in self._accepted})
        return output.logits, getattr(output, self._cache_name, None)

    def _empty_cache(self) -> Any:
        """Return an empty cache as transformers' `generate` makes it, or None if the model makes its own."""
        if not self._hf._supports_default_dynamic_cache():
            return None
        return DynamicCache(config=self._hf.config.get_text_config(decoder=True))


def _empty_model(config: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    if config.model_type in OWN_MASKS:
        config._attn_implementation = "eager"
    try:
        with no_init_weights(), device, warnings.catch_warnings(action="ignore"):
            hf = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        hf.tie_weights()
    except Exception as error:
        raise CheckpointError(
            f"config.json: transformers cannot build a causal language model of model_type {config.model_type!r} "
            f"({first_line(error, 200)}). Upgrade transformers, or use another model."
        ) from error
    check_causal(hf, "config.json")
    compute_rows_as_one_chunk(hf)
    return hf.eval()


def _has_frequencies_by_length(config: Any) -> bool:
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    return any(each.get("rope_type") == "longrope" or "dynamic" in str(each.get("rope_type")) for each in sets)

"""Adjusts logits: penalties for tokens already generated, and biases for individual tokens.

B rows · P rows with a penalty · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slimectl.engines.embedded.scheduler import RunningSequence
from slimectl.types import SamplingParams


class LogitAdjustments:
    """Penalties and biases for the rows of a batch, with the order and arithmetic of SGLang 0.5.21.

    First, the presence penalty is subtracted from the logit of every token in the response so far, and the frequency
    penalty once per occurrence (OpenAI's definition). Then positive logits of these tokens are divided by the
    repetition penalty, and negative ones multiplied by it (Keskar et al. 2019, arXiv:1909.05858, eq. 1). Then biases
    are added. Prompt tokens do not count.
    """

    def __init__(self, sequences: Sequence[RunningSequence], *, device: torch.device, vocabulary: int) -> None:
        penalised = [row for row, sequence in enumerate(sequences) if has_penalty(sequence.params)]
        self._rows_P = torch.tensor(penalised, dtype=torch.long, device=device)
        penalties_P3 = torch.tensor([_penalties(sequences[row].params) for row in penalised], device=device)
        self._penalties_P3 = penalties_P3.view(-1, 3)
        self._counts_PV = torch.zeros(len(penalised), vocabulary, device=device)
        for counts_V, row in zip(self._counts_PV, penalised, strict=True):
            counts_V += torch.tensor(sequences[row].tokens, dtype=torch.long, device=device).bincount(
                minlength=vocabulary
            )
        biases = [(row, *pair) for row, sequence in enumerate(sequences) for pair in sequence.params.logit_bias]
        self._bias_at = tuple(torch.tensor([bias[i] for bias in biases], device=device) for i in (0, 1))
        self._biases = torch.tensor([bias for *_, bias in biases], dtype=torch.float32, device=device)

    def apply(self, logits_BV: Tensor) -> Tensor:
        """Return adjusted float32 logits. The input is not modified."""
        adjusted_BV = logits_BV.to(torch.float32, copy=True)
        if len(self._rows_P):
            adjusted_BV[self._rows_P] = self._penalised(adjusted_BV[self._rows_P])
        if len(self._biases):
            adjusted_BV.index_put_(self._bias_at, self._biases, accumulate=True)
        return adjusted_BV

    def _penalised(self, logits_PV: Tensor) -> Tensor:
        written_PV = self._counts_PV > 0
        presence_P1, frequency_P1, repetition_P1 = self._penalties_P3.split(1, dim=1)
        logits_PV = logits_PV - frequency_P1 * self._counts_PV - presence_P1 * written_PV
        scaled_PV = torch.where(logits_PV < 0, logits_PV * repetition_P1, logits_PV / repetition_P1)
        return torch.where(written_PV, scaled_PV, logits_PV)

    def advance(self, tokens_B: Tensor) -> None:
        """Count newly sampled tokens."""
        if len(self._rows_P):
            self._counts_PV.scatter_add_(
                1, tokens_B[self._rows_P].unsqueeze(1), torch.ones_like(self._counts_PV[:, :1])
            )


def adjustments(
    sequences: Sequence[RunningSequence], *, device: torch.device, vocabulary: int
) -> LogitAdjustments | None:
    """Return the adjustments of a batch, or None if no row has any."""
    if not any(map(_is_adjusted, sequences)):
        return None
    return LogitAdjustments(sequences, device=device, vocabulary=vocabulary)


def _is_adjusted(sequence: RunningSequence) -> bool:
    return has_penalty(sequence.params) or bool(sequence.params.logit_bias)


def has_penalty(params: SamplingParams) -> bool:
    return _penalties(params) != (0.0, 0.0, 1.0)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.presence_penalty, params.frequency_penalty, params.repetition_penalty

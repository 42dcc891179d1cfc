"""What teachers say of samples and rows, also in the tokens of another vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slimectl.data.chat import encode, render
from slimectl.data.token_bytes import TokenBytes
from slimectl.errors import RecordError
from slimectl.protocols import LogProbModel
from slimectl.settings.policy_gradient import PolicyGradient
from slimectl.settings.rollout import RolloutSettings
from slimectl.stages.text_responses import prompt_of
from slimectl.types import Sample, TrainingSample, domain_of


def attach_teacher(row: TrainingSample, sample: Sample, algorithm: PolicyGradient, *, domain_key: str) -> None:
    """Set the weight of a row's teacher, and its likeliest tokens if distributions are compared.

    A sample that lacks a field of the teacher's template is not distilled. Neither is a sample of a domain without a
    teacher, if the algorithm learns from rewards too. Raises RecordError for other samples without a teacher's scores.
    """
    options = algorithm.teacher_options
    assert options is not None
    domain = domain_of(sample.extra, sample.metadata, domain_key)
    teacher = options.teacher_of(domain)
    if teacher is None and not algorithm.learns_from_rewards:
        named = "no domain" if domain is None else f"domain {domain!r}"
        raise RecordError(
            f"sample {sample.index}: {named} in {domain_key!r} that a teacher of algorithm.opd_teachers lists. Add it "
            f"to the domains of a teacher, or leave one teacher without domains"
        )
    row.teacher_weight = 0.0 if teacher is None else teacher.weight
    if options.in_trainer:
        return
    scores = getattr(sample, options.field)
    if scores is None and teacher is not None and options.template is None:
        setting = "opd_kl_coef" if options.divergence == "token" else "opd_top_k"
        raise RecordError(
            f"sample {sample.index}: no {options.field}, which algorithm.{setting} needs. Set "
            f"algorithm.opd_teacher_load or algorithm.opd_teacher_url"
        )
    if scores is None:
        row.teacher_weight = 0.0
    if options.divergence != "token":
        tops = [[] for _ in range(row.response_length)] if scores is None else scores
        row.teacher_top_log_probs = [pairs[: options.top_k] for pairs in tops]


class AlignedTeacher:
    """Scores samples with a model that reads their text in its own tokens and chat template.

    The result is approximate. Tokens between two places where both tokenizations end a token make a chunk. All tokens
    of a chunk get the same share of its log-ratio, which is measured with the log-probabilities of the engine. The
    teacher scores only the tokens that its tokenizer would write, although other tokens have the same text.
    """

    def __init__(self, model: Any, tokenizer: Any, policy_tokenizer: Any, rollout: RolloutSettings) -> None:
        self._model: LogProbModel = model
        self._tokenizer, self._rollout = tokenizer, rollout
        self._bytes, self._policy_bytes = TokenBytes(tokenizer), TokenBytes(policy_tokenizer)

    def sample_log_probs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Return the teacher's log-probability of every response token of the samples.

        Raises RecordError for a sample without log-probabilities of the engine or with special tokens in its response.
        """
        pairs = [self._aligned(sample) for sample in samples]
        log_probs = self._model.log_probs([row for row, _ in pairs])
        return [
            shared_log_probs(sample.rollout_log_probs or [], values, ends)
            for sample, (_, ends), values in zip(samples, pairs, log_probs, strict=True)
        ]

    def close(self) -> None:
        self._model.close()

    def _aligned(self, sample: Sample) -> tuple[TrainingSample, list[tuple[int, int]]]:
        """Return a sample in the teacher's tokens, and the ends of its chunks in tokens of the policy and teacher.

        A special token at the end of a response is the teacher's end token.
        """
        pieces = self._response_bytes(sample)
        text = b"".join(pieces).decode("utf-8", "replace")
        response = encode(self._tokenizer, text)
        teacher_pieces = list(map(self._bytes.of, response))
        if teacher_pieces and teacher_pieces[0].startswith(b" ") and not text.startswith(" "):
            teacher_pieces[0] = teacher_pieces[0][1:]  # the space that some tokenizers add before a text
        ends = common_ends(pieces, teacher_pieces)
        is_ended, end_token = len(pieces) < sample.response_length, self._tokenizer.eos_token_id
        if is_ended and end_token is not None:
            response.append(end_token)
            if (ends[-1] if ends else (0, 0)) == (len(pieces), len(teacher_pieces)):
                ends.append((len(pieces) + 1, len(response)))
        prompt = render(
            prompt_of(sample),
            self._tokenizer,
            apply_chat_template=self._rollout.apply_chat_template,
            template_kwargs=self._rollout.template_kwargs,
        )
        row = TrainingSample(prompt + response, len(response), [0.0] * len(response), group=sample.group_index)
        return row, ends

    def _response_bytes(self, sample: Sample) -> list[bytes]:
        """Return the bytes of every response token, without a special token at the end."""
        if sample.rollout_log_probs is None:
            raise RecordError(
                f'sample {sample.index}: no rollout_log_probs, which algorithm.opd_align = "text" needs. Sample with '
                f"`slimectl rollout`, which records them"
            )
        tokens = sample.tokens[sample.prompt_length :]
        is_special = self._policy_bytes.is_special
        tokens = tokens[:-1] if tokens and is_special(tokens[-1]) else tokens
        if any(map(is_special, tokens)):
            raise RecordError(
                f'sample {sample.index}: special tokens within the response, which algorithm.opd_align = "text" cannot '
                f"read as text. Sample single turns, or use a teacher with the same vocabulary"
            )
        return list(map(self._policy_bytes.of, tokens))


def common_ends(first: Sequence[bytes], second: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return where both tokenizations end a token at the same byte: the numbers of tokens so far of each.

    There are as many places as possible, in order, with tokens of both between them. They end before the first byte
    that differs.

    >>> common_ends([b"un", b"like", b"ly", b"!"], [b"unlike", b"l", b"y", b"!"])
    [(2, 1), (3, 3), (4, 4)]
    """
    ends: list[tuple[int, int]] = []
    i = j = 0
    rest_of_first = rest_of_second = b""
    while i < len(first) or j < len(second):
        if len(rest_of_first) <= len(rest_of_second) and i < len(first):
            rest_of_first += first[i]
            i += 1
        elif j < len(second):
            rest_of_second += second[j]
            j += 1
        else:
            break
        length = min(len(rest_of_first), len(rest_of_second))
        if rest_of_first[:length] != rest_of_second[:length]:
            break
        rest_of_first, rest_of_second = rest_of_first[length:], rest_of_second[length:]
        last_i, last_j = ends[-1] if ends else (0, 0)
        if not rest_of_first and not rest_of_second and i > last_i and j > last_j:
            ends.append((i, j))
    return ends


def shared_log_probs(
    log_probs: Sequence[float], teacher_log_probs: Sequence[float], ends: Sequence[tuple[int, int]]
) -> list[float]:
    """Return log-probabilities of a teacher with other tokens, one for each token of the policy.

    `log_probs` are the policy's and `teacher_log_probs` the teacher's, of its own tokens, which end together at `ends`.
    Between two ends, the difference of the sums is divided equally among the policy's tokens. So the sum over a chunk
    is the teacher's, and all of its tokens have the same log-ratio. After the last end the values are the policy's.

    >>> shared_log_probs([-1.0, -2.0, -4.0], [-1.0, -0.5], [(2, 1)])
    [0.0, -1.0, -4.0]
    """
    shared = list(log_probs)
    start = teacher_start = 0
    for end, teacher_end in ends:
        if end > start:
            difference = sum(teacher_log_probs[teacher_start:teacher_end]) - sum(log_probs[start:end])
            for i in range(start, end):
                shared[i] += difference / (end - start)
        start, teacher_start = end, teacher_end
    return shared

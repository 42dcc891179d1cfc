"""SGLang's generation endpoint and its response format."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from aiohttp import web

from slimectl.chats.requests import MOST_ANSWERS, MOST_TEACHER_TOP, GenerationRequest, RequestBody, from_sglang
from slimectl.data.routed_experts import decoded
from slimectl.data.token_log_probs import TokenLogProb
from slimectl.engines.server.errors import RequestError
from slimectl.engines.server.log_probs import answer_log_probs, prompt_log_probs
from slimectl.engines.server.requests import RunningAnswer
from slimectl.engines.server.schema import read
from slimectl.engines.server.state import SERVICE, Service, dumped, stream_answers


def start_positions(fields: RequestBody, prompts: list[list[int]]) -> list[int | None]:
    """Parse logprob_start_len, one value or a list: the first token to score of each prompt, or None.

    Raises MessageError for a position outside its prompt.
    """
    name, raw = "logprob_start_len", fields.raw("logprob_start_len")
    if not fields.flag("return_logprob") or raw is None:
        return [None] * len(prompts)
    listed = raw if isinstance(raw, list) else [raw] * len(prompts)
    if len(listed) != len(prompts):
        raise fields.refuse(name, f"has {len(listed)} values for {len(prompts)} prompts")
    positions: list[int | None] = []
    for prompt, start in zip(prompts, listed, strict=True):
        if type(start) is not int or not -1 <= start < max(1, len(prompt)):
            raise fields.refuse(name, f"is not a position in a prompt of {len(prompt)} tokens, nor -1 for none")
        positions.append(None if start == -1 else start)
    return positions


async def generate(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    fields = await read(request)
    service.check_ready()
    prompts, many = await _prompts(fields, service)
    top = fields.whole("top_logprobs_num", 0, high=MOST_TEACHER_TOP) if fields.flag("return_logprob") else 0
    params = _generation_requests(fields, len(prompts), service.streaming.interval)
    reported = _reports_experts(fields, service)
    options = [replace(generation, top_log_probs=top, routed_experts=reported) for generation in params]
    generations = list(zip(prompts, options, strict=True))
    total = sum(generation.n for generation in params)
    if total > MOST_ANSWERS:
        raise RequestError(f"{total} responses in one request are too many. The maximum is {MOST_ANSWERS}.")
    await service.prepare_grammars(generation for _, generation in generations)
    rid, rids = _rids(fields, len(prompts), many)
    input_scores = await prompt_log_probs(service, prompts, start_positions(fields, prompts), top=top)
    form = ResponseFormat(
        log_probs=fields.flag("return_logprob"),
        with_text=fields.flag("return_text_in_logprobs"),
        incremental=fields.flag("incremental_streaming_output", service.streaming.incremental),
        listed=many or generations[0][1].n > 1,
        token_text=service.requests.vocabulary.text,
        version=service.thread.engine.weight_version,
        inputs=[
            score for score, (_, generation) in zip(input_scores, generations, strict=True) for _ in range(generation.n)
        ],
    )
    with service.requests.ask(generations, rids, rid=rid) as pending:
        if not fields.flag("stream"):
            outputs = [form.whole(answer) for answer in await pending.finished()]
            text = f"[{','.join(outputs)}]" if form.listed else outputs[0]
            return web.Response(text=text, content_type="application/json")
        stream = await stream_answers(request, pending, lambda answer: [form.chunk(answer)])
    return await stream.end()


def _reports_experts(fields: RequestBody, service: Service) -> bool:
    """Parse return_routed_experts. Raises MessageError for a model without experts."""
    is_asked = fields.flag("return_routed_experts")
    if is_asked and not service.thread.engine.has_experts:
        raise fields.refuse("return_routed_experts", "requires a mixture of experts, but this is a dense model")
    return is_asked


async def _prompts(fields: RequestBody, service: Service) -> tuple[list[list[int]], bool]:
    """Return the token ids of every prompt, and whether the request has a list of prompts."""
    text, ids = fields.raw("text"), fields.raw("input_ids")
    if (text is None) == (ids is None):
        raise RequestError("text, input_ids: set exactly one of the two")
    if text is not None:
        many, texts = isinstance(text, list), fields.texts("text", max_count=MOST_ANSWERS)
        encoded = [await service.encoded(prompt) for prompt in texts]
    else:
        many = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
        encoded = [fields.tokens("input_ids", prompt) for prompt in (ids if many else [ids])]
    if not encoded:
        raise RequestError("text: is an empty list", field="text")
    return encoded, many


def _generation_requests(fields: RequestBody, count: int, interval: int) -> list[GenerationRequest]:
    """Parse the sampling parameters of each prompt: one object for all, or one for each."""
    raw = fields.raw("sampling_params")
    if not isinstance(raw, list):
        params = fields.inner("sampling_params")
        return [from_sglang(params, interval=interval)] * count
    objects = fields.objects("sampling_params") or []
    if len(objects) != count:
        raise fields.refuse("sampling_params", f"has {len(objects)} objects for {count} prompts")
    all_fields = [RequestBody(params, at=f"sampling_params[{i}].") for i, params in enumerate(objects)]
    return [from_sglang(params, interval=interval) for params in all_fields]


def _rids(fields: RequestBody, count: int, many: bool) -> tuple[str, list[str]]:
    """Return the id of the request and the ids of its prompts."""
    if isinstance(fields.raw("rid"), list):
        rids = fields.texts("rid", max_count=count)
        if len(rids) != count or len(set(rids)) != count:
            raise fields.refuse("rid", f"is not a list of {count} different ids, one for each prompt")
        return uuid.uuid4().hex, rids
    rid = fields.text("rid", longest=256) or uuid.uuid4().hex
    return rid, [f"{rid}_{i}" for i in range(count)] if many else [rid]


class ResponseFormat:
    """Formats the responses to one request as JSON, as a whole or in chunks.

    A chunk has all tokens so far, as in SGLang, or only the new ones with `incremental`. Encoded JSON is cached, so
    that a stream of n tokens encodes n numbers, not n squared.
    """

    def __init__(
        self,
        *,
        log_probs: bool,
        with_text: bool,
        incremental: bool,
        listed: bool,
        token_text: Callable[[int], str],
        version: str,
        inputs: list[list[TokenLogProb]],
    ) -> None:
        self.listed = listed
        self._version = version
        self._log_probs = log_probs
        self._with_text = with_text
        self._incremental = incremental
        self._token_text = token_text
        self._inputs = [(self._triples(scores), self._tops(scores)) for scores in inputs]
        self._sent_parts: dict[int, tuple[str, str, str]] = {}

    def whole(self, answer: RunningAnswer) -> str:
        return self._to_json(answer, *self._numbers(answer, 0, answer.count), text=answer.text())

    def chunk(self, answer: RunningAnswer) -> str:
        count, text = answer.count, answer.text()
        new = self._numbers(answer, answer.told, count)
        if self._incremental:
            text, answer.told_text = text[answer.told_text :], max(len(text), answer.told_text)
        else:
            previous = self._sent_parts.get(answer.index, ("", "", ""))
            new = (_join(previous[0], new[0]), _join(previous[1], new[1]), _join(previous[2], new[2]))
            self._sent_parts[answer.index] = new
        answer.told = count
        return self._to_json(answer, *new, text=text, count=count)

    def _numbers(self, answer: RunningAnswer, start: int, end: int) -> tuple[str, str, str]:
        """Encode token ids, log-probabilities and likeliest tokens, as JSON lists without brackets."""
        tokens = ",".join(map(str, answer.sequence.tokens[start:end]))
        if not self._log_probs:
            return tokens, "", ""
        scores = answer_log_probs(answer, start, end)
        return tokens, self._triples(scores), self._tops(scores) if answer.sequence.top_count else ""

    def _triples(self, scores: Iterable[TokenLogProb]) -> str:
        """Encode [logprob, id, text or null] as a JSON list without brackets."""
        return ",".join(self._triple(score.log_prob, score.token) for score in scores)

    def _tops(self, scores: Iterable[TokenLogProb]) -> str:
        """Encode the likeliest tokens at each position, or null, as a JSON list without brackets."""
        return ",".join(
            "null" if score.top is None else f"[{','.join(self._triple(p, token) for token, p in score.top)}]"
            for score in scores
        )

    def _triple(self, log_prob: float | None, token: int) -> str:
        text = dumped(self._token_text(token)) if self._with_text else "null"
        return f"[{'null' if log_prob is None else repr(log_prob)},{token},{text}]"

    def _to_json(
        self, answer: RunningAnswer, tokens: str, log_probs: str, tops: str, *, text: str, count: int | None = None
    ) -> str:
        count = answer.count if count is None else count
        meta = dumped(self._meta(answer, count))
        if self._log_probs:
            inputs, input_tops = self._inputs[answer.index]
            log_prob_fields = f'"input_token_logprobs":[{inputs}],"output_token_logprobs":[{log_probs}]'
            if answer.sequence.top_count:
                log_prob_fields += f',"input_top_logprobs":[{input_tops}],"output_top_logprobs":[{tops}]'
            meta = f'{meta[:-1]},{log_prob_fields},"output_token_logprobs_length":{count}}}'
        index = f',"index":{answer.index}' if self.listed else ""
        return f'{{"text":{dumped(text)},"output_ids":[{tokens}],"meta_info":{meta}{index}}}'

    def _meta(self, answer: RunningAnswer, count: int) -> dict[str, Any]:
        finish, spans = answer.finish_reason(), answer.spans()
        meta = {
            "id": answer.rid,
            "finish_reason": finish,
            "prompt_tokens": len(answer.sequence.prompt),
            "completion_tokens": count,
            "cached_tokens": answer.sequence.cached_tokens,
            "weight_version": spans[-1]["version"] if spans else self._version,
            "weight_versions": spans,
        }
        if finish is None:
            return meta
        if answer.completion.loss_mask is not None:
            meta["loss_mask"] = answer.completion.loss_mask
        if "routed_experts" in answer.completion.extras:  # SGLang's form: base64 of int32
            experts = decoded(answer.completion.extras["routed_experts"]).astype("<i4")
            meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        return meta | {"e2e_latency": round(answer.latency_s, 6), "queue_time": round(answer.queue_s, 6)}


def _join(previous: str, new: str) -> str:
    return f"{previous},{new}" if previous and new else previous or new

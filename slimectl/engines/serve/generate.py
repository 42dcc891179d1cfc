"""POST /generate: SGLang's own form of asking for answers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web

from slimectl.engines.serve.answers import Answer
from slimectl.engines.serve.fields import Fields, read
from slimectl.engines.serve.refusals import Refused
from slimectl.engines.serve.sampling import MOST_ANSWERS, Wish, from_sglang
from slimectl.engines.serve.scoring import Judged, judged, starts
from slimectl.engines.serve.service import SERVICE, STREAMED, EventStream, Service, dumped

UNSUPPORTED: dict[str, tuple[float | str, ...]] = {
    "input_embeds": (), "image_data": (), "video_data": (), "audio_data": (), "token_ids_logprob": (),
    "top_logprobs_num": (0,), "return_hidden_states": (), "return_sampling_mask": (),
    "lora_path": (), "session_params": (), "custom_logit_processor": (), "return_routed_experts": (),
}  # fmt: skip


async def generate(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    fields = await read(request)
    service.check_ready()
    fields.refuse_beyond(UNSUPPORTED)
    prompts, many = await _prompts(fields, service)
    asked = list(zip(prompts, _wishes(fields, len(prompts), service.streaming.interval), strict=True))
    if sum(wish.n for _, wish in asked) > MOST_ANSWERS:
        raise Refused(f"{sum(wish.n for _, wish in asked)} answers at once, and {MOST_ANSWERS} are the most")
    rid, rids = _rids(fields, len(prompts), many)
    known = await judged(service, prompts, starts(fields, prompts))
    form = Form(
        log_probs=fields.flag("return_logprob"),
        with_text=fields.flag("return_text_in_logprobs"),
        incremental=fields.flag("incremental_streaming_output", service.streaming.incremental),
        listed=many or asked[0][1].n > 1,
        token_text=service.desk.token_text,
        version=service.thread.engine.weight_version,
        inputs=[each for each, (_, wish) in zip(known, asked, strict=True) for _ in range(wish.n)],
    )
    if fields.flag("stream"):
        return await _streamed(request, service, asked, rids, rid, form)
    with service.desk.ask(asked, rids, rid=rid) as going:
        written = [form.whole(answer) for answer in await going.finished()]
    text = f"[{','.join(written)}]" if form.listed else written[0]
    return web.Response(text=text, content_type="application/json")


async def _streamed(
    request: web.Request, service: Service, asked: list[tuple[list[int], Wish]], rids: list[str], rid: str, form: Form
) -> web.StreamResponse:
    stream = EventStream(request)
    with service.desk.ask(asked, rids, rid=rid) as going:
        try:
            async for answer in going.growing():
                await stream.send(form.chunk(answer))
        except STREAMED as error:
            await stream.fail(error)
    return await stream.end()


async def _prompts(fields: Fields, service: Service) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether they came as a list."""
    text, ids = fields.raw("text"), fields.raw("input_ids")
    if (text is None) == (ids is None):
        raise Refused("text, input_ids: give one of the two")
    if text is not None:
        many, texts = isinstance(text, list), fields.texts("text", most=MOST_ANSWERS)
        encoded = [await service.encoded(each) for each in texts]
    else:
        many = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
        encoded = [fields.tokens("input_ids", each) for each in (ids if many else [ids])]
    if not encoded:
        raise Refused("text: is an empty list", field="text")
    return encoded, many


def _wishes(fields: Fields, count: int, interval: int) -> list[Wish]:
    """One for all, or one for each prompt."""
    given = fields.raw("sampling_params")
    if not isinstance(given, list):
        params = Fields(fields.object("sampling_params"), at="sampling_params.")
        return [from_sglang(params, interval=interval)] * count
    each = fields.objects("sampling_params") or []
    if len(each) != count:
        raise fields.refuse("sampling_params", f"are {len(each)} for {count} prompts")
    listed = [Fields(params, at=f"sampling_params[{i}].") for i, params in enumerate(each)]
    return [from_sglang(params, interval=interval) for params in listed]


def _rids(fields: Fields, count: int, many: bool) -> tuple[str, list[str]]:
    """The id of the request, and one for each of its prompts."""
    if isinstance(fields.raw("rid"), list):
        rids = fields.texts("rid", most=count)
        if len(rids) != count or len(set(rids)) != count:
            raise fields.refuse("rid", f"is not one of its own for each of {count} prompts")
        return uuid.uuid4().hex, rids
    rid = fields.text("rid", longest=256) or uuid.uuid4().hex
    return rid, [f"{rid}_{i}" for i in range(count)] if many else [rid]


class Form:
    """How answers are written for one request: whole, or chunk by chunk.

    A chunk holds all that has been written so far, as SGLang's does, or with `incremental` only what is new. What has
    been written as JSON once is kept: a stream of n tokens costs n numbers, not n squared.
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
        inputs: list[Judged],
    ) -> None:
        self.listed = listed
        self._version = version
        self._log_probs = log_probs
        self._with_text = with_text
        self._incremental = incremental
        self._token_text = token_text
        self._inputs = [self._triples(each) for each in inputs]
        self._before: dict[int, tuple[str, str]] = {}

    def whole(self, answer: Answer) -> str:
        return self._object(answer, *self._numbers(answer, 0, answer.count), text=answer.text())

    def chunk(self, answer: Answer) -> str:
        count, text = answer.count, answer.text()
        new = self._numbers(answer, answer.told, count)
        if self._incremental:
            text, answer.told_text = text[answer.told_text :], max(len(text), answer.told_text)
        else:
            before = self._before.get(answer.index, ("", ""))
            new = (_joined(before[0], new[0]), _joined(before[1], new[1]))
            self._before[answer.index] = new
        answer.told = count
        return self._object(answer, *new, text=text, count=count)

    def _numbers(self, answer: Answer, start: int, end: int) -> tuple[str, str]:
        """Token ids, and their log-probabilities as [logprob, id, text or null], as the insides of JSON lists."""
        tokens = answer.sequence.tokens[start:end]
        if not self._log_probs:
            return ",".join(map(str, tokens)), ""
        pairs = zip(answer.sequence.log_probs[start:end], tokens, strict=True)
        return ",".join(map(str, tokens)), self._triples(pairs)

    def _triples(self, pairs: Iterable[tuple[float | None, int]]) -> str:
        """[logprob, id, text or null], as the inside of a JSON list."""
        told = (lambda token: dumped(self._token_text(token))) if self._with_text else (lambda token: "null")
        return ",".join(f"[{'null' if p is None else repr(p)},{token},{told(token)}]" for p, token in pairs)

    def _object(self, answer: Answer, tokens: str, log_probs: str, *, text: str, count: int | None = None) -> str:
        count = answer.count if count is None else count
        meta = dumped(self._meta(answer, count))
        if self._log_probs:
            inputs = self._inputs[answer.index]
            listed = f'"input_token_logprobs":[{inputs}],"output_token_logprobs":[{log_probs}]'
            meta = f'{meta[:-1]},{listed},"output_token_logprobs_length":{count}}}'
        index = f',"index":{answer.index}' if self.listed else ""
        return f'{{"text":{dumped(text)},"output_ids":[{tokens}],"meta_info":{meta}{index}}}'

    def _meta(self, answer: Answer, count: int) -> dict[str, Any]:
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
        return meta if finish is None else meta | {"e2e_latency": round(answer.latency_s, 6)}


def _joined(before: str, new: str) -> str:
    return f"{before},{new}" if before and new else before or new

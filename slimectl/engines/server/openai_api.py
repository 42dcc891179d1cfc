"""Formats answers for OpenAI's API: whole, or as the delta since the last chunk."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from slimectl.data.chat import render
from slimectl.engines.server.engine_thread import run_in_daemon_thread
from slimectl.engines.server.errors import RequestError
from slimectl.engines.server.requests import RunningAnswer
from slimectl.engines.server.sampling_params import MOST_ANSWERS, GenerationRequest, from_openai
from slimectl.engines.server.schema import RequestBody, read
from slimectl.engines.server.state import LONG, SERVICE, STREAMED, EventStream, Service, dumped
from slimectl.types import Prompt


@dataclass(frozen=True, slots=True)
class ApiKind:
    """Response fields that differ between the two endpoints."""

    prefix: str
    complete: str
    chunk: str
    chat: bool


COMPLETION = ApiKind("cmpl", "text_completion", "text_completion", chat=False)
CHAT = ApiKind("chatcmpl", "chat.completion", "chat.completion.chunk", chat=True)


class ResponseFormatter:
    """Formats the response of one request, with `n` answers per prompt."""

    def __init__(
        self,
        kind: ApiKind,
        *,
        model: str,
        n: int,
        log_probs: bool,
        with_tokens: bool,
        token_text: Callable[[int], str],
    ) -> None:
        self.rid = f"{kind.prefix}-{uuid.uuid4().hex}"
        self._kind = kind
        self._n = n
        self._created = int(time.time())
        self._model = model
        self._log_probs = log_probs
        self._with_tokens = with_tokens
        self._token_text = token_text

    def frame(self, choices: list[dict[str, Any]], *, complete: bool) -> dict[str, Any]:
        return {
            "id": self.rid,
            "object": self._kind.complete if complete else self._kind.chunk,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def whole(self, answers: list[RunningAnswer]) -> dict[str, Any]:
        choices = []
        for answer in answers:
            text = answer.text()
            content = {"message": {"role": "assistant", "content": text}} if self._kind.chat else {"text": text}
            choices.append(self._choice(answer, content, 0, answer.count))
        spans = answers[0].spans()
        versions = {"weight_version": spans[-1]["version"], "weight_versions": spans} if spans else {}
        return self.frame(choices, complete=True) | {"usage": self.usage(answers), "metadata": versions}

    def openings(self, answers: list[RunningAnswer]) -> list[dict[str, Any]]:
        """Return the first chunks of a chat's stream, which name the role."""
        if not self._kind.chat:
            return []
        choice = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self.frame([{"index": answer.index, **choice}], complete=False) for answer in answers]

    def delta(self, answer: RunningAnswer) -> dict[str, Any] | None:
        """Return the delta of an answer; None while its new tokens have no text yet."""
        count, text = answer.count, answer.text()
        new = text[answer.told_text :]
        if not new and not answer.done and not (self._log_probs or self._with_tokens):
            return None
        content = {"delta": {"content": new}} if self._kind.chat else {"text": new}
        choice = self._choice(answer, content, answer.told, count)
        answer.told, answer.told_text = count, max(answer.told_text, len(text))
        return self.frame([choice], complete=False)

    def usage(self, answers: list[RunningAnswer]) -> dict[str, Any]:
        """Count tokens; a prompt with n answers counts once."""
        prompt_tokens = sum(len(answer.sequence.prompt) for answer in answers[:: self._n])
        completion_tokens = sum(answer.count for answer in answers)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(answer.sequence.cached_tokens for answer in answers)},
        }

    def _choice(self, answer: RunningAnswer, content: dict[str, Any], start: int, end: int) -> dict[str, Any]:
        finish = answer.finish_reason()
        choice = {"index": answer.index, **content, "logprobs": self._log_probs_of(answer, start, end)}
        choice["finish_reason"] = finish["type"] if finish else None
        if finish:
            choice["matched_stop"] = finish.get("matched")
        if self._with_tokens:
            choice["prompt_token_ids"] = list(answer.sequence.prompt)
            choice["response_token_ids" if self._kind.chat else "token_ids"] = answer.sequence.tokens[start:end]
        return choice

    def _log_probs_of(self, answer: RunningAnswer, start: int, end: int) -> dict[str, Any] | None:
        """Return the log-probabilities of the sampled tokens; those of other tokens are not available."""
        if not self._log_probs:
            return None
        tokens, log_probs = answer.sequence.tokens[start:end], answer.sequence.log_probs[start:end]
        texts = [self._token_text(token) for token in tokens]
        if not self._kind.chat:
            return {"tokens": texts, "token_logprobs": log_probs, "top_logprobs": None, "text_offset": []}
        return {
            "content": [
                {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, log_prob in zip(texts, log_probs, strict=True)
            ]
        }


DEFAULT_COMPLETION = 16
"""Default max_tokens of a completion, as in OpenAI's API; a chat's default is the whole context."""

UNSUPPORTED: dict[str, tuple[float | str, ...]] = {
    "echo": (), "suffix": (), "best_of": (1,), "top_logprobs": (0,), "functions": (), "function_call": (),
    "input_ids": (), "lora_path": (), "audio": (), "modalities": (),
}  # fmt: skip


async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    fields = await read(request)
    service.check_ready()
    fields.refuse_beyond(UNSUPPORTED)
    log_probs = "logprobs" in fields and fields.whole("logprobs", 0, high=1) >= 0
    prompt = fields.raw("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompts = [fields.tokens("prompt", tokens) for tokens in prompt]
    elif isinstance(prompt, list) and prompt and not isinstance(prompt[0], str):
        prompts = [fields.tokens("prompt", prompt)]
    else:
        prompts = [await service.encoded(text) for text in fields.texts("prompt", max_count=MOST_ANSWERS)]
    if not prompts:
        raise RequestError("prompt: is missing", field="prompt")
    wish = from_openai(fields, default_max=DEFAULT_COMPLETION, interval=service.streaming.interval)
    form = _form(COMPLETION, fields, service, wish, log_probs=log_probs)
    return await _respond(request, service, fields, prompts, wish, form)


async def chat(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    fields = await read(request)
    service.check_ready()
    fields.refuse_beyond(UNSUPPORTED)
    if fields.object("response_format").get("type", "text") != "text":
        raise fields.refuse("response_format", "only plain text is supported by `slimectl serve`")
    messages = [_message(fields, i, message) for i, message in enumerate(fields.objects("messages") or [])]
    if not messages:
        raise RequestError("messages: is missing or empty", field="messages")
    rendered = partial(
        render,
        Prompt(text=messages, tools=fields.objects("tools") or None),
        service.served.tokenizer,
        template_kwargs=fields.object("chat_template_kwargs"),
    )
    tokens = await run_in_daemon_thread(rendered) if len(str(messages)) > LONG else rendered()
    longest = service.thread.engine.max_context
    wish = from_openai(fields, default_max=longest, interval=service.streaming.interval)
    form = _form(CHAT, fields, service, wish, log_probs=fields.flag("logprobs"))
    return await _respond(request, service, fields, [tokens], wish, form)


def _message(fields: RequestBody, i: int, message: dict[str, Any]) -> dict[str, Any]:
    """Normalize a message for chat templates: content in one string, a tool call's arguments as an object."""
    at = f"messages[{i}]"
    if not isinstance(message.get("role"), str):
        raise fields.refuse(f"{at}.role", "is not a string")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise fields.refuse(f"{at}.content", "has a part that is not text; this engine reads text only")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise fields.refuse(f"{at}.content", "is neither a string nor a list of parts")
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls)):
        raise fields.refuse(f"{at}.tool_calls", "is not a list of objects")
    normalized = {**message, "content": None if content is None else fields.checked(f"{at}.content", content)}
    return normalized | {"tool_calls": [_call(call) for call in calls]} if calls else normalized


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call  # what a model wrote need not be JSON; the template shows it as it stands
    return {**call, "function": {**function, "arguments": arguments}}


def _form(
    kind: ApiKind, fields: RequestBody, service: Service, wish: GenerationRequest, *, log_probs: bool
) -> ResponseFormatter:
    return ResponseFormatter(
        kind,
        model=fields.text("model", longest=4096) or service.served.folder.name,
        n=wish.n,
        log_probs=log_probs,
        with_tokens=fields.flag("return_token_ids"),
        token_text=service.desk.token_text,
    )


async def _respond(
    request: web.Request,
    service: Service,
    fields: RequestBody,
    prompts: list[list[int]],
    wish: GenerationRequest,
    form: ResponseFormatter,
) -> web.StreamResponse:
    if wish.n * len(prompts) > MOST_ANSWERS:
        raise RequestError(f"{wish.n * len(prompts)} answers at once, and {MOST_ANSWERS} are the most", field="n")
    rid = fields.text("rid", longest=256) or form.rid
    rids = [rid] if len(prompts) == 1 else [f"{rid}_{i}" for i in range(len(prompts))]
    wishes = [(prompt, wish) for prompt in prompts]
    if not fields.flag("stream"):
        with service.desk.ask(wishes, rids, rid=rid) as pending:
            return web.json_response(form.whole(await pending.finished()), dumps=dumped)
    with_usage = RequestBody(fields.object("stream_options"), at="stream_options.").flag("include_usage")
    stream = EventStream(request)
    with service.desk.ask(wishes, rids, rid=rid) as pending:
        try:
            first_chunks = form.openings(pending.answers)
            async for answer in pending.growing():
                # Not before there is a chunk to send: until then a refusal still has an HTTP status.
                while first_chunks:
                    await stream.send(dumped(first_chunks.pop(0)))
                if (chunk := form.delta(answer)) is not None:
                    await stream.send(dumped(chunk))
            if with_usage:
                await stream.send(dumped(form.frame([], complete=False) | {"usage": form.usage(pending.answers)}))
        except STREAMED as error:
            await stream.fail(error)
    return await stream.end()

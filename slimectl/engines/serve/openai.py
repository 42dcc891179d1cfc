"""POST /v1/completions and /v1/chat/completions: OpenAI's API, for agents and judges."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from aiohttp import web

from slimectl.data.chat import render
from slimectl.engines.serve.fields import Fields, read
from slimectl.engines.serve.openai_form import CHAT, COMPLETION, Form, Kind
from slimectl.engines.serve.refusals import Refused
from slimectl.engines.serve.sampling import MOST_ANSWERS, Wish, from_openai
from slimectl.engines.serve.service import LONG, SERVICE, STREAMED, EventStream, Service, dumped
from slimectl.engines.serve.thread import apart
from slimectl.types import Prompt

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
        raise Refused("prompt: is missing", field="prompt")
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
        raise Refused("messages: is missing or empty", field="messages")
    rendered = partial(
        render,
        Prompt(text=messages, tools=fields.objects("tools") or None),
        service.served.tokenizer,
        template_kwargs=fields.object("chat_template_kwargs"),
    )
    tokens = await apart(rendered) if len(str(messages)) > LONG else rendered()
    longest = service.thread.engine.max_context
    wish = from_openai(fields, default_max=longest, interval=service.streaming.interval)
    form = _form(CHAT, fields, service, wish, log_probs=fields.flag("logprobs"))
    return await _respond(request, service, fields, [tokens], wish, form)


def _message(fields: Fields, i: int, message: dict[str, Any]) -> dict[str, Any]:
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


def _form(kind: Kind, fields: Fields, service: Service, wish: Wish, *, log_probs: bool) -> Form:
    return Form(
        kind,
        model=fields.text("model", longest=4096) or service.served.folder.name,
        n=wish.n,
        log_probs=log_probs,
        with_tokens=fields.flag("return_token_ids"),
        token_text=service.desk.token_text,
    )


async def _respond(
    request: web.Request, service: Service, fields: Fields, prompts: list[list[int]], wish: Wish, form: Form
) -> web.StreamResponse:
    if wish.n * len(prompts) > MOST_ANSWERS:
        raise Refused(f"{wish.n * len(prompts)} answers at once, and {MOST_ANSWERS} are the most", field="n")
    rid = fields.text("rid", longest=256) or form.rid
    rids = [rid] if len(prompts) == 1 else [f"{rid}_{i}" for i in range(len(prompts))]
    wishes = [(prompt, wish) for prompt in prompts]
    if not fields.flag("stream"):
        with service.desk.ask(wishes, rids, rid=rid) as pending:
            return web.json_response(form.whole(await pending.finished()), dumps=dumped)
    with_usage = Fields(fields.object("stream_options"), at="stream_options.").flag("include_usage")
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

"""OpenAI's endpoints: completions and chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from slimectl.chats.messages import MessageError, normalized_chat
from slimectl.data.answers import AnswerFormat, format_of
from slimectl.data.chat import render
from slimectl.data.chat_responses import CHAT, COMPLETION, ApiKind
from slimectl.engines.limits import check_prompt
from slimectl.engines.server.engine_thread import run_in_daemon_thread
from slimectl.engines.server.errors import RequestError
from slimectl.engines.server.log_probs import prompt_log_probs
from slimectl.engines.server.openai_format import ChatParser, Echo, ResponseFormatter
from slimectl.engines.server.sampling_params import MOST_ANSWERS, MOST_TOP, GenerationRequest, from_openai
from slimectl.engines.server.schema import RequestBody, read
from slimectl.engines.server.state import LONG, SERVICE, STREAMED, EventStream, Service, dumped
from slimectl.rewards.thoughts import THINK
from slimectl.types import Prompt

DEFAULT_COMPLETION = 16
"""Default max_tokens of a completion, as in OpenAI's API; a chat's default is the whole context."""
PROMPT_END = 16
"""Tokens of a rendered chat among which a template may open the reasoning."""

UNSUPPORTED: dict[str, tuple[float | str, ...]] = {
    "suffix": (), "best_of": (1,), "functions": (), "function_call": (),
    "input_ids": (), "lora_path": (), "audio": (), "modalities": (),
}  # fmt: skip


async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    fields = await read(request)
    service.check_ready()
    fields.refuse_beyond(UNSUPPORTED)
    prompts, texts = await _prompts(fields, service)
    echo, top = fields.flag("echo"), fields.whole("logprobs", 0, high=MOST_TOP)
    wish = from_openai(
        fields,
        default_max=DEFAULT_COMPLETION,
        lowest_max=0 if echo else 1,
        interval=service.streaming.interval,
        top_log_probs=top,
    )
    echoes = await _echoes(service, prompts, texts, wish, scored="logprobs" in fields) if echo else []
    form = _form(COMPLETION, fields, service, wish, log_probs="logprobs" in fields, echoes=echoes)
    return await _respond(request, service, fields, prompts, wish, form)


async def _prompts(fields: RequestBody, service: Service) -> tuple[list[list[int]], list[str] | None]:
    """Return the token ids of every prompt, and the texts if that is what was sent."""
    prompt, texts = fields.raw("prompt"), None
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompts = [fields.tokens("prompt", tokens) for tokens in prompt]
    elif isinstance(prompt, list) and prompt and not isinstance(prompt[0], str):
        prompts = [fields.tokens("prompt", prompt)]
    else:
        texts = fields.texts("prompt", max_count=MOST_ANSWERS)
        prompts = [await service.encoded(text) for text in texts]
    if not prompts:
        raise RequestError("prompt: is missing", field="prompt")
    return prompts, texts


async def _echoes(
    service: Service, prompts: list[list[int]], texts: list[str] | None, wish: GenerationRequest, *, scored: bool
) -> list[Echo]:
    """Return the prompts as they stand in front of their answers."""
    engine = service.thread.engine
    for prompt in prompts:  # before the model computes any
        check_prompt(prompt, wish.params, vocabulary=engine.vocabulary, max_context=engine.max_context)
    if texts is None:
        texts = [service.desk.detokenizers[wish.keep_special].decode(prompt) for prompt in prompts]
    begins = [0 if scored else None] * len(prompts)
    scores = await prompt_log_probs(service, prompts, begins, top=wish.top_log_probs)
    return list(map(Echo, texts, scores))


async def chat(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    fields = await read(request)
    service.check_ready()
    fields.refuse_beyond(UNSUPPORTED)
    messages = _messages(fields)
    tools, forced = _tools(fields)
    rendered = partial(
        render,
        Prompt(text=messages, tools=tools or None),
        service.served.tokenizer,
        template_kwargs=fields.object("chat_template_kwargs"),
    )
    tokens = await run_in_daemon_thread(rendered) if len(str(messages)) > LONG else rendered()
    log_probs, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, high=MOST_TOP)
    if top and not log_probs:
        raise fields.refuse("top_logprobs", "needs logprobs: true")
    longest = service.thread.engine.max_context
    wish = from_openai(fields, default_max=longest, interval=service.streaming.interval, top_log_probs=top)
    if forced is not None:
        wish = _forced(fields, service, wish, tools, forced)
    parser = _parser(fields, service, tokens, tools, wish)
    wish = replace(wish, keep_special=wish.keep_special or (parser is not None and parser.cut_ends))
    form = _form(CHAT, fields, service, wish, log_probs=log_probs, parser=parser)
    return await _respond(request, service, fields, [tokens], wish, form)


def _tools(fields: RequestBody) -> tuple[list[dict[str, Any]], str | None]:
    """Return the tools that the model may call, and the name of the one that it must call: "" is any, None is none."""
    tools, choice = fields.objects("tools") or [], fields.raw("tool_choice")
    if choice in (None, "auto", "none"):
        return [] if choice == "none" else tools, None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else "" if choice == "required" else None
    if not isinstance(name, str) or not tools:
        raise fields.refuse("tool_choice", 'is "auto", "none", or with tools "required" or the name of a function')
    return tools, name


def _forced(
    fields: RequestBody, service: Service, wish: GenerationRequest, tools: list[dict[str, Any]], name: str
) -> GenerationRequest:
    """Return the request with the grammar of a call of this tool, or of any for ""."""
    notation = format_of(service.served.tokenizer.chat_template).notation
    grammar = None if notation is None else notation.call_grammar(tools, name)
    if grammar is None:
        can_force = notation is not None and notation.arguments_key
        unforced = "cannot be forced: this model's chat template does not write calls as JSON objects"
        raise fields.refuse("tool_choice", f"{name[:60]!a} is none of the tools" if can_force else unforced)
    return replace(wish, params=replace(wish.params, grammar=grammar, min_tokens=0))


def _parser(
    fields: RequestBody, service: Service, tokens: list[int], tools: list[dict[str, Any]], wish: GenerationRequest
) -> ChatParser | None:
    """Return the parser of the answers to a chat; None where they are content alone."""
    tokenizer = service.served.tokenizer
    answer_format = format_of(tokenizer.chat_template)
    prompt_end = service.desk.detokenizers[True].decode(tokens[-PROMPT_END:])
    if wish.params.grammar is not None and prompt_end.rstrip().endswith(THINK):
        switch = 'the template may have a switch, as "chat_template_kwargs": {"enable_thinking": false}'
        field = "response_format" if "response_format" in fields else "tool_choice"
        raise fields.refuse(field, f"excludes reasoning, which the chat template has opened; {switch}")
    if not fields.flag("separate_reasoning", True):
        answer_format = replace(answer_format, reasons=False)
    if not tools:
        answer_format = replace(answer_format, notation=None)
    if answer_format == AnswerFormat():
        return None
    special = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
    cut_ends = not wish.keep_special and bool(special & set(answer_format.marks))
    return ChatParser(answer_format, tools, prompt_end, cut_ends)


def _messages(fields: RequestBody) -> list[dict[str, Any]]:
    """Return the messages as chat templates take them."""
    try:
        messages = normalized_chat(fields.objects("messages") or [])
    except MessageError as error:
        raise fields.refuse(error.field, error.reason) from None
    if not messages:
        raise RequestError("messages: is missing or empty", field="messages")
    is_continued = messages[-1]["role"] == "assistant"
    if fields.flag("continue_final_message", is_continued) != is_continued:
        reason = "must be true if the last message is the assistant's, and false otherwise"
        raise fields.refuse("continue_final_message", reason)
    return messages


def _form(
    kind: ApiKind,
    fields: RequestBody,
    service: Service,
    wish: GenerationRequest,
    *,
    log_probs: bool,
    echoes: Sequence[Echo] = (),
    parser: ChatParser | None = None,
) -> ResponseFormatter:
    return ResponseFormatter(
        kind,
        model=fields.text("model", longest=4096) or service.served.folder.name,
        n=wish.n,
        log_probs=log_probs,
        with_tokens=fields.flag("return_token_ids"),
        vocabulary=service.desk.vocabulary,
        echoes=echoes,
        parser=parser,
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
    await service.prepare_grammars([wish])
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

"""OpenAI's endpoints for completions and chats."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from aiohttp import web

from slimectl.chats.messages import MessageError
from slimectl.chats.requests import (
    DEFAULT_COMPLETION,
    MOST_ANSWERS,
    MOST_TOP,
    ChatRequest,
    GenerationRequest,
    RequestBody,
    from_openai,
    read_chat,
    read_completions,
)
from slimectl.chats.template import TEMPLATE_SETTING
from slimectl.data.answers import AnswerFormat, AnswerParser, format_of
from slimectl.data.chat import render
from slimectl.data.chat_responses import CHAT, COMPLETION
from slimectl.data.token_log_probs import TokenLogProb
from slimectl.data.tool_calls import CallNotation, schema_or_call
from slimectl.engines.limits import check_prompt
from slimectl.engines.server.engine_thread import run_in_daemon_thread
from slimectl.engines.server.errors import RequestError
from slimectl.engines.server.log_probs import prompt_log_probs
from slimectl.engines.server.openai_format import Echo, ResponseFormatter, Shown
from slimectl.engines.server.requests import RunningAnswer
from slimectl.engines.server.schema import read
from slimectl.engines.server.state import LONG, SERVICE, Service, dumped, stream_answers
from slimectl.errors import RecordError, SettingsError
from slimectl.rewards.thoughts import THINK
from slimectl.types import AllowedTokens, JsonGrammar, Prompt

PROMPT_END = 16
"""Number of last tokens of a rendered chat in which a template may open the reasoning."""


async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    fields = await read(request)
    service.check_ready()
    asks = read_completions(fields, most=MOST_ANSWERS, lowest_max=0 if fields.flag("echo") else 1)
    ask, shown, specials = asks[0], _shown(fields), fields.flag("add_special_tokens", True)
    generation = from_openai(fields, ask, default_max=DEFAULT_COMPLETION, interval=service.streaming.interval)
    given = [each.prompt or [] for each in asks]
    encoded = [await service.encoded(p, specials=specials) if isinstance(p, str) else p for p in given]
    prompts = [_truncated(fields, service, tokens) for tokens in encoded]
    scores = await _scores(service, prompts, generation, shown, is_echo_scored=ask.echo and ask.log_probs)
    echoes: list[Echo] = []
    if ask.echo:
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        if len(texts) < len(prompts) or prompts != encoded:
            texts = [service.requests.detokenizers[generation.keep_special].decode(prompt) for prompt in prompts]
        echoes = list(map(Echo, texts, scores if ask.log_probs else [()] * len(prompts)))
    form = ResponseFormatter(COMPLETION, ask, shown, service.requests.vocabulary, echoes=echoes, prompt_scores=scores)
    return await _respond(request, service, fields, prompts, generation, form)


def _truncated(fields: RequestBody, service: Service, tokens: list[int]) -> list[int]:
    """Return the part of a prompt that truncate_prompt_tokens keeps. -1 keeps as many tokens as fit the context."""
    limit = service.thread.engine.max_context - 1
    side = fields.choice("truncation_side", "left", ("left", "right"))
    count = fields.whole("truncate_prompt_tokens", len(tokens), low=-1)
    if count == 0:
        raise fields.refuse("truncate_prompt_tokens", "0 keeps no token of the prompt")
    count = min(limit if count == -1 else count, len(tokens))
    return tokens[:count] if side == "right" else tokens[len(tokens) - count :]


async def _scores(
    service: Service, prompts: list[list[int]], generation: GenerationRequest, shown: Shown, *, is_echo_scored: bool
) -> list[list[TokenLogProb]]:
    """Return the log-probabilities of the prompts that the response includes."""
    if not is_echo_scored and shown.prompt_tops is None:
        return [[] for _ in prompts]
    engine = service.thread.engine
    for prompt in prompts:  # before the model computes anything
        check_prompt(prompt, generation.params, vocabulary=engine.vocabulary, max_context=engine.max_context)
    # At least one, because ranks are computed only then.
    tops = [
        generation.top_log_probs if is_echo_scored else 0,
        0 if shown.prompt_tops is None else shown.prompt_tops or 1,
    ]
    return await prompt_log_probs(service, prompts, [0] * len(prompts), top=max(tops))


def _shown(fields: RequestBody) -> Shown:
    """Read which further parts the response shows. Raises MessageError for parts that do not fit a stream."""
    if "prompt_logprobs" in fields and fields.flag("stream"):
        raise fields.refuse("prompt_logprobs", "is not available in a stream. Leave out stream.")
    return Shown(
        token_ids=fields.flag("return_token_ids"),
        tokens_by_id=fields.flag("return_tokens_as_token_ids"),
        prompt_tops=fields.whole("prompt_logprobs", 0, high=MOST_TOP) if "prompt_logprobs" in fields else None,
        running_usage=fields.inner("stream_options").flag("continuous_usage_stats"),
    )


async def chat(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    fields = await read(request)
    service.check_ready()
    ask, longest = read_chat(fields), service.thread.engine.max_context
    generation = from_openai(fields, ask, default_max=longest, interval=service.streaming.interval)
    shown = _shown(fields)
    tokens = _truncated(fields, service, await _rendered(fields, service, ask))
    answer_format = format_of(service.served.tokenizer.chat_template)
    generation = _with_calls(answer_format.notation, generation, ask)
    parser, generation = _parser(fields, service, tokens, ask, generation, answer_format)
    scores = await _scores(service, [tokens], generation, shown, is_echo_scored=False)
    form = ResponseFormatter(CHAT, ask, shown, service.requests.vocabulary, prompt_scores=scores, parser=parser)
    return await _respond(request, service, fields, [tokens], generation, form)


async def _rendered(fields: RequestBody, service: Service, ask: ChatRequest) -> list[int]:
    """Render a chat with the model's template and the request's template arguments."""
    named = {name: fields.raw(name) for name in ("documents", "reasoning_effort") if fields.raw(name)}
    call = partial(
        render,
        Prompt(text=ask.messages, tools=ask.tools or None),
        service.served.tokenizer,
        template_kwargs={**ask.template_kwargs, **named},
        header=_header(fields, is_assistant_last=ask.messages[-1]["role"] == "assistant"),
    )
    try:
        return await run_in_daemon_thread(call) if len(str(ask.messages)) > LONG else call()
    except RecordError as error:
        raise fields.refuse("messages", str(error).removeprefix("prompt: ")) from None
    except SettingsError as error:
        name, _, reason = str(error).removeprefix(f"{TEMPLATE_SETTING}: ").partition(" ")
        raise fields.refuse(name if name in named else f"chat_template_kwargs.{name}", reason) from None


def _header(fields: RequestBody, *, is_assistant_last: bool) -> bool | None:
    """Return whether the header of a new turn follows the last message, or None if the model continues the message.

    Without either key, the model continues a last message of the assistant, as in rollouts. Otherwise the keys mean the
    same as in transformers, vLLM and SGLang.
    """
    has_header = fields.flag("add_generation_prompt", True)
    if fields.flag("continue_final_message"):
        if "add_generation_prompt" in fields and has_header:
            reason = "cannot be true together with add_generation_prompt. Set add_generation_prompt to false."
            raise fields.refuse("continue_final_message", reason)
        if not is_assistant_last:
            raise fields.refuse("continue_final_message", "requires a last message with the role assistant")
        return None
    is_explicit = "continue_final_message" in fields or "add_generation_prompt" in fields
    return has_header if is_explicit or not is_assistant_last else None


def _with_calls(notation: CallNotation | None, generation: GenerationRequest, ask: ChatRequest) -> GenerationRequest:
    """Add the grammar of a forced call, or of a call as an alternative to response_format."""
    schema, tools, forced = generation.params.grammar, ask.tools, ask.forced_tool
    if forced is None:
        if not tools or generation.restricted_by != "response_format" or not isinstance(schema, JsonGrammar):
            return generation
        return replace(generation, params=replace(generation.params, grammar=schema_or_call(schema, notation, tools)))
    grammar = None if notation is None else notation.call_grammar(tools, forced)
    if grammar is None:
        raise MessageError("tool_choice", "cannot be forced: the chat template does not write calls as JSON objects")
    if generation.restricted_by not in ("", "response_format"):  # which is about content, not calls
        raise MessageError("tool_choice", f"cannot be combined with {generation.restricted_by}. Set only one.")
    if generation.params.min_tokens:
        raise MessageError("min_tokens", "cannot be combined with tool_choice, which decides where a response may end")
    return replace(generation, params=replace(generation.params, grammar=grammar), restricted_by="tool_choice")


def _parser(
    fields: RequestBody,
    service: Service,
    tokens: list[int],
    ask: ChatRequest,
    generation: GenerationRequest,
    answer_format: AnswerFormat,
) -> tuple[AnswerParser | None, GenerationRequest]:
    """Return the parser of the responses to a chat, None if they are only content, and the request with its needs."""
    tokenizer = service.served.tokenizer
    prompt_end = service.requests.detokenizers[True].decode(tokens[-PROMPT_END:])
    grammar = generation.params.grammar
    if not isinstance(grammar, AllowedTokens | None) and prompt_end.rstrip().endswith(THINK):
        switch = 'The template may have a switch, such as "chat_template_kwargs": {"enable_thinking": false}'
        reason = f"cannot be combined with reasoning, which the chat template has opened. {switch}"
        raise fields.refuse(generation.restricted_by, reason)
    if not fields.flag("separate_reasoning", True):
        answer_format = replace(answer_format, reasons=False)
    if not ask.tools:
        answer_format = replace(answer_format, notation=None)
    if answer_format == AnswerFormat():
        return None, generation
    special = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
    ends: set[str] = set()
    if not generation.keep_special and special & set(answer_format.marks):  # kept for the parser, not for the client
        ends, generation = special - {"", *answer_format.marks}, replace(generation, keep_special=True)
    return AnswerParser(answer_format, ask.tools, prompt_end, ends, ask.single_call), generation


async def _respond(
    request: web.Request,
    service: Service,
    fields: RequestBody,
    prompts: list[list[int]],
    generation: GenerationRequest,
    form: ResponseFormatter,
) -> web.StreamResponse:
    if generation.n * len(prompts) > MOST_ANSWERS:
        raise RequestError(
            f"{generation.n * len(prompts)} responses in one request are too many. The maximum is {MOST_ANSWERS}.",
            field="n",
        )
    await service.prepare_grammars([generation])
    form.model = form.ask.model or service.served.folder.name
    rid = fields.text("rid", longest=256) or fields.text("request_id", longest=256) or form.rid
    rids = [rid] if len(prompts) == 1 else [f"{rid}_{i}" for i in range(len(prompts))]
    generations = [(prompt, generation) for prompt in prompts]
    with service.requests.ask(generations, rids, rid=rid) as pending:
        if not form.ask.stream:
            return web.json_response(form.whole(await pending.finished()), dumps=dumped)
        openings = form.openings(pending.answers)

        def chunks(answer: RunningAnswer) -> list[str]:
            # The openings only once there are tokens. Until then, an error can still be sent as an HTTP status.
            values = [*openings, *form.deltas(answer)]
            openings.clear()
            return list(map(dumped, values))

        stream = await stream_answers(request, pending, chunks)
        if form.ask.stream_usage and not stream.failed:
            await stream.send(dumped(form.last_chunk(pending.answers)))
    return await stream.end()

"""The embedded engine: requests, pauses, weight updates, and the loop that steps it."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimectl.architectures.image_tokens import MODEL_TYPES
from slimectl.data.images import Patches
from slimectl.engines.embedded.detokenizer import Detokenizer, StopScanner
from slimectl.engines.embedded.grammar import TokenGrammar, TokenSet, Vocabulary, token_table
from slimectl.engines.embedded.json_grammar import compiled
from slimectl.engines.embedded.model import EngineModel
from slimectl.engines.embedded.model_interface import SequenceModel
from slimectl.engines.embedded.runner import Runner, Stats, non_finite_error
from slimectl.engines.embedded.scheduler import RunningSequence
from slimectl.engines.embedded.token_scores import TokenScores
from slimectl.engines.embedded.weight_delta import Delta, check_delta, write_delta
from slimectl.engines.embedded.weight_loader import WeightLoader
from slimectl.engines.embedded.weights import FileTensor
from slimectl.engines.limits import check_ids, check_prompt, check_tokens
from slimectl.errors import BackendError, OutOfMemoryError, SettingsError
from slimectl.planner.devices import is_out_of_memory
from slimectl.protocols import OnTokens
from slimectl.system.liveness import note_progress
from slimectl.types import AllowedTokens, Completion, Grammar, ImageSource, SamplingParams

MOST_GRAMMARS = 8
"""Maximum number of grammars that an engine caches, with the masks of their states."""


UNLIMITED_CONTEXT = 32768
"""Default of max_context for a model whose configuration has no limit."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of an embedded engine."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    max_running: int = 64
    """Maximum responses that are generated at once."""

    max_context: int | None = None
    """Maximum tokens of prompt and response. None: the model's limit, or UNLIMITED_CONTEXT if it has none."""

    end_token_ids: Sequence[int] = ()
    """End tokens in addition to the model's and the tokenizer's."""

    prefix_cache_gib: float = 1.0
    """Maximum memory for earlier prompts and responses that later prompts may start with."""

    reports_experts: bool = False
    """Whether completions have the "routed_experts" of their tokens (data/routed_experts.py)."""

    compile_kernels: bool = True
    """Whether to use the kernels of native.py."""


REMEDY = "Lower rollout.max_response_len or engine.prefix_cache_gib, or free memory"


class EmbeddedEngine:
    """Generates text with weights that are loaded as a whole (`load_weights`) or in parts (`update_weights`).

    Memory for keys and values grows with the running sequences. `generate` may be called from successive event loops,
    and the loop that awaits it drives the engine. Another thread may load weights, which waits for the current step.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        options: EngineOptions = EngineOptions(),
        *,
        images: Callable[[ImageSource], Patches] | None = None,
        model: Callable[[Any, EngineOptions], SequenceModel] | None = None,
    ) -> None:
        """Create the engine. `images` prepares an image for a vision model. `model` builds another model than ours."""
        text_config = config.get_text_config()
        self.max_context = options.max_context or _context_of(text_config)
        self.device = options.device
        device = self._device = torch.device(options.device)
        self._model = (model or _own_model)(config, options)
        self._runner = Runner(
            self._model,
            max_running=options.max_running,
            max_context=self.max_context,
            prefix_cache_bytes=int(options.prefix_cache_gib * 2**30),
            device=device,
        )
        self._detokenizers = {skip: Detokenizer(tokenizer, keep_special=not skip) for skip in (True, False)}
        self._process_image = images if self._model.pictures is not None else None
        end_tokens = (
            _ids(getattr(text_config, "eos_token_id", None))
            | _ids(tokenizer.eos_token_id)
            | _ids(options.end_token_ids)
        )
        # A tokenizer may have more tokens than the model, which never samples the extra ones.
        self._end_tokens = frozenset(token for token in end_tokens if 0 <= token < self._model.vocabulary)
        self._tokenizer = tokenizer
        self._tokens: Vocabulary | None = None
        self._grammars: dict[Grammar, TokenGrammar] = {}
        self._grammar_lock = threading.Lock()
        self._intake = WeightLoader(self._model.weights)
        self._reports_experts = options.reports_experts
        self._pauses: dict[str, float] = {}  # reason -> start time
        self._loader_waits = False
        self._lock = threading.RLock()
        self._driver: asyncio.Task[None] | None = None

    @property
    def generated_tokens(self) -> int:
        """Number of tokens sampled since the engine was created."""
        return self.stats.decode_tokens

    @property
    def stats(self) -> Stats:
        return self._runner.stats

    @property
    def vocabulary(self) -> int:
        """Number of tokens for which the model has logits."""
        return self._model.vocabulary

    @property
    def weight_version(self) -> str:
        return self._intake.version

    @property
    def has_weights(self) -> bool:
        """Whether the weights are complete. A failed update leaves them incomplete."""
        return self._intake.whole

    @property
    def accepts(self) -> bool:
        """Whether requests may queue: the engine has weights, or had them when the current update began."""
        return self._intake.usable

    @property
    def paused(self) -> bool:
        return bool(self._pauses)

    @property
    def paused_since(self) -> float | None:
        """Start of the longest current pause (time.monotonic), or None."""
        return min(list(self._pauses.values()), default=None)

    @property
    def pause_reasons(self) -> list[str]:
        """Reasons for the current pauses."""
        return list(self._pauses)

    @property
    def running(self) -> int:
        return len(self._runner.scheduler.running)

    @property
    def waiting(self) -> int:
        return self._runner.scheduler.waiting

    async def generate(
        self,
        tokens: list[int],
        *,
        params: SamplingParams,
        images: Sequence[ImageSource] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Continue `tokens`, which contain the placeholder tokens of each of the `images`.

        Calls `on_tokens` with every new token. Raises SettingsError if the prompt leaves no room in the context, and
        BackendError if the engine has no weights.
        """
        if params.grammar is not None:
            await asyncio.to_thread(self.grammar, params.grammar)
        sequence = self.request(tokens, params, images=images)
        if on_tokens is not None:
            sequence.follow(on_tokens)
        self.submit(sequence)
        try:
            return await sequence.future
        except asyncio.CancelledError:
            sequence.finish = "abort"
            raise

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self._model.expert_choices > 0

    @property
    def reads_images(self) -> bool:
        """Whether `generate` accepts images."""
        return self._process_image is not None

    def request(
        self,
        tokens: list[int],
        params: SamplingParams,
        *,
        top_count: int = 0,
        images: Sequence[ImageSource] = (),
        reports_experts: bool | None = None,
    ) -> RunningSequence:
        """Create the sequence of a request, to be awaited in the running event loop. Raises SettingsError.

        The default of `reports_experts` is the engine's setting.
        """
        vocabulary = self.vocabulary
        check_prompt(tokens, params, vocabulary=vocabulary, max_context=self.max_context)
        patches: Sequence[Patches] = [self._patches(image) for image in images]
        prompt, rope_shift = tuple(tokens), 0
        if (pictures := self._model.pictures) is not None and patches:
            patches = pictures.shared(patches)
            prompt, rope_shift = pictures.marked(tokens, patches)
        end_tokens = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_tokens)
        if params.min_tokens and len(end_tokens) >= vocabulary:
            raise SettingsError("min_tokens: every token is a stop token, so a response has one token. Set it to 0.")
        detokenizer = self._detokenizers[params.skip_special_tokens]
        return RunningSequence(
            prompt=prompt,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed % 2**63,
            limit=min(params.max_tokens, self.max_context - len(tokens)),
            end_tokens=end_tokens,
            future=asyncio.get_running_loop().create_future(),
            scanner=StopScanner(detokenizer, params.stop) if params.stop else None,
            top_count=top_count or params.top_log_probs,
            grammar=None if params.grammar is None else self.grammar(params.grammar).state(sorted(end_tokens)),
            reports_experts=self._reports_experts if reports_experts is None else reports_experts,
            images=tuple(patches),
            rope_shift=rope_shift,
        )

    def _patches(self, image: ImageSource) -> Patches:
        if self._process_image is None:
            raise SettingsError(f"engine: this model does not read images. Use one of {', '.join(MODEL_TYPES)}")
        return self._process_image(image)

    def grammar(self, grammar: Grammar) -> TokenGrammar | TokenSet:
        """Compile a grammar for this model's tokens. Raises SettingsError if the grammar is not supported.

        With a large vocabulary the first call takes about a second. Recent grammars are cached. Thread-safe.
        """
        if isinstance(grammar, AllowedTokens):
            check_ids("allowed_token_ids", grammar.tokens, vocabulary=self._model.vocabulary)
            return TokenSet(grammar.tokens, size=self._model.vocabulary, device=self._device)
        with self._grammar_lock:
            if grammar not in self._grammars:
                node = compiled(grammar)
                if self._tokens is None:
                    self._tokens = token_table(self._tokenizer, size=self._model.vocabulary, device=self._device)
                while len(self._grammars) >= MOST_GRAMMARS:
                    del self._grammars[next(iter(self._grammars))]
                self._grammars[grammar] = TokenGrammar(node, self._tokens)
            return self._grammars[grammar]

    def submit(self, sequence: RunningSequence) -> None:
        """Queue a sequence, and drive the engine in the running event loop.

        Raises BackendError if the engine has no weights.
        """
        with self._lock:
            if not self._intake.usable:
                raise BackendError("the embedded engine has no weights. Call load_weights before generate.")
            if sequence.limit:
                self._runner.scheduler.add(sequence)
        if not sequence.limit:  # nothing to generate
            sequence.finish = "length"
            self._deliver(sequence)
        self._ensure_driver()

    def scores(self, sequences: Sequence[Sequence[int]], starts: Sequence[int], *, top: int = 0) -> list[TokenScores]:
        """Compute log p(token) at temperature 1 for the tokens after position `start` of each sequence, in one pass.

        With `top`, also return the `top` likeliest tokens at each position. Raises SettingsError for a sequence that
        the model cannot read, and BackendError if the engine has no weights.
        """
        for tokens in sequences:
            check_tokens(tokens, vocabulary=self._model.vocabulary, max_tokens=self.max_context)
        with self._lock, torch.inference_mode():
            if not self._intake.whole:
                raise BackendError(
                    "the embedded engine has incomplete weights. Load them, or wait until the update ends."
                )
            values = self._model.sequence_scores([tuple(tokens) for tokens in sequences], list(starts), top=top)
        if not all(map(math.isfinite, itertools.chain.from_iterable(score.log_probs for score in values))):
            raise non_finite_error(self.weight_version)
        return values

    async def abort(self) -> None:
        """End every request in flight. Each returns its tokens so far with finish "abort"."""
        self.end_all()

    def end_all(self) -> None:
        with self._lock:
            ended = self._runner.clear()
        for sequence in ended:
            self.end(sequence)

    def end(self, sequence: RunningSequence) -> None:
        """End one request, which returns its tokens so far. Call it in the event loop that drives the engine."""
        sequence.finish = sequence.finish or "abort"
        self._deliver(sequence)

    async def close(self) -> None:
        """Abort all requests and free the cache memory. The engine can be used again."""
        await self.abort()
        self.free()

    def pause(self, reason: str, *, retract: bool = False) -> None:
        """Stop stepping until `resume(reason)`. Running sequences keep their keys and values unless `retract`."""
        self._pauses.setdefault(reason, time.monotonic())
        if retract:
            with self._lock:
                self._runner.retract()

    def resume(self, reason: str) -> None:
        """End the pause for this reason. Call it in the event loop that is to drive the engine."""
        self._pauses.pop(reason, None)
        self._ensure_driver()

    def free(self) -> None:
        """Free the cache memory. Running sequences are recomputed later."""
        with self._lock:
            self._runner.retract()
            self._runner.free()

    @property
    def prefix_cache_bytes(self) -> int:
        """Size in bytes of the keys and values cached for later prompts."""
        return self._runner.tree.bytes

    def forget_prefixes(self) -> None:
        """Discard the cached keys and values of finished requests."""
        with self._lock:
            self._runner.forget_prefixes()

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: str) -> None:
        """Replace all weights in place, by Hugging Face name.

        Raises CheckpointError for a missing, extra or misshapen tensor. Responses in flight continue with the new
        weights but keep the keys and values computed with the old ones.
        """
        self._apply_weights(lambda: self._intake.load(tensors, version=version))

    def update_weights(self, tensors: Iterable[tuple[str, Tensor | FileTensor]], *, version: str | None = None) -> None:
        """Replace some tensors atomically. Raises CheckpointError for an extra or misshapen one."""
        self._apply_weights(lambda: self._intake.update(list(tensors), version=version))

    def replace_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: str) -> None:
        """Replace some tensors as they arrive. As with `load_weights`, an error leaves the engine without weights."""
        self._apply_weights(lambda: self._intake.replace(tensors, version=version))

    def apply_delta(self, delta: Delta, *, version: str) -> None:
        """Change the weights in place from the delta's first version to `version`.

        Raises CheckpointError if the delta does not fit. If only the checksum shows this, the weights have already
        changed, and the engine is unusable until all weights are loaded again.
        """

        def change() -> None:
            slots = check_delta(self._model.weights, delta)
            self._intake.change(lambda: write_delta(slots, delta), start=delta.start, version=version)

        self._apply_weights(change)

    def begin_update(self) -> None:
        """Open an update session. All tensors until `end_update` are one version, and generation pauses until then."""
        self._apply_weights(self._intake.begin)
        self.pause("update")

    def end_update(self) -> None:
        """Close the session. Raises CheckpointError if tensors are missing, which leaves the engine without weights."""
        try:
            self._apply_weights(self._intake.end)
        finally:
            self.resume("update")

    def checksums(self, checksum: Callable[[Tensor], str]) -> dict[str, str]:
        """Return the checksum of every tensor as stored."""
        with self._lock:
            return {name: checksum(tensor) for name, tensor in self._model.weights.tensors()}

    def _apply_weights(self, intake: Callable[[], None]) -> None:
        self._loader_waits = True
        with self._lock:
            self._loader_waits = False
            self._runner.forget_prefixes()
            intake()

    def _ensure_driver(self) -> None:
        """Start the driver in the running event loop, unless it runs there already."""
        if self._pauses or not self._runner.scheduler.has_work():
            return
        loop = asyncio.get_running_loop()
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._drive())

    async def _drive(self) -> None:
        """Step while there is work. Other tasks of the event loop run between steps."""
        while self._runner.scheduler.has_work() and not self._pauses:
            try:
                with self._lock:
                    finished = self._step()
            except Exception as error:
                with self._lock:
                    if is_out_of_memory(error):
                        if self._runner.halve():
                            continue
                        error = OutOfMemoryError(f"out of memory in the embedded engine with one response. {REMEDY}")
                    failed = self._runner.clear()
                    self._runner.forget_prefixes()
                for sequence in failed:
                    sequence.fail(error)
                return
            for sequence in finished:
                self._deliver(sequence)
            # Locks are not fair: without a sleep the loop would take this one again before a waiting thread wakes up.
            await asyncio.sleep(0.001 if self._loader_waits else 0)

    def _step(self) -> list[RunningSequence]:
        if not self._intake.whole:
            raise BackendError("the embedded engine lost its weights in a failed update. Load all weights again.")
        note_progress()
        return self._runner.step(self._intake.version)

    def _deliver(self, sequence: RunningSequence) -> None:
        scanner = sequence.scanner
        if sequence.error is not None:
            sequence.fail(sequence.error)
        elif scanner is not None and scanner.matched:
            sequence.deliver(scanner.text)
        else:
            skip, ended = sequence.params.skip_special_tokens, sequence.finish == "stop"
            text = self._detokenizers[skip].response_text(sequence.tokens, keep_special=not skip, ended=ended)
            sequence.deliver(text)


def _own_model(config: Any, options: EngineOptions) -> SequenceModel:
    device = torch.device(options.device)
    return EngineModel(config, dtype=options.dtype, device=device, compile_kernels=options.compile_kernels)


def _context_of(text_config: Any) -> int:
    """Return the model's context limit, or UNLIMITED_CONTEXT for a model without one, such as mamba."""
    limits = (getattr(text_config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((int(limit) for limit in limits if limit), UNLIMITED_CONTEXT)


def _ids(ids: int | Sequence[int] | None) -> frozenset[int]:
    """Return one token id, several or None as a set."""
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)

"""Scheduler: queue of waiting sequences, and running sequences in slots of the cache."""

from __future__ import annotations

from collections import Counter, deque

from slimectl.engines.embedded.sequence import Sequence


class Scheduler:
    """Admits sequences first come, first served; running sequences fill slots 0, 1, 2 … without gaps.

    `max_prefill` bounds the padded area (prompts times the longest) of one prefill, unless a single prompt is larger.
    """

    def __init__(self, *, max_running: int, max_prefill: int = 8192) -> None:
        self.max_running = max_running
        self.max_prefill = max_prefill
        self.running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._waiting_for: Counter[tuple[int, ...]] = Counter()

    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self._waiting_for[sequence.prefix] += 1

    def awaits(self, prompt: tuple[int, ...]) -> bool:
        """Whether a sibling of this prompt has not been admitted yet."""
        return prompt in self._waiting_for

    def admit(self) -> dict[tuple[int, ...], list[Sequence]]:
        """Move sequences from the queue into the free slots, siblings side by side, and return them by prompt."""
        admitted: dict[tuple[int, ...], list[Sequence]] = {}
        free = self.max_running - len(self.running)
        longest = 0
        while self._waiting and free:
            prompt = self._waiting[0].prefix
            longest = max(longest, len(prompt))
            if admitted and prompt not in admitted and (len(admitted) + 1) * longest > self.max_prefill:
                break
            sequence = self._next()
            if not sequence.finish:  # else its task was cancelled while it waited
                admitted.setdefault(prompt, []).append(sequence)
                free -= 1
        for siblings in admitted.values():
            self.running.extend(siblings)
        return admitted

    def upcoming(self, prompts: list[tuple[int, ...]], *, tokens: int) -> list[tuple[int, ...]]:
        """Return prompts next in the queue, as many as fit with `prompts` into a padded area of `tokens`."""
        longest, ahead = max(map(len, prompts)), dict.fromkeys(prompts)
        for sequence in self._waiting:
            longest = max(longest, len(sequence.prefix))
            if (len(ahead) + 1) * longest > tokens:
                break
            ahead[sequence.prefix] = None
        return list(ahead)[len(prompts) :]

    def retire(self) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """Drop finished sequences; the last ones move into their slots. Returns (finished, moves from slot to slot)."""
        finished = [sequence for sequence in self.running if sequence.finish]
        if not finished:
            return [], []
        remaining = len(self.running) - len(finished)
        targets = [slot for slot in range(remaining) if self.running[slot].finish]
        sources = [slot for slot in range(remaining, len(self.running)) if not self.running[slot].finish]
        moves = list(zip(sources, targets, strict=True))
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[remaining:]
        return finished, moves

    def retract(self) -> None:
        """Put running sequences back in front of the queue: prompt and answer so far will be recomputed."""
        for sequence in reversed(self.running):
            if not sequence.finish:
                sequence.prefix = (*sequence.prompt, *sequence.tokens)
                self._waiting.appendleft(sequence)
                self._waiting_for[sequence.prefix] += 1
        self.running.clear()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def clear(self) -> list[Sequence]:
        """Drop all waiting and running sequences, and return them."""
        dropped = [*self.running, *self._waiting]
        self.running.clear()
        self._waiting.clear()
        self._waiting_for.clear()
        return dropped

    def _next(self) -> Sequence:
        sequence = self._waiting.popleft()
        self._waiting_for[sequence.prefix] -= 1
        if not self._waiting_for[sequence.prefix]:
            del self._waiting_for[sequence.prefix]
        return sequence

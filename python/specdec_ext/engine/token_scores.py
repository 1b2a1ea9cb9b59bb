"""What a request wants to know of its tokens' scores: log-probabilities, or the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..request.sampling_params import SamplingParams
from ..text.outputs import Logprob

__all__ = ["TokenScores"]


class TokenScores:
    """One request's. Guarded by its lock; save() and restore() undo a change that was interrupted.

    logprobs         an entry per token; None: nobody wants them
    prompt_logprobs  an entry per prompt token that was read, None for the first; None: as above
    cumulative       the sum of the tokens' log-probabilities
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        token_text: Callable[[int], str] | None,
    ) -> None:
        self.logprobs: list[dict[int, Logprob]] | None = [] if params.logprobs is not None else None
        # The first token has nothing before it.
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            [None] if params.prompt_logprobs is not None else None
        )
        self.cumulative = 0.0
        self._logits: dict[int, Any] = {}  # [tokens of a step, vocabulary], by the first's index
        self._prompt_token_ids = prompt_token_ids
        self._token_text = token_text

    def add(self, token: int, entry: Any) -> None:
        """A token's entry: its log-probability, its rank, the best tokens with theirs."""
        assert self.logprobs is not None
        self.logprobs.append(self._row(token, entry))
        self.cumulative += entry[0]

    def add_prompt(self, entries: Iterable[Any]) -> None:
        """The same of the prompt tokens that were read next."""
        assert self.prompt_logprobs is not None
        for entry in entries:
            token = self._prompt_token_ids[len(self.prompt_logprobs)]
            self.prompt_logprobs.append(self._row(token, entry))

    def add_logits(self, first: int, rows: Any) -> None:
        """rows [tokens, vocabulary] of the tokens from number `first` on."""
        self._logits[first] = rows

    def logits(self, count: int) -> Any:
        """[tokens, vocabulary] of the first `count` tokens, or None. Rows after a stop string go
        as their tokens do."""
        parts = list(self._logits.values())
        if not parts:
            return None
        if len(parts) > 1:
            rows = parts[0].new_empty(sum(len(part) for part in parts), parts[0].shape[1])
            begin = 0
            for part in parts:
                rows[begin : begin + len(part)] = part
                begin += len(part)
            self._logits = {0: rows}
        return self._logits[0][:count]

    def save(self) -> tuple[Any, ...]:
        """Where it stands, for restore()."""
        return (
            None if self.logprobs is None else len(self.logprobs),
            None if self.prompt_logprobs is None else len(self.prompt_logprobs),
            self.cumulative,
        )

    def restore(self, saved: tuple[Any, ...], tokens: int) -> None:
        """Be as it was, when there were `tokens` tokens."""
        count, prompt_count, self.cumulative = saved
        if self.logprobs is not None:
            del self.logprobs[count:]
        if self.prompt_logprobs is not None:
            del self.prompt_logprobs[prompt_count:]
        if self._logits:
            self._logits = {first: rows for first, rows in self._logits.items() if first < tokens}

    def _row(self, token: int, entry: Any) -> dict[int, Logprob]:
        chosen, rank, best = entry
        text = self._token_text

        def make(token_id: int, logprob: float, token_rank: int) -> Logprob:
            return Logprob(logprob, token_rank, text(token_id) if text is not None else None)

        row = {token: make(token, chosen, rank)}
        for i, (token_id, logprob) in enumerate(best):
            row.setdefault(token_id, make(token_id, logprob, i + 1))
        return row

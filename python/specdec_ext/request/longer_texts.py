"""What a refusal advises where a text is too long for the engine."""

from __future__ import annotations

__all__ = ["how_to_fit"]


def how_to_fit(max_seq_len: int, max_position: int | None) -> str:
    """The end of an advice to shorten a text: what else there is, which is nothing at the model's
    own limit.

    max_position  positions of the model; None: they are not known
    """
    if max_position is not None and max_seq_len >= max_position:
        return ": the model itself has no more positions"
    return ", or raise SchedulerConfig.max_seq_len or KvCacheConfig.max_tokens"

"""The parts of one staged step, as views of its words (cpp/engine/staging.h)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import ops

__all__ = ["StagedWords"]


class StagedWords:
    """words  [layout.words] int32 of a step, on the host or the device
    kinds  numpy or torch: whose array `words` is
    """

    words: Any

    def __init__(self, layout: Any, kinds: Any = np) -> None:
        self.layout, self._kinds = layout, kinds

    def part(self, offset: int, count: int) -> Any:
        """`count` words from `offset` on."""
        return self.words[offset : offset + count]

    def page_table(self, requests: int) -> Any:
        """[requests, pages_per_request] int32, -1 after the pages that are held."""
        pages = self.layout.pages_per_request
        return self.part(self.layout.page_table, requests * pages).reshape(requests, pages)

    def narrow_tables(self, requests: int) -> tuple[Any, ...]:
        """The same of the pages' parts, by narrow window."""
        pages = self.layout.pages_per_request
        each = self.layout.requests * pages
        return tuple(
            self.part(self.layout.narrow_tables + window * each, requests * pages).reshape(
                requests, pages
            )
            for window in range(self.layout.narrow)
        )

    def laws(self, requests: int, first: int = 0) -> ops.SamplingLaws:
        """The laws of so many requests from `first` on."""
        layout = self.layout

        def floats(offset: int) -> Any:
            return self.part(offset + first, requests).view(self._kinds.float32)

        return ops.SamplingLaws(
            temperature=floats(layout.temperature),
            top_k=self.part(layout.top_k + first, requests),
            top_p=floats(layout.top_p),
            min_p=floats(layout.min_p),
            seed=self.part(layout.seed + 2 * first, 2 * requests).view(self._kinds.int64),
        )

    def rules(self, requests: int) -> dict[str, Any]:
        """The acceptance rules of so many requests, as ``accept_step`` takes them."""
        layout = self.layout

        def floats(offset: int) -> Any:
            return self.part(offset, requests).view(self._kinds.float32)

        rules = self.part(layout.acceptance, -(-requests // 4)).view(self._kinds.uint8)
        return {
            "acceptance": rules[:requests],
            "posterior_threshold": floats(layout.posterior_threshold),
            "posterior_alpha": floats(layout.posterior_alpha),
            "acceptance_threshold": floats(layout.acceptance_threshold),
        }

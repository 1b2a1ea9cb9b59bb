"""What the configurations of Python drafters have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..config_base import SpeculationOptions
from ..errors import RequestError

if TYPE_CHECKING:
    from ..sampling_params import SamplingParams

__all__ = ["DrafterConfig"]


@dataclass(frozen=True)
class DrafterConfig(SpeculationOptions):
    """Base of the methods whose drafts come from Python: a draft model, heads, a user's drafter.

    Subclasses have `max_draft_len` (nodes of one step besides the golden token, 1..127) and
    `max_draft_path_len` (the most that one step can accept), as fields or properties, and
    `adaptive`.
    """

    method: ClassVar[str] = ""
    # Other projects' spellings of the fields, and the words for this method in messages.
    aliases: ClassVar[Mapping[str, str]] = {}
    words: ClassVar[str] = ""

    if TYPE_CHECKING:  # fields of the subclasses

        @property
        def adaptive(self) -> bool: ...
        @property
        def max_draft_path_len(self) -> int: ...

    @property
    def longest_path_len(self) -> int:
        """As max_draft_path_len, of the request whose drafts go deepest."""
        return self.max_draft_path_len

    @property
    def host_only(self) -> str | None:
        """Why its drafts cannot be made by steps that run ahead, in words; None: they can."""
        return (
            f"drafts of method {self.method!r} are made on the host from the results of the step "
            "before"
        )

    def with_defaults(self, params: SamplingParams) -> SamplingParams:
        """The request, with what this configuration sets for requests that leave it open."""
        return params

    @classmethod
    def normalize_keys(cls, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """`values` as read from a dict or file, less the keys that mean more than another name."""
        return dict(values)

    def request_kwargs(self, params: SamplingParams) -> tuple[dict[str, Any], int, dict[str, Any]]:
        """(Executor.submit's keywords, drafts on the deepest path, the drafter's options).

        A method with request parameters of its own overrides this. Raises RequestError.
        """
        if params.lookahead_config is not None:
            raise RequestError(
                f"SamplingParams.lookahead_config = {params.lookahead_config.wng}: this engine "
                f"decodes with {self.words}; set max_draft_len instead"
            )
        if params.medusa_choices is not None and self.method != "medusa":
            raise RequestError(
                f"SamplingParams.medusa_choices: this engine decodes with {self.words}; remove it"
            )
        limit = self.max_draft_len
        length = limit if params.max_draft_len is None else params.max_draft_len
        if length > limit:
            raise RequestError(
                f"SamplingParams.max_draft_len = {length} is greater than the engine's {limit}; "
                "lower it, or build the LLM with a larger max_draft_len"
            )
        if length == 0:
            return {"speculative": False}, 0, {}
        return (
            {"speculative": True, "max_draft_len": length},
            min(length, self.max_draft_path_len),
            {},
        )

"""Fields that the endpoints have in common, and the table of those that ask for nothing here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from ...config.validate import show
from ..errors import ApiError

__all__ = ["OFF", "Choosing", "Sampled", "StreamOptions", "Strict"]

# Fields of the OpenAI schemas that this server can only leave off -> (the values that ask for
# nothing, why others are refused). A field that comes to be served leaves this table.
_NO_TOOLS = "this endpoint calls no tools; /v1/chat/completions takes `tools`"
_OLD_TOOLS = "give the functions as `tools` and `tool_choice`, which have replaced it"
_OLD_FORMS = 'give it as structured_outputs = {{"{}": ...}}, which has replaced it'
_NO_STORE = "this server stores nothing"
_TEXT_ONLY = "the model reads and writes text only"
OFF: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "access_programs": ((None,), "not known to this server"),
    "audio": ((None,), _TEXT_ONLY),
    "background": ((None, False), _NO_STORE),
    "best_of": ((None, 1), "outputs are not ranked; ask for n outputs and choose among them"),
    "background_options": ((None,), _NO_STORE),
    "context_management": ((None, []), "a conversation is never shortened"),
    "conversation": ((None,), _NO_STORE),
    "detokenize": ((None, True), "an answer is a text; return_token_ids brings its tokens, too"),
    "function_call": ((None, "none"), _OLD_TOOLS),
    "functions": ((None, []), _OLD_TOOLS),
    "guided_choice": ((None,), _OLD_FORMS.format("choice")),
    "guided_grammar": ((None,), _OLD_FORMS.format("grammar")),
    "guided_json": ((None,), _OLD_FORMS.format("json")),
    "guided_regex": ((None,), _OLD_FORMS.format("regex")),
    "image": ((None,), _TEXT_ONLY),
    "max_tool_calls": ((None,), _NO_TOOLS),
    "modalities": ((None, ["text"]), _TEXT_ONLY),
    "moderation": ((None,), "this server does not judge texts"),
    "previous_response_id": ((None,), _NO_STORE + "; send the conversation as input"),
    "prompt_cache_options": ((None, {}), "cached prompts are kept as long as there is room"),
    "prompt_cache_retention": ((None,), "cached prompts are kept as long as there is room"),
    "prompt_template": ((None,), _NO_STORE),
    "reasoning": ((None, {}), "how the model reasons cannot be chosen"),
    "reasoning_effort": ((None, "none"), "how the model reasons cannot be chosen"),
    "service_tier": ((None, "auto", "default"), "there is one tier"),
    "store": ((None, False), _NO_STORE),
    "suffix": ((None, ""), "a text in the middle cannot be filled in"),
    "tool_choice": ((None, "none", "auto"), _NO_TOOLS),
    "tools": ((None, []), _NO_TOOLS),
    "truncation": ((None, "disabled"), "a conversation is never shortened"),
    "verbosity": ((None, "medium"), "how much the model writes is max_tokens"),
    "web_search_options": ((None,), "this server searches nothing"),
}


class Strict(BaseModel):
    """No field that is not declared, no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """include_usage: a last chunk without choices that carries `usage` and `metrics`;
    continuous_usage_stats (vLLM's): `usage` so far in the other chunks, too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(Strict):
    """What every endpoint that generates text takes; null is a field's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    # They say who asks or where to look first, which changes nothing here.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    speculative_config: Any = None
    structured_outputs: Any = None
    detokenize: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    # Ours: where each token of the answer came from, and what every step drafted and accepted.
    include_token_sources: bool | None = None
    include_steps: bool | None = None

    names_of_off_fields: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> Sampled:
        for name in type(self).model_fields:
            values, why = OFF.get(self.names_of_off_fields.get(name, name), ((), ""))
            value = getattr(self, name)
            if values and not any(value == off and type(value) is type(off) for off in values):
                raise ApiError(
                    400, f"{name} = {show(value)} is not supported: {why}; leave it out", param=name
                )
        options = self.stream_options
        if options is not None and not self.stream:
            raise ApiError(
                400, "stream_options needs stream = true; leave it out", param="stream_options"
            )
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise ApiError(
                400, "stream_options.continuous_usage_stats needs include_usage = true; set it, "
                "or leave both out", param="stream_options.continuous_usage_stats",
            )  # fmt: skip
        if options is not None and options.include_obfuscation:
            raise ApiError(
                400, "stream_options.include_obfuscation = true is not supported; leave it out",
                param="stream_options.include_obfuscation",
            )  # fmt: skip
        return self

    @property
    def names(self) -> Mapping[str, str]:
        """What the request calls otherwise than SamplingParams, and where its prompt stands."""
        return {"prompt": "prompt"}

    @property
    def wants_steps(self) -> bool:
        """The answer says how it came about."""
        return bool(self.include_token_sources or self.include_steps)

    @property
    def with_usage(self) -> bool:
        """A stream ends with a chunk of `usage`."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        """Chunks with something new say how many tokens there are by then."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class Choosing(Sampled):
    """The older endpoints' fields: several choices, stops, penalties."""

    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: Any = None
    return_token_ids: bool | None = None

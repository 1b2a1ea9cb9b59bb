"""What the endpoints work with: the model, its names, its queue, and one way to submit."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from fastapi import Request

from ..config.sources import CompositeDecodingConfig
from ..config.validate import show
from ..errors import RequestError
from ..llm import LLM
from ..request.structured_outputs import FIELD, StructuredOutputs
from ..text.detokenizer import Detokenizer, DetokenizerFactory
from .bridge import Bridge, PromptSource, Running
from .constraints import constraint, refusal_of
from .errors import ApiError, api_error
from .keys import ApiKeys
from .prometheus import ServerMetrics
from .sampling import sampling_params
from .schema.common import Sampled
from .settings import ServerSettings
from .tool_format import ToolFormat, format_of, writes_calls

__all__ = ["Serving", "serving_of"]


class Serving:
    """One model behind one server."""

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.keys = ApiKeys(settings.api_keys)
        self.metrics = ServerMetrics(llm, settings.served_model_names[0])
        self.bridge = Bridge(llm, settings, self.metrics.observe)
        self.created = int(time.time())
        self._detokenizers: DetokenizerFactory | None = None
        # Once somebody has asked
        self._tool_format: tuple[ToolFormat | None] | None = None
        self._writes_calls: bool | None = None
        if llm.tokenizer is not None:
            self._detokenizers = DetokenizerFactory(llm.tokenizer)

    @property
    def method(self) -> str | None:
        """The engine's method of drafting, or its sources; None: it decodes plainly."""
        config = self.llm.speculative_config
        if isinstance(config, CompositeDecodingConfig):
            return " + ".join(source.method for source in config.sources)
        return config.method if config is not None else None

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token, where the tokenizer has such."""
        return None if self._detokenizers is None else self._detokenizers.token_bytes(token_id)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer | None:
        """A decoder for the tokens of one text; None: the model has no tokenizer."""
        return None if self._detokenizers is None else self._detokenizers.make(skip_special_tokens)

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """The texts of the tokenizer's special tokens, by their ids."""
        return {} if self._detokenizers is None else self._detokenizers.special_tokens

    async def tool_format(self) -> ToolFormat | None:
        """How the model's template writes calls of functions; None: not in a way known here."""
        if self._tool_format is None:
            llm = self.llm
            found = await self.bridge.in_thread(format_of, llm.prompts, llm.tokenizer)
            self._tool_format = (found,)
        return self._tool_format[0]

    async def writes_calls(self) -> bool:
        """The model's template writes calls of earlier answers, in whatever form."""
        if self._writes_calls is None:
            self._writes_calls = await self.bridge.in_thread(writes_calls, self.llm.prompts)
        return self._writes_calls

    def model_name(self, asked: str | None) -> str:
        """The name that an answer carries. Raises ApiError for a model that is not here."""
        names = self.settings.served_model_names
        if asked is None:
            return names[0]
        if asked not in names:
            raise ApiError(
                404, f"model = {show(asked)}: there is no such model here; use "
                f"{', '.join(map(show, names))}", param="model", code="model_not_found",
            )  # fmt: skip
        return asked

    async def submit(
        self,
        request: Request,
        body: Sampled,
        sources: Sequence[PromptSource],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        form: tuple[StructuredOutputs | None, str] | None = None,
    ) -> list[Running]:
        """One running request per prompt. Raises ApiError, RequestError.

        form  that the answer must have, and the field that asks for it; None: as `body` says
        """
        if form is None:
            form = constraint(getattr(body, "response_format", None), body.structured_outputs)
        wanted, field = form
        try:
            params = sampling_params(
                body,
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                cache_salt=self.keys.cache_salt(request.state.tenant, body.cache_salt),
                default_temperature=self.settings.default_temperature,
                structured_outputs=wanted,
            )
            return await self.bridge.start(
                sources, params, request_id=request.state.request_id, form=field
            )
        except RequestError as error:
            if str(error).startswith(FIELD):
                raise refusal_of(error, field) from None
            raise api_error(error, body.names) from None


def serving_of(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving

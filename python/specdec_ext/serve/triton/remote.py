"""An engine behind Triton, as the external loops of specdec_ext.orchestrate use one.

RemoteLLM has what they need of an LLM: limits to check requests against, a tokenizer, generate().
How a request gets to the server is a function, so that BLS and clients over gRPC are the same here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...config.engine import KvCacheConfig
from ...request.resolve import EngineLimits, ResolvedRequest, resolve_request
from ...request.sampling_params import SamplingParams
from ...text.outputs import CompletionOutput, Logprob, RequestOutput
from ...text.prompts import PromptReader
from .tensors import row, write_params

__all__ = ["RemoteError", "RemoteLLM", "Transport"]

# Sends one request; gives the tensors of each part of its answer. Raises RemoteError.
Transport = Callable[[Mapping[str, np.ndarray]], Iterable[Mapping[str, np.ndarray]]]


class RemoteError(Exception):
    """What the server has answered instead."""


@dataclass(frozen=True)
class _Engine:
    limits: EngineLimits
    numerics: str
    tokenizer: Any

    def resolve(self, ids: Sequence[int], params: SamplingParams) -> ResolvedRequest:
        return resolve_request(ids, params, self.limits, self.tokenizer)


class RemoteLLM:
    """The model `specdec` or `specdec_draft` of a server.

    send       how requests get there
    tokenizer  for prompts, stop strings and text; None: token ids only
    """

    def __init__(self, send: Transport, tokenizer: Any = None) -> None:
        self._send = send
        about = self.describe()
        eos = tuple(about["limits"].pop("eos_token_ids"))
        limits = EngineLimits(**about["limits"], eos_token_ids=eos, speculative_config=None)
        self.tokenizer = tokenizer
        self.engine = _Engine(limits, about["numerics"], tokenizer)
        self.model = SimpleNamespace(vocab_size=limits.vocab_size, impl=about["model_impl"])
        self.kv_cache_config = KvCacheConfig(enable_block_reuse=about["enable_block_reuse"])
        self.prompts = PromptReader(tokenizer, limits.max_seq_len, limits.max_position)

    def describe(self) -> dict[str, Any]:
        """The engine's limits and metrics, now."""
        (answer,) = self._send({"describe": row(True, np.bool_)})
        described: dict[str, Any] = _report(answer)
        return described

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: Any = False
    ) -> list[RequestOutput]:
        """As LLM.generate of token ids; a request that the server refuses ends with an error."""
        return [
            self._one(prompt["prompt_token_ids"], params)
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]

    def request(self, ids: Sequence[int], params: SamplingParams) -> dict[str, np.ndarray]:
        """The tensors of a request."""
        return {
            "input_ids": row(list(ids), np.int32),
            "input_lengths": row(len(ids), np.int32),
            "exclude_input_in_output": row(True, np.bool_),
            **write_params(params),
        }

    def _one(self, ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        request = self.request(ids, params)
        try:
            parts = list(self._send(request))
        except RemoteError as error:
            one = CompletionOutput(0, "", [], finish_reason="error", error=str(error))
            return RequestOutput("", None, list(ids), [one], True)
        facts = _report(parts[-1])

        def joined(name: str) -> list[Any]:
            return [item for part in parts for item in part[name].reshape(-1).tolist()]

        tokens = joined("output_ids")
        logits = [part["generation_logits"] for part in parts if "generation_logits" in part]
        vocab = self.engine.limits.vocab_size
        one = CompletionOutput(
            0, "", tokens,
            finish_reason=facts["finish_reason"], stop_reason=facts["stop_reason"],
            token_from_draft=joined("token_from_draft"),
            generation_logits=np.concatenate([rows.reshape(-1, vocab) for rows in logits])
            if logits else None,
        )  # fmt: skip
        if params.logprobs is not None:
            one.logprobs = [
                {token: Logprob(logprob, rank)}
                for token, logprob, rank in zip(
                    tokens, joined("output_log_probs"), facts["ranks"], strict=True
                )
            ]
        return RequestOutput(
            "", None, list(ids), [one], True, facts["metrics"], facts["num_cached_tokens"]
        )


def _report(part: Mapping[str, np.ndarray]) -> dict[str, Any]:
    text = part["report"].reshape(-1)[0]
    content: dict[str, Any] = json.loads(text)
    return content

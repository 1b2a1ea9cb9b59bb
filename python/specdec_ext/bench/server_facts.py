"""What a benchmark asks a server itself: its model, an answer, its counters of speculation."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from .load_tools import acceptance

__all__ = ["Counters", "acceptance_between", "base_url", "counters", "first_answer", "served_model"]

ASK_SECONDS = 30.0
# The first answer of a server that still loads pages and measures its steps.
ANSWER_SECONDS = 300.0
_PREFIX = "vllm:spec_decode_num_"
_SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")
_POSITION = re.compile(r'position="(\d+)"')


def base_url(url: str) -> str:
    """An address as users write it, without a path of the interface. Raises ConfigError."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        raise ConfigError(
            f"{url!r} is no address of a server; give one such as http://127.0.0.1:8000"
        )
    return url.rstrip("/").removesuffix("/v1")


def served_model(url: str, key: str | None) -> str:
    """The first model that the server names. Raises ConfigError."""
    reply = _ask(url + "/v1/models", key, None, ASK_SECONDS)
    try:
        return str(json.loads(reply)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{url}/v1/models names no model; is it an OpenAI server?") from None


def first_answer(url: str, key: str | None, path: str, body: Mapping[str, Any]) -> None:
    """One request outside the measurement: the server warms up, or says what it refuses."""
    _ask(url + path, key, body, ANSWER_SECONDS)


@dataclass(frozen=True)
class Counters:
    """Sums of a server's /metrics.

    is_ours    it is a server of this package
    positions  steps that accepted a draft at each place of the path
    """

    is_ours: bool = False
    steps: float = 0.0
    drafts: float = 0.0
    accepted: float = 0.0
    positions: Mapping[int, float] = field(default_factory=dict)


def counters(url: str, key: str | None) -> Counters | None:
    """None: the server has no /metrics, or none of vLLM's counters of speculation."""
    try:
        text = _ask(url + "/metrics", key, None, ASK_SECONDS)
    except ConfigError:
        return None
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or not match[1].startswith(_PREFIX):
            continue
        name = match[1].removeprefix(_PREFIX).removesuffix("_total")
        value = float(match[3])
        if name == "accepted_tokens_per_pos":
            place = _POSITION.search(match[2] or "")
            if place is not None:
                number = int(place[1])
                positions[number] = positions.get(number, 0.0) + value
        else:
            sums[name] = sums.get(name, 0.0) + value
    if not sums:
        return None
    return Counters(
        is_ours="\nspecdec_steps_total" in text,
        steps=sums.get("drafts", 0.0),
        drafts=sums.get("draft_tokens", 0.0),
        accepted=sums.get("accepted_tokens", 0.0),
        positions=positions,
    )


def acceptance_between(before: Counters | None, after: Counters | None) -> dict[str, Any] | None:
    """`speculative_decoding` of what was counted between two readings."""
    if before is None or after is None:
        return None
    steps = after.steps - before.steps
    reached = [
        after.positions[place] - before.positions.get(place, 0.0)
        for place in sorted(after.positions)
    ]
    # So many steps accepted that draft, so many the next one too: the rest ended in between.
    bins = [here - there for here, there in zip([steps, *reached], [*reached, 0.0], strict=True)]
    return acceptance(
        steps=steps,
        drafts=after.drafts - before.drafts,
        accepted=after.accepted - before.accepted,
        histogram=bins,
    )


def _ask(url: str, key: str | None, body: Mapping[str, Any] | None, seconds: float) -> str:
    """The text of an answer. Raises ConfigError with what the server says."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as reply:
            text: str = reply.read().decode("utf-8", "replace")
            return text
    except urllib.error.HTTPError as error:
        said = error.read(2000).decode("utf-8", "replace")
        raise ConfigError(f"{url} answers {error.code}: {said}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{url} does not answer: {error}") from None

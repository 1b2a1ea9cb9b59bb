"""`specdec bench serve`: a load tool (AIPerf, GuideLLM) on one server, or on several in turn."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .common import refuse_engine_options, usage_error
from .prompts import read_prompts
from .serve import DEFAULT_QUEUED, make_server_llm

__all__ = ["OPTIONS", "add_arguments", "check", "run"]

PLAIN = "plain"
# Defaults of this mode's own options; given elsewhere they are refused.
OPTIONS: dict[str, Any] = {
    "url": None, "compare": None, "concurrency": [1, 4, 16], "num_prompts": None,
    "tool": "aiperf", "tool_path": None, "artifact_dir": None, "api_key": None,
}  # fmt: skip
# The keys of bench.load_tools.TOOLS, which `--help` does not import.
TOOL_NAMES = ("aiperf", "guidellm")
_INPUT_LEN = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serve")
    group.add_argument(
        "--url", metavar="URL",
        help="measure this OpenAI-compatible server (default: one is started here, with the "
        "options of the engine below)",
    )  # fmt: skip
    group.add_argument(
        "--compare", nargs="+", metavar=f"URL|{PLAIN}",
        help=f"measure these in turn with it; {PLAIN}: the same server, asked not to speculate "
        f"(default: {PLAIN} for a server that is started here)",
    )  # fmt: skip
    group.add_argument(
        "--concurrency", type=int, nargs="+", metavar="N",
        help="requests at a time (default: 1 4 16)",
    )  # fmt: skip
    group.add_argument(
        "--tool", choices=TOOL_NAMES, help="what sends the requests (default: aiperf)"
    )
    group.add_argument("--tool-path", metavar="FILE", help="its program (default: the one on PATH)")
    group.add_argument(
        "--artifact-dir", metavar="DIR", help="keep the tool's own reports (default: they go)"
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="of the servers of --url and --compare (default: "
        "$OPENAI_API_KEY)",
    )  # fmt: skip


@dataclass(frozen=True)
class _Side:
    """One column of the comparison. is_ours: it is a server of this package."""

    name: str
    url: str
    model: str
    is_ours: bool
    api_key: str | None = None
    body: dict[str, Any] = field(default_factory=dict)


def check(args: argparse.Namespace) -> None:
    """What needs neither a server nor a tool. Raises SystemExit(2), ConfigError."""
    from ..bench.server_facts import base_url
    from ..config.validate import check_int
    from ..errors import ConfigError

    for i, count in enumerate(args.concurrency):
        check_int(f"--concurrency[{i}]", count, ConfigError, low=1, high=100_000)
    if args.url is not None:
        args.url = base_url(args.url)
        refuse_engine_options(args)
    args.compare = [url if url == PLAIN else base_url(url) for url in args.compare or ()]
    named = [args.url, *args.compare]
    for name in args.compare:
        if named.count(name) > 1:
            usage_error(args, f"--compare {name}: it is named twice; leave one out")
    for flag, value in (("--chat-template", args.chat_template),
                        ("--system-prompt", args.system_prompt)):  # fmt: skip
        if value is not None:
            usage_error(args, f"{flag} is not sent by 'bench serve'; write it into the prompts")
    most = max(args.concurrency)
    if args.num_prompts is not None and args.num_prompts < most:
        usage_error(args, f"--num-prompts {args.num_prompts} with --concurrency {most}: fewer "
                    "requests than are sent at a time; raise it")  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report. Raises MissingPackageError, ConfigError, LoadToolError."""
    import tempfile

    from ..bench.load_tools import find_tool
    from ..bench.machine import about_machine, clocks

    tool = find_tool(args.tool, args.tool_path)
    texts, source = _texts(args)
    with ExitStack() as stack:
        about, sides = _sides(args, stack)
        device = about.pop("device", "a server by its address")
        about["machine"], before = about_machine(device), clocks(device)
        for side in sides:
            _warm_up(args, side, max(texts, key=len))
        artifacts = args.artifact_dir or stack.enter_context(tempfile.TemporaryDirectory())
        rows = list(_rows(args, tool, sides, texts, Path(artifacts).expanduser().resolve()))
        return {
            "benchmark": "serve",
            **about,
            "tool": f"{tool.name} {tool.version()}".strip(),
            "servers": [{"name": s.name, "url": s.url, "model": s.model} for s in sides],
            "workload": {
                "prompts": source, "distinct_prompts": len(set(texts)), "chat": args.chat,
                "output_len": args.output_len, "temperature": args.temperature, "seed": args.seed,
            },
            "clocks": {"before": before, "after": clocks(device)},
            "failed_requests": sum(row["failed_requests"] for row in rows),
            "rows": rows,
        }  # fmt: skip


def _texts(args: argparse.Namespace) -> tuple[list[str], str]:
    """The prompts, and where they come from in words."""
    if args.input_file is None:
        length = _INPUT_LEN if args.input_len is None else args.input_len
        count = max(_num_requests(args, c) for c in args.concurrency)
        return random_texts(count, length, args.seed), "random words"
    texts = read_prompts(args)
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            usage_error(args, f"--input-file {args.input_file}: prompt {i} is no text; 'bench "
                        "serve' sends texts")  # fmt: skip
    return texts, Path(args.input_file).name


def random_texts(count: int, length: int, seed: int) -> list[str]:
    """`count` texts of `length` random words; the same for the same seed."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"

    def word() -> str:
        return "".join(rng.choices(letters, k=rng.randint(2, 8)))

    return [" ".join(word() for _ in range(length)) for _ in range(count)]


def _num_requests(args: argparse.Namespace, concurrency: int) -> int:
    return int(args.num_prompts or max(8, 4 * concurrency))


def _sides(args: argparse.Namespace, stack: ExitStack) -> tuple[dict[str, Any], list[_Side]]:
    """What the report says of the first server, and all that are measured."""
    from ..errors import ConfigError

    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    if args.url is None:
        about, first = stack.enter_context(_own_server(args))
        compare = args.compare or ([PLAIN] if about["method"] != "none" else [])
    else:
        first = _side_at(args.url, key)
        about = {"model": first.model, "method": first.name}
        compare = args.compare
    sides = [first]
    for name in compare:
        if name != PLAIN:
            sides.append(_side_at(name, key))
        elif first.is_ours:
            plain = {"speculative_config": False}
            sides.append(_Side(PLAIN, first.url, first.model, True, first.api_key, plain))
        else:
            raise ConfigError(
                f"--compare {PLAIN}: {first.url} is no server of this package, which can be asked "
                "not to speculate; start it without speculation and give its address"
            )
    return about, sides


def _side_at(url: str, key: str | None) -> _Side:
    from ..bench.server_facts import counters, served_model

    model = served_model(url, key)
    found = counters(url, key)
    return _Side(url.partition("://")[2], url, model, found is not None and found.is_ours, key)


@contextmanager
def _own_server(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], _Side]]:
    """A server of this process, with the options of the engine."""
    from ..bench.machine import about_engine
    from ..errors import ConfigError

    try:
        from ..serve.app import create_app
        from ..serve.server import ThreadServer
        from ..serve.settings import ServerSettings
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server needs {error.name}: pip install 'specdec_ext[serve]'"
        ) from None
    with make_server_llm(args, DEFAULT_QUEUED) as llm:
        about = {**about_engine(llm), "device": str(llm.device)}
        app = create_app(llm, ServerSettings(served_model_names=[about["model"]]))
        with ThreadServer(app) as server:
            name = app.state.serving.method or PLAIN
            yield about, _Side(name, server.url, about["model"], True)


def _path(args: argparse.Namespace) -> str:
    return "/v1/chat/completions" if args.chat else "/v1/completions"


def _body(args: argparse.Namespace, side: _Side) -> dict[str, Any]:
    """Fields that every request has. Cached prompts are of no other run: a salt of its own."""
    import secrets

    body: dict[str, Any] = {"temperature": args.temperature, "ignore_eos": True, **side.body}
    if args.temperature > 0:
        body["seed"] = args.seed
    if side.is_ours:
        body["cache_salt"] = secrets.token_hex(8)
    return body


def _warm_up(args: argparse.Namespace, side: _Side, longest: str) -> None:
    """An answer to the longest prompt, behind other words, so that no cache keeps it. What the
    server refuses is said now, in its own words."""
    from ..bench.server_facts import first_answer

    text = "Hello. " + longest
    prompt = {"messages": [{"role": "user", "content": text}]} if args.chat else {"prompt": text}
    body = {"model": side.model, "max_tokens": args.output_len, **prompt, **_body(args, side)}
    first_answer(side.url, side.api_key, _path(args), body)


def _rows(
    args: argparse.Namespace, tool: Any, sides: Sequence[_Side], texts: Sequence[str], folder: Path
) -> Iterator[dict[str, Any]]:
    """A measurement of every server at every concurrency; who comes first takes turns."""
    from ..bench.load_tools import Load
    from ..bench.server_facts import acceptance_between, counters

    shown = sys.stderr.isatty() and not args.disable_tqdm
    for turn, concurrency in enumerate(args.concurrency):
        found: dict[int, dict[str, Any]] = {}
        numbers = list(range(len(sides)))
        for number in numbers if turn % 2 == 0 else reversed(numbers):
            side = sides[number]
            if shown:
                print(f"{side.name}, {concurrency} at a time", file=sys.stderr)
            count = _num_requests(args, concurrency)
            load = Load(
                url=side.url,
                model=side.model,
                prompts=list(itertools.islice(itertools.cycle(texts), count)),
                concurrency=concurrency,
                output_len=args.output_len,
                is_chat=args.chat,
                body=_body(args, side),
                seed=args.seed,
                api_key=side.api_key,
            )
            before = counters(side.url, side.api_key)
            measured = tool.measure(load, folder / f"{concurrency}-{number}")
            told = measured["speculative_decoding"]
            measured["acceptance_from"] = "answers" if told else None
            if told is None:
                counted = acceptance_between(before, counters(side.url, side.api_key))
                if counted is not None and counted["num_spec_steps"]:
                    measured["speculative_decoding"] = counted
                    measured["acceptance_from"] = "/metrics"
            found[number] = {"server": side.name, "concurrency": concurrency, **measured}
        yield from (found[number] for number in numbers)

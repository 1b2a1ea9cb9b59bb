"""`specdec chat`: one question, or a conversation, with a model here or with a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from ..config.validate import check_float, check_int
from ..errors import ConfigError, SpecdecError
from ..extras import require
from .common import add_llm_arguments, make_llm, refuse_engine_options, usage_error, use_color
from .prompts import MARK

__all__ = ["add_arguments", "run"]

DEFAULT_MAX_TOKENS = 512
DRAFTED = "green"
COMMANDS = {
    "/stats": "how the last answer was decoded",
    "/method on|off": "with drafts, or plainly",
    "/system TEXT": "what the model is told first; without TEXT: nothing. Begins anew",
    "/new": "begin anew",
    "/help": "this list",
    "/quit": "end (Ctrl-D too)",
}

# (text, was it drafted?), and at the end the metrics of the answer.
Pieces = Iterator[tuple[str, bool] | dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "question",
        nargs="?",
        metavar="QUESTION",
        help="answer this and end; without it: a conversation",
    )
    chat = parser.add_argument_group("chat")
    chat.add_argument(
        "--url", metavar="URL",
        help="talk to the server there, http://127.0.0.1:8000, rather than load a model",
    )  # fmt: skip
    chat.add_argument("--api-key", metavar="KEY", help="key for --url (default: $OPENAI_API_KEY)")
    chat.add_argument("--system", metavar="TEXT", help="what the model is told first")
    chat.add_argument(
        "--max-tokens", "--max-output-len", type=int, metavar="N",
        help=f"the most tokens of an answer (default: {DEFAULT_MAX_TOKENS}; with --url the "
        "server's own)",
    )  # fmt: skip
    chat.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="default: 0, greedy"
    )
    chat.add_argument("--seed", type=int, metavar="N", help="makes sampled answers repeatable")
    chat.add_argument(
        "--stats", action="store_true", help="show after every answer how it was decoded"
    )
    chat.add_argument(
        "--color", default="auto", choices=("auto", "always", "never"),
        help="drafted tokens in green (default: auto, on a terminal)",
    )  # fmt: skip
    add_llm_arguments(parser)


class _Local:
    """A model in this process."""

    finish_reason: str | None = None  # of the last answer

    def __init__(self, args: argparse.Namespace) -> None:
        import dataclasses

        from .common import llm_kwargs

        cache = llm_kwargs(args)["kv_cache_config"]
        # The conversation so far is in the cache when the next question comes.
        reuse = args.kv_cache_enable_block_reuse is not False
        self._llm = make_llm(
            args, kv_cache_config=dataclasses.replace(cache, enable_block_reuse=reuse)
        )
        self._args = args

    def answer(self, messages: list[dict[str, str]], speculate: bool) -> Pieces:
        from ..request.sampling_params import SamplingParams

        args, llm = self._args, self._llm
        text, ids = llm.prompts.read_chat(messages)
        room = llm.memory.max_seq_len - len(ids)
        most = DEFAULT_MAX_TOKENS if args.max_tokens is None else args.max_tokens
        params = SamplingParams(
            max_tokens=min(most, max(1, room)),
            temperature=args.temperature,
            seed=args.seed,
            speculative_config=None if speculate else False,
        )
        output = None
        for output in llm.stream({"prompt": text, "prompt_token_ids": ids}, params):
            yield from output.outputs[0].delta_segments
        assert output is not None
        self.finish_reason = output.outputs[0].finish_reason
        if output.outputs[0].error is not None:
            raise SpecdecError(output.outputs[0].error)
        yield output.metrics

    def close(self) -> None:
        self._llm.close()


class _Remote:
    """A server; any that speaks OpenAI's language, though only ours tells what was drafted."""

    finish_reason: str | None = None  # of the last answer

    def __init__(self, args: argparse.Namespace) -> None:
        require("openai", "--url")
        import openai

        from ..bench.server_facts import base_url

        url = base_url(args.url) + "/v1"
        self._errors = openai.OpenAIError
        key = args.api_key
        try:
            self._client = openai.OpenAI(base_url=url, **({"api_key": key} if key else {}))
        except openai.OpenAIError:  # neither given nor in the environment
            self._client = openai.OpenAI(base_url=url, api_key="none")
        try:
            cards = list(self._client.models.list())
        except self._errors as error:
            self.close()
            raise SpecdecError(f"{url}: {error}") from None
        if not cards:
            self.close()
            raise SpecdecError(f"{url}/models names no model; start the server with one")
        self._model = cards[0].id
        self._ours = getattr(cards[0], "owned_by", None) == "specdec_ext"
        self._args = args

    def answer(self, messages: list[dict[str, str]], speculate: bool) -> Pieces:
        args = self._args
        extra: dict[str, Any] = {"include_token_sources": True} if self._ours else {}
        if not speculate:
            extra["speculative_config"] = False
        # Without the user's own number the server's holds: only it knows what it has room for.
        length: dict[str, Any] = {} if args.max_tokens is None else {"max_tokens": args.max_tokens}
        given: Any = messages
        try:
            with self._client.chat.completions.create(
                model=self._model, messages=given, **length,
                temperature=args.temperature, seed=args.seed, stream=True,
                stream_options={"include_usage": True}, extra_body=extra,
            ) as stream:  # fmt: skip
                for part in stream:
                    for choice in part.choices:
                        self.finish_reason = choice.finish_reason
                        sources: Any = getattr(choice, "token_sources", None)
                        if sources is not None:
                            yield from ((s["text"], s["source"] != "model") for s in sources)
                        elif choice.delta.content:
                            yield choice.delta.content, False
                    metrics: Any = getattr(part, "metrics", None)
                    if metrics is not None:
                        yield metrics
        except self._errors as error:
            raise SpecdecError(str(error)) from None

    def close(self) -> None:
        self._client.close()


class _Chat:
    """The conversation so far, and how it is shown."""

    def __init__(self, args: argparse.Namespace, source: _Local | _Remote) -> None:
        from rich.console import Console

        self._source = source
        self._args = args
        color = use_color(args.color, sys.stdout)
        self._console = Console(
            force_terminal=color, no_color=not color, highlight=False, soft_wrap=True
        )
        self._aside = Console(stderr=True, highlight=False, soft_wrap=True)
        self._speculate = True
        self._metrics: dict[str, Any] | None = None
        self._turns: list[dict[str, str]] = []
        self._begin(args.system)

    def _begin(self, system: str | None) -> None:
        self._system = system
        self._turns = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str) -> None:
        """Show the answer as it is written. Ctrl-C ends the answer, and what is there of it stays.
        Raises SpecdecError, without the question in the conversation."""
        from rich.text import Text

        self._turns.append({"role": "user", "content": question})
        written: list[str] = []
        self._source.finish_reason = None
        pieces = self._source.answer(self._turns, self._speculate)
        try:
            for piece in pieces:
                if isinstance(piece, dict):
                    self._metrics = piece
                    continue
                text, drafted = piece
                written.append(text)
                self._console.print(Text(text, style=DRAFTED if drafted else ""), end="")
        except KeyboardInterrupt:
            pieces.close()  # type: ignore[attr-defined]  # a generator: the request is cancelled
            self._tell("\n(stopped)")
        except SpecdecError:
            self._turns.pop()
            raise
        self._console.print()
        if self._source.finish_reason == "length":
            self._tell("(cut: the answer reached --max-tokens, or the model's limit)")
        self._turns.append({"role": "assistant", "content": "".join(written)})
        if self._args.stats:
            self._show_stats()

    def command(self, line: str) -> bool:
        """Do what a line that begins with / says; False: the conversation ends."""
        name, _, rest = line.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name == "/stats":
            self._show_stats()
        elif name == "/method" and rest in ("on", "off"):
            self._speculate = rest == "on"
            self._tell("answers are decoded with drafts" if self._speculate else
                       "answers are decoded plainly")  # fmt: skip
        elif name == "/system":
            self._begin(rest.strip() or None)
        elif name == "/new":
            self._begin(self._system)
        else:
            if name != "/help":
                self._tell(f"there is no command {line.strip()!r}; there are")
            for text, meaning in COMMANDS.items():
                self._tell(f"  {text:<16} {meaning}")
        return True

    def _tell(self, text: str) -> None:
        """A line that is not part of the conversation."""
        self._aside.print(text, style="dim", markup=False)

    def talk(self) -> None:
        """Questions from a terminal, with history; or one in a line, from a file or a pipe."""
        for line in _lines():
            if line.startswith("/"):
                if not self.command(line):
                    return
            elif line.strip():
                try:
                    self.ask(line)
                except SpecdecError as error:
                    self._aside.print(f"error: {error}", style="red", markup=False)

    def _show_stats(self) -> None:
        about = self._metrics
        if about is None:
            self._tell("no figures yet")
            return
        spec = about["speculative_decoding"]
        self._tell(
            f"{about['num_generated_tokens']} tokens in {about['num_forward_passes']} passes "
            f"({about['tokens_per_forward_pass']:.2f} per pass), "
            f"{spec['num_accepted_draft_tokens']} of {spec['num_draft_tokens']} drafts accepted, "
            f"{about['tokens_per_second'] or 0.0:.1f} tokens/s, first token after "
            f"{about['time_to_first_token_ms'] or 0.0:.0f} ms"
        )


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        for i, line in enumerate(sys.stdin):
            yield (line if i else line.removeprefix(MARK)).rstrip("\n")
        return
    require("prompt_toolkit", "a conversation (one question as an argument does not)")
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession()
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:  # the line is dropped, not the conversation
            continue
        except EOFError:
            return


def run(args: argparse.Namespace) -> int:
    """0 when the question was answered or the conversation has ended."""
    if args.max_tokens is not None:
        check_int("--max-tokens", args.max_tokens, ConfigError, low=1)
    check_float("--temperature", args.temperature, ConfigError, low=0.0)
    if args.url is not None:
        refuse_engine_options(args)
    if args.prompt_lookup_style == "v1":
        usage_error(args, "--prompt-lookup-style v1 is a loop of its own; a chat needs v2")
    source = _Local(args) if args.url is None else _Remote(args)
    try:
        chat = _Chat(args, source)
        if args.question is not None:
            chat.ask(args.question)
        else:
            chat.talk()
    finally:
        source.close()
    return 0

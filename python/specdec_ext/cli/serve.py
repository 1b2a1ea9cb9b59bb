"""`specdec serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from ..config.validate import check_int
from ..errors import ConfigError
from .common import add_llm_arguments, checked_threads, llm_kwargs, make_llm, usage_error

__all__ = ["DEFAULT_QUEUED", "add_arguments", "make_server_llm", "run"]

KEYS_VARIABLE = "SPECDEC_API_KEYS"
# Options that become ReplicaOptions' (serve/ray.py).
SCALING = ("max_replicas", "target_requests", "upscale_seconds", "downscale_seconds")
DEFAULT_QUEUED = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_argument", nargs="?", metavar="MODEL", help="the same as --model (default: built-in)"
    )
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000")
    server.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    server.add_argument("--ssl-keyfile", metavar="FILE", help="TLS: the private key")
    server.add_argument("--ssl-certfile", metavar="FILE", help="TLS: the certificate")
    server.add_argument(
        "--ssl-keyfile-password", metavar="TEXT", help="TLS: password of the private key"
    )
    server.add_argument(
        "--served-model-name", nargs="+", metavar="NAME",
        help="names by which requests may call the model (default: the folder's name)",
    )  # fmt: skip
    server.add_argument(
        "--api-key", action="append", metavar="KEY",
        help="a request needs one of these keys; may be given several times. Other users of the "
        f"machine see a command line: prefer --api-key-file, or ${KEYS_VARIABLE} with keys "
        "separated by commas",
    )  # fmt: skip
    server.add_argument("--api-key-file", metavar="FILE", help="file with one key per line")
    server.add_argument(
        "--cors-origin", action="append", metavar="ORIGIN",
        help="pages of this origin may call the server; may be repeated (default: none)",
    )  # fmt: skip
    server.add_argument(
        "--log-prompts", action="store_true", help="write prompts and answers to the access log"
    )
    server.add_argument(
        "--per-request-metrics", default="summary", choices=("none", "summary", "detailed"),
        help="how much `metrics` an answer carries (default: summary)",
    )  # fmt: skip
    server.add_argument(
        "--default-temperature", type=float, default=1.0, metavar="X",
        help="temperature of requests that name none (default: 1, as OpenAI's)",
    )  # fmt: skip

    replicas = parser.add_argument_group("replicas on Ray Serve (docs/ray.md)")
    replicas.add_argument(
        "--replicas", type=int, metavar="N", help="serve by N processes, each with an engine"
    )
    replicas.add_argument(
        "--max-replicas", type=int, metavar="N",
        help="start more, up to N, while their queues are long (default: as many as --replicas)",
    )  # fmt: skip
    replicas.add_argument(
        "--target-requests", type=int, metavar="N",
        help="start more replicas when each has this many unfinished requests (default: 32)",
    )  # fmt: skip
    for name, more, default in (("up", "more", 30), ("down", "fewer", 600)):
        replicas.add_argument(
            f"--{name}scale-seconds", type=float, metavar="S",
            help=f"how long the load must call for {more} replicas before their number is changed "
            f"(default: {default})",
        )  # fmt: skip

    bounds = parser.add_argument_group("limits of requests")
    bounds.add_argument(
        "--max-queued-requests", type=int, default=DEFAULT_QUEUED, metavar="N",
        help=f"the most unfinished requests; one more is answered 429 (default: {DEFAULT_QUEUED})",
    )  # fmt: skip
    bounds.add_argument(
        "--max-body-bytes",
        type=int,
        metavar="N",
        help="longer bodies are answered 413 (default: 4 MiB)",
    )
    for name, text in (
        ("request", "for an answer; a longer one ends with 504 (default: 600)"),
        ("body", "for a body to arrive (default: 30)"),
        ("send", "for a client to take an event (default: 30)"),
        ("drain", "for running answers when the server is stopped (default: 30)"),
    ):
        bounds.add_argument(f"--{name}-seconds", type=float, metavar="S", help=text)
    add_llm_arguments(parser)


def _keys(args: argparse.Namespace) -> list[str]:
    """The keys of all three places, in that order."""
    keys = list(args.api_key or ())
    if args.api_key_file is not None:
        try:
            text = Path(args.api_key_file).expanduser().read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--api-key-file {args.api_key_file}: {error}") from None
        keys += [line.strip() for line in text.splitlines() if line.strip()]
        if not keys:
            raise ConfigError(
                f"--api-key-file {args.api_key_file} holds no key, so that everybody would be "
                "served; write keys into it, one in a line, or leave the option out"
            )
    named = os.environ.get(KEYS_VARIABLE)
    if named is None:
        return keys
    found = [key.strip() for key in named.split(",") if key.strip()]
    if not found:
        raise ConfigError(
            f"${KEYS_VARIABLE} = {named!r} holds no key, so that everybody would be served; write "
            "keys into it, separated by commas, or unset it"
        )
    return keys + found


def _settings(args: argparse.Namespace) -> Any:
    from ..serve.settings import ServerSettings, name_of_model

    chosen = {
        name: getattr(args, name)
        for name in ("max_body_bytes", "request_seconds", "body_seconds", "send_seconds",
                     "drain_seconds")
        if getattr(args, name) is not None
    }  # fmt: skip
    return ServerSettings(
        served_model_names=args.served_model_name or [name_of_model(args.engine_dir or args.model)],
        api_keys=_keys(args),
        default_temperature=args.default_temperature,
        cors_origins=args.cors_origin or [],
        per_request_metrics=args.per_request_metrics,
        log_prompts=args.log_prompts,
        **chosen,
    )


def _server_configs(args: argparse.Namespace, max_queued_requests: int) -> dict[str, Any]:
    """A server's engine: prefix reuse is on unless refused, and the queue has an end."""
    given = llm_kwargs(args)
    reuse = dataclasses.replace(
        given["kv_cache_config"], enable_block_reuse=args.kv_cache_enable_block_reuse is not False
    )
    queue = dataclasses.replace(given["scheduler_config"], max_queued_requests=max_queued_requests)
    return {"kv_cache_config": reuse, "scheduler_config": queue}


def make_server_llm(args: argparse.Namespace, max_queued_requests: int) -> Any:
    """The engine of a server."""
    return make_llm(args, **_server_configs(args, max_queued_requests))


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes; 0 when what ran then has ended."""
    from ..serve.address import check_address, check_socket_path
    from ..serve.interpreter import share_arenas

    share_arenas()  # before the model's threads have arenas of their own
    if args.model_argument is not None:
        if args.model is not None:
            usage_error(args, "MODEL and --model are both given; keep one")
        args.model = args.model_argument
    if args.prompt_lookup_style == "v1":
        usage_error(args, "--prompt-lookup-style v1 is a loop around the engine; a server needs v2")
    scaling = {name: getattr(args, name) for name in SCALING if getattr(args, name) is not None}
    for name in scaling:
        needed = "--replicas" if name == "max_replicas" else "--max-replicas"
        if args.replicas is None or args.max_replicas is None:
            usage_error(args, f"--{name.replace('_', '-')} needs {needed}")
    if args.replicas is not None and (args.uds or args.ssl_keyfile or args.ssl_certfile):
        usage_error(args, "--replicas listens on --host and --port alone; put --uds and TLS in a "
                    "proxy in front of it")  # fmt: skip
    check_int("--port", args.port, ConfigError, low=0, high=65535)
    for option, path in (("keyfile", args.ssl_keyfile), ("certfile", args.ssl_certfile)):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"--ssl-{option} {path}: there is no such file")
    if (args.ssl_keyfile is None) != (args.ssl_certfile is None):
        usage_error(args, "--ssl-keyfile and --ssl-certfile go together; give both, or none")
    if args.uds is not None:
        check_socket_path(args.uds)
    else:
        check_address(args.host, args.port)
    settings = _settings(args)
    try:
        from ..serve.app import create_app
        from ..serve.server import run_server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server needs {error.name}: pip install 'specdec_ext[serve]'"
        ) from None
    where = args.uds or f"{args.host}:{args.port}"
    if args.replicas is not None:
        from ..serve.replicas import run_replicas

        arguments = {**llm_kwargs(args), **_server_configs(args, args.max_queued_requests)}
        run_replicas(
            arguments, settings,
            scaling={
                "num_replicas": args.replicas, "num_threads": checked_threads(args), **scaling,
            },
            host=args.host, port=args.port,
        )  # fmt: skip
        return 0
    with make_server_llm(args, args.max_queued_requests) as llm:
        if not settings.api_keys and args.uds is None and args.host not in ("127.0.0.1", "::1"):
            print(f"warning: {where} serves everybody; see --api-key-file", file=sys.stderr)
        app = create_app(llm, settings)
        run_server(
            app,
            host=args.host,
            port=args.port,
            uds=args.uds,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile_password=args.ssl_keyfile_password,
        )
    return 0

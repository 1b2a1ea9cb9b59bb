"""Renders chat templates, one JSON line in, one out: a script that chat_template.py runs.

A template is code from a model's folder. Jinja's sandbox keeps it from files and objects, this
process from time and memory: the system ends it after its processor time, and refuses it more
memory. It imports nothing of the package, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from typing import Any

MAX_BYTES = 1 << 30  # of address space
MAX_TEMPLATES = 16  # kept compiled


class Refused(Exception):
    """A template has called raise_exception(): the conversation is not one that it writes."""


def environment() -> Any:
    """What transformers gives a chat template to work with."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's words for training; here it is its body."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise Refused(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # fmt: skip
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
            sort_keys=sort_keys,
        )  # fmt: skip

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def allow_seconds(seconds: int) -> None:
    """Processor time from now on, rounded up; the system ends a process that takes more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit_to(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds + 1)


def limit_to(what: int, most: int) -> None:
    """The soft limit, within the hard one, which only a privileged process may raise."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    sys.path[:] = json.loads(sys.argv[1])
    jinja = environment()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_to(resource.RLIMIT_AS, MAX_BYTES)
    templates: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        allow_seconds(request["seconds"])
        try:
            source = request["template"]
            if source not in templates:
                if len(templates) >= MAX_TEMPLATES:
                    templates.clear()
                templates[source] = jinja.from_string(source)
            text = templates[source].render(request["variables"])
            if len(text) > request["max_chars"]:
                raise ValueError(
                    f"the text has {len(text)} characters, limit {request['max_chars']}"
                )
            answer = json.dumps({"text": text})
        except Refused as refusal:
            answer = json.dumps({"refused": str(refusal)[:2000]})
        except Exception as error:  # jinja2's own, and whatever the template raises
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]})
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

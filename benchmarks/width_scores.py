"""What do fewer bits do to a model's scores?

The built-in model's weights as float32, and in the widths that it can run in: perplexity of this
repository's documents; how far the scores are from those of float32 (mean divergence over the
text, in nats); how often the best token is another one. `q4_1` is the file as it is: the weights
are those of float32, so that all that differs comes from rounding inputs to 8 bits. `int8` and
`int4` round the weights as well.

    python -m benchmarks.width_scores [--widths bfloat16 q4_1 int8 int4] [--write]
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.text_scores import CHUNK, PAGE, WINDOW, document_tokens, log_softmax, scores_of
from specdec_ext.config.engine import pages_for
from specdec_ext.engine.kv_pages import KvPages
from specdec_ext.models import load_model
from specdec_ext.models.default import default_model, default_source
from specdec_ext.models.place import CPU
from specdec_ext.text.tokenizer import load_tokenizer

WIDTHS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "q4_1": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "fp8_w8a8": {"quantization": "fp8_w8a8"},
}


def load(width: str) -> Any:
    source = default_source() if width == "q4_1" else default_model()
    model = load_model(source, max_rows=CHUNK, **WIDTHS[width])
    model.bind_cache(*KvPages(model, pages_for(WINDOW + CHUNK, PAGE), PAGE, CPU).tensors)
    return model


def compare(exact: Any, other: Any, tokens: list[int]) -> dict[str, float]:
    losses, divergences, changes = [], [], []
    for (a, following), (b, _) in zip(
        scores_of(exact, tokens), scores_of(other, tokens), strict=True
    ):
        log_p, log_q = log_softmax(a), log_softmax(b)
        losses.append(-log_q[np.arange(len(following)), following])
        divergences.append((np.exp(log_p) * (log_p - log_q)).sum(axis=1))
        changes.append(a.argmax(axis=1) != b.argmax(axis=1))
    return {
        "perplexity": float(np.exp(np.concatenate(losses).mean())),
        "divergence": float(np.concatenate(divergences).mean()),
        "changed": float(np.concatenate(changes).mean()),
        "tokens": int(sum(map(len, losses))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().partition("\n")[0])
    parser.add_argument("--widths", nargs="+", choices=[*WIDTHS], default=[*WIDTHS])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    args = parser.parse_args()
    common.set_threads(args.threads)
    tokenizer: Any = load_tokenizer(None, default_model())
    tokens = document_tokens(tokenizer)
    exact = load("float32")
    rows = [{"width": width, **compare(exact, load(width), tokens)} for width in args.widths]
    table = common.markdown(
        ("width", "perplexity", "divergence from float32, nats", "best token is another"),
        [
            (row["width"], f"{row['perplexity']:.3f}", f"{row['divergence']:.5f}",
             f"{100 * row['changed']:.2f} %")
            for row in rows
        ],
    )  # fmt: skip
    print(f"{rows[0]['tokens']} tokens")
    print(table)
    if args.write:
        about = {"environment": common.environment(args.threads), "arguments": vars(args)}
        print(common.write_result("width_scores", {**about, "rows": rows}, [table]))


if __name__ == "__main__":
    main()

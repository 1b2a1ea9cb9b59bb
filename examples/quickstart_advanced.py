"""Decodes prompts with the options of TensorRT-LLM's quickstart_advanced.py.

python examples/quickstart_advanced.py --max_matching_ngram_size=2 --spec_decode_nextn=4

Every option of `specdec generate` is accepted; without a method prompt lookup drafts. Prompt lookup
runs in the engine (the documents' V2); --prompt_lookup_style v1 runs it as a loop outside.
"""

from __future__ import annotations

import sys

from specdec_ext.cli import main

PROMPTS = [
    "Hello, my name is",
    "The capital of France is",
    "The future of AI is",
    "Count: one two three, one two three, one two",
]
# Their option -> ours, where the names differ.
OPTIONS = {"--model_dir": "--model", "--spec_decode_algo": "--speculative_decoding_mode"}


def arguments(given: list[str]) -> list[str]:
    """The command line of `specdec generate`."""
    words = []
    for word in given:
        name, equals, value = word.partition("=")
        words.append(OPTIONS.get(name, name) + equals + value)
    options = " ".join(words).replace("-", "_")
    if not any(name in options for name in ("input_text", "prompt ", "input_file")):
        words += ["--input-text", *PROMPTS]
    if "max_tokens" not in options and "max_output_len" not in options:
        words += ["--max-output-len", "32"]
    methods = ("_config", "nextn", "ngram", "suffix", "medusa", "redrafter", "draft")
    if not any(name in options for name in methods):
        words += ["--spec-decode-nextn", "4"]
    return ["generate", *words, "--stats"]


if __name__ == "__main__":
    if code := main(arguments(sys.argv[1:])):
        sys.exit(code)

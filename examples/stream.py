"""Streams an answer of the default model; text of accepted drafts is in [brackets].

python examples/stream.py "Repeat after me: red green blue, red green blue, red green blue."
"""

from __future__ import annotations

import sys

from specdec_ext import LLM, NGramDecodingConfig, SamplingParams


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Count: one two three, one two three, one two"
    with LLM(speculative_config=NGramDecodingConfig(max_draft_len=10)) as llm:
        for output in llm.stream(prompt, SamplingParams(max_tokens=48)):
            for text, from_draft in output.outputs[0].delta_segments:
                print(f"[{text}]" if from_draft else text, end="", flush=True)
        speculation = output.metrics["speculative_decoding"]
    print(f"\nmean acceptance length {speculation['mean_acceptance_length']:.2f}")


if __name__ == "__main__":
    main()

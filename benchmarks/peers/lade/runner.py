"""Runs lade on given prompts and prints one JSON line. Executed by .venv-lade's Python, as a file.

    runner.py REQUEST.json

REQUEST: {"model": folder, "prompts": [[ids]], "window": W, "ngram": N, "guesses": G,
          "max_tokens": int, "threads": int, "repeats": int, "plain": bool}
Answer, one JSON line on stdout: {"runs": [{"seconds": [per prompt], "steps": [per prompt],
          "tokens": [[ids] per prompt]} per repeat], "versions": {...}}
`steps` counts forward passes of the generation, the prompt pass included. With "plain" the same
transformers version decodes without lade.
"""

import contextlib
import functools
import json
import os
import sys
import time

import torch


def count_forwards(owner, name, counter):
    """Wraps a forward function of `owner` so that every call adds one to counter[0]."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def counted(*args, **kwargs):
        counter[0] += 1
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def main():
    with open(sys.argv[1]) as file:
        request = json.load(file)
    torch.set_num_threads(request["threads"])
    os.environ["USE_LADE"] = "0" if request["plain"] else "1"

    import lade
    import transformers
    from transformers import LlamaForCausalLM

    counter = [0]
    if request["plain"]:
        count_forwards(LlamaForCausalLM, "forward", counter)
    else:
        lade.augment_all()
        lade.config_lade(
            LEVEL=request["ngram"],
            WINDOW_SIZE=request["window"],
            GUESS_SET_SIZE=request["guesses"],
            DEBUG=0,
        )
        count_forwards(LlamaForCausalLM, "jforward_multilevel", counter)
    model = LlamaForCausalLM.from_pretrained(request["model"], torch_dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def generate(ids):
        counter[0] = 0
        prompt = torch.tensor([ids])
        started = time.perf_counter()
        with torch.inference_mode(), contextlib.redirect_stdout(sys.stderr):
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request["max_tokens"],
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started
        return out[0, len(ids) :].tolist(), seconds, counter[0]

    generate(request["prompts"][0])  # warm-up
    runs = []
    for _ in range(request["repeats"]):
        results = [generate(ids) for ids in request["prompts"]]
        runs.append(
            {
                "tokens": [tokens for tokens, _, _ in results],
                "seconds": [seconds for _, seconds, _ in results],
                "steps": [steps for _, _, steps in results],
            }
        )
    versions = {
        "lade": "0.0.2",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    print(json.dumps({"runs": runs, "versions": versions}))


if __name__ == "__main__":
    main()

"""The level below `LLM`: the executor plans, a model computes, the executor commits.

Drafts are handed in from outside here (`propose`): the "drafter" guesses that the text repeats the
token of three positions ago. It is often wrong; the tokens are the model's own all the same.
"""

from __future__ import annotations

import torch

from specdec_ext import _core, default_model
from specdec_ext.models import load_model

PAGES, PAGE_SIZE = 32, 16


def decode(prompt: list[int], max_tokens: int, *, guess: bool) -> tuple[list[int], int]:
    """Returns the tokens and the number of forward passes."""
    model = load_model(default_model())
    shape = (model.num_layers, PAGES, model.num_kv_heads, PAGE_SIZE, model.head_dim)
    k_pages, v_pages = torch.zeros(2, *shape, dtype=model.kv_dtype).unbind()
    model.bind_cache(k_pages, v_pages)
    executor = _core.Executor(
        k_pages,
        v_pages,
        vocab_size=model.vocab_size,
        max_batch_size=1,
        max_seq_len=256,
        max_num_tokens=256,
        method="proposed",
    )
    request = executor.submit(prompt, max_tokens=max_tokens)
    tokens: list[int] = []
    passes = 0
    while True:
        if guess and executor.decoding(request):
            executor.propose(request, executor.history(request)[-3:])
        plan = executor.plan()
        if plan is None:
            return tokens, passes
        passes += 1
        for output in executor.commit(plan, model.forward(plan)):
            tokens += output.tokens


def main() -> None:
    prompt = [504, 3575, 282, 4649, 314]
    plain, plain_passes = decode(prompt, 40, guess=False)
    drafted, drafted_passes = decode(prompt, 40, guess=True)
    print(f"{len(plain)} tokens: {plain_passes} passes plain, {drafted_passes} with guesses")
    print("identical:", "yes" if plain == drafted else "no")


if __name__ == "__main__":
    main()

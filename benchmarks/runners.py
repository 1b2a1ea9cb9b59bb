"""The programs that the end-to-end benchmarks compare, behind one face: ids in, a Run out.

`Ours` is this package's LLM, with or without speculation; `Elsewhere` is the same of another
commit; `Peer` is transformers' generate, plain or with its own prompt lookup. All get the same
token ids and thread count and give the same things back. Times: `seconds` is the whole call;
`first` the time to the first token, so that decoding can be told from reading the prompt.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.peers.base.side import Side

SEED = 1  # of sampled runs


@dataclass
class Run:
    """Result of one program on a list of prompts.

    tokens      per prompt: the generated ids
    seconds     wall time of all prompts
    first       summed time to first token (0 where prompts ran as one batch)
    forwards    forward passes, summed over prompts (prompt passes included)
    forward_s   time inside the model's forward passes
    step_s      time inside the engine's steps (0 where the program has no such call)
    """

    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    first: float = 0.0
    forwards: int = 0
    forward_s: float = 0.0
    step_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Without the prompt: tokens after each first one, over the time after it."""
        return (self.num_tokens - len(self.tokens)) / (self.seconds - self.first)

    @property
    def tokens_per_forward(self) -> float:
        """Mean over decode passes: the passes that read prompts and their tokens are left out."""
        prompts = len(self.tokens)
        return (self.num_tokens - prompts) / max(1, self.forwards - prompts)

    @property
    def overhead_s(self) -> float:
        """Mean time per forward pass outside of it, the whole call divided by its passes."""
        return (self.seconds - self.forward_s) / max(1, self.forwards)

    @property
    def step_overhead_s(self) -> float:
        """Mean time of an engine step outside the model's forward pass."""
        return (self.step_s - self.forward_s) / max(1, self.forwards)

    def summary(self) -> dict[str, float]:
        return {
            "tokens": self.num_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "forwards": self.forwards,
            "tokens_per_forward": self.tokens_per_forward,
        }


class _Clock:
    """Counts and times the calls of one method, and marks the end of the first one."""

    def __init__(self, owner: Any, method: str) -> None:
        self.calls, self.seconds, self.first_end = 0, 0.0, 0.0
        call = getattr(owner, method)

        # The signature stays: transformers reads it to choose what it passes.
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            ended = time.perf_counter()
            self.calls += 1
            self.seconds += ended - started
            if self.calls == 1:
                self.first_end = ended
            return result

        setattr(owner, method, timed)

    def reset(self) -> None:
        self.calls, self.seconds, self.first_end = 0, 0.0, 0.0


class Ours:
    """This package: one LLM, one speculative configuration; `plain=True` turns drafts off."""

    def __init__(self, model: Path | None, dtype: str, speculative_config: Any, **options: Any):
        import specdec_ext

        self._package = specdec_ext
        scheduler = options["scheduler_config"]
        # As many pages as the scheduler can use: several engines live in one process here.
        tokens = scheduler["max_batch_size"] * (scheduler["max_seq_len"] + 256)
        options.setdefault("kv_cache_config", {"max_tokens": tokens})
        self.llm = specdec_ext.LLM(
            model, dtype=dtype, speculative_config=speculative_config, **options
        )
        self.clock = _Clock(self.llm.model, "forward")
        self.step_clock = _Clock(self.llm.engine, "step")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        plain: bool = False,
        batched: bool = False,
        ignore_eos: bool = False,
        temperature: float = 0.0,
    ) -> Run:
        """Decodes the prompts, one after another or as one in-flight batch; sampled ones seeded."""
        params = self._package.SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=SEED if temperature else None,
            speculative=False if plain else None,
            ignore_eos=ignore_eos,
            detokenize=False,
        )
        run = Run()
        for group in [prompts] if batched else [[prompt] for prompt in prompts]:
            self.clock.reset()
            self.step_clock.reset()
            started = time.perf_counter()
            inputs = [{"prompt_token_ids": list(ids)} for ids in group]
            outputs = self.llm.generate(inputs, params, use_tqdm=False)
            run.seconds += time.perf_counter() - started
            run.first += 0.0 if batched else self.clock.first_end - started
            run.forwards += self.clock.calls
            run.forward_s += self.clock.seconds
            run.step_s += self.step_clock.seconds
            run.tokens += [list(output.outputs[0].token_ids) for output in outputs]
        return run

    def close(self) -> None:
        self.llm.close()
        del self.llm, self.clock, self.step_clock
        gc.collect()


class Peer:
    """transformers: generate, plain, with its own prompt lookup or with an assistant model."""

    def __init__(self, model: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config.pad_token_id = 0
        self.eos = self.model.generation_config.eos_token_id
        self.clock = _Clock(self.model, "forward")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        lookup: int = 0,
        assistant: Any = None,
        ignore_eos: bool = False,
        temperature: float = 0.0,
    ) -> Run:
        """Decodes the prompts one after another (its speculation knows batch size 1 only).

        Sampled: the whole law at this temperature, torch's generator seeded once per call.
        """
        self.model.generation_config.eos_token_id = None if ignore_eos else self.eos
        options: dict[str, Any] = {"prompt_lookup_num_tokens": lookup} if lookup else {}
        if assistant is not None:
            options["assistant_model"] = assistant
        if temperature:
            options.update(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
            torch.manual_seed(SEED)
        else:
            options["do_sample"] = False
        run = Run()
        for ids in prompts:
            self.clock.reset()
            started = time.perf_counter()
            with torch.inference_mode():
                prompt = torch.tensor([list(ids)])
                output = self.model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=max_tokens,
                    **options,
                )
                tokens = output[0, len(ids) :].tolist()
            run.seconds += time.perf_counter() - started
            run.first += self.clock.first_end - started
            run.forwards += self.clock.calls
            run.forward_s += self.clock.seconds
            run.tokens.append(tokens)
        return run

    def close(self) -> None:
        del self.model, self.clock
        gc.collect()


class Elsewhere:
    """`Ours` in a process of another environment, of another commit of this package."""

    def __init__(
        self, python: Path, model: Path, dtype: str, spec: Any, threads: int, **options: Any
    ) -> None:
        self.side = Side(python, "runner_worker.py", threads)
        self.side.ask({"model": str(model), "dtype": dtype, "spec": spec, "options": options})

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any) -> Run:
        """As Ours.generate, whose options it takes."""
        prompts = [list(ids) for ids in prompts]
        return Run(**self.side.ask({"prompts": prompts, "max_tokens": max_tokens, **options}))

    def close(self) -> None:
        self.side.close()


def warm_up(*programs: Any) -> None:
    """One short call each: allocations, calibration, lazily built tables."""
    for program in programs:
        program.generate([[1, 2, 3, 4, 5, 6, 7, 8]], 4)


def quiet_peers() -> None:
    """Silences the peers' progress bars and warnings on stderr."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def default_model(threads: int) -> tuple[Path, Any]:
    """Returns the default model's folder and tokenizer, after setting threads."""
    from transformers import AutoTokenizer

    import specdec_ext

    common.set_threads(threads)
    quiet_peers()
    folder = Path(specdec_ext.default_model())
    return folder, AutoTokenizer.from_pretrained(folder)

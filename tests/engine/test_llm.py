"""LLM and the command line on a tiny random Llama with a byte-level tokenizer: the whole stack."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdec_ext import (
    LLM,
    CapacityError,
    ConfigError,
    EngineError,
    LookaheadDecodingConfig,
    ModelError,
    RequestError,
    SamplingParams,
    UnsupportedConfigError,
    UnsupportedModelError,
)
from specdec_ext.cli import main
from tiny_models import save_tiny

TEXTS = ["abcabcabcabc", "to be or not to be, that is", "x", "if (a) { b(); } if (a) { b();"]
SPECULATION: dict[str, Any] = {
    "plain": None,
    "lookahead": LookaheadDecodingConfig(4, 3, 4),
    "lookahead fixed": LookaheadDecodingConfig(7, 7, 7, adaptive=False),
    "ngram": "[10,2]",
    "ngram public": {"method": "ngram", "K": 6, "M": 3, "is_public_pool": True, "adaptive": False},
}
LIMITS: dict[str, Any] = {
    "scheduler_config": {"max_batch_size": 4, "max_seq_len": 256},
    "kv_cache_config": {"tokens_per_block": 16},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose greedy text falls into loops, as real small models do."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """transformers' own greedy continuation of every text."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    result = {}
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        result[text] = out[0, ids.shape[1] :].tolist()
    return result


@pytest.fixture(scope="module")
def ngram(folder: Path) -> Any:
    with LLM(folder, speculative_config="[10,2]", **LIMITS) as llm:
        yield llm


def ids_of(outputs: list[Any]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("name", SPECULATION)
def test_equals_transformers_greedy(name: str, folder: Path, expected: dict[str, Any]) -> None:
    with LLM(folder, speculative_config=SPECULATION[name], **LIMITS) as llm:
        outputs = llm.generate(TEXTS, SamplingParams(max_tokens=60), use_tqdm=False)
        assert ids_of(outputs) == [expected[t] for t in TEXTS]
        for text, output in zip(TEXTS, outputs, strict=True):
            assert output.prompt == text
            assert output.finished
            assert output.metrics["numerics"] == "exact"
            visible = [t for t in expected[text] if t != llm.tokenizer.eos_token_id]
            assert output.outputs[0].text == llm.tokenizer.decode(visible)
        off = SamplingParams(max_tokens=60, speculative=False)
        assert ids_of(llm.generate(TEXTS, off, use_tqdm=False)) == ids_of(outputs)
        stats = llm.get_metrics()
        assert stats["executor"]["free_pages"] == stats["executor"]["total_pages"]
        assert stats["generation_tokens"] == 2 * sum(len(i) for i in ids_of(outputs))
        if name == "lookahead fixed":
            assert stats["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def test_every_form_of_prompt(ngram: Any, expected: dict[str, Any]) -> None:
    text = TEXTS[0]
    ids = ngram.tokenizer(text)["input_ids"]
    params = SamplingParams(max_tokens=60)
    for prompt in (
        text, [text], ids, [ids], {"prompt": text}, [{"prompt_token_ids": ids}], np.array(ids),
        torch.tensor([ids]), [np.array(ids)], {"prompt": text, "prompt_token_ids": ids},
    ):  # fmt: skip
        assert ids_of(ngram.generate(prompt, params, use_tqdm=False)) == [expected[text]]
    assert ngram.generate([], params) == []
    two = ngram.generate([text, ids], [params, SamplingParams(max_tokens=3)], use_tqdm=False)
    assert ids_of(two) == [expected[text], expected[text][:3]]
    assert [o.prompt for o in two] == [text, None]


@pytest.mark.parametrize("prompt", [
    "", [""], [[]], [["a"]], [5, "a"], [-1], [10**9], [True], [1.5], b"abc", 5, None,
    {"text": "a"}, {"prompt": 5}, [None], ["ok", ""], "x" * 300,
])  # fmt: skip
def test_bad_prompts_do_no_work(ngram: Any, prompt: Any) -> None:
    before = ngram.get_metrics()["num_forward_passes"]
    with pytest.raises(RequestError):
        ngram.generate(prompt, SamplingParams(), use_tqdm=False)
    after = ngram.get_metrics()
    assert after["num_forward_passes"] == before
    assert after["executor"]["waiting"] == after["executor"]["running"] == 0


def test_bad_parameters_do_no_work(ngram: Any) -> None:
    before = ngram.get_metrics()["num_forward_passes"]
    for params, message in (
        ({"max_tokens": 5}, "expected SamplingParams"),
        (5, "sampling_params = 5: expected SamplingParams"),
        ([SamplingParams()], "1 entries for 2 prompts"),
        ([SamplingParams(), 5], r"sampling_params\[1\]"),
        ([SamplingParams(), SamplingParams(max_draft_len=11)], r"prompts\[1\].*11.*10"),
        (SamplingParams(logit_bias={10**6: 1.0}), "vocabulary"),
    ):
        with pytest.raises(RequestError, match=message):
            ngram.generate(["a", "b"], params, use_tqdm=False)
    with pytest.raises(CapacityError, match=r"prompts\[0\]"):
        ngram.generate(["a" * 250, "b"], SamplingParams(), use_tqdm=False)
    assert ngram.get_metrics()["num_forward_passes"] == before


@pytest.mark.parametrize("call", ["stream", "generate_async"])
def test_a_call_for_one_request_says_what_it_takes(ngram: Any, call: str) -> None:
    start = getattr(ngram, call)
    for params in (5, {"max_tokens": 5}, [SamplingParams()]):
        with pytest.raises(RequestError, match=r"sampling_params = .*expected SamplingParams"):
            start("a", params)
    with pytest.raises(RequestError, match="a list of 2 prompts where one is expected"):
        start(["a", "b"])
    with pytest.raises(RequestError, match="messages = 'hello': expected a list"):
        ngram.chat("hello")


def test_stream_adds_up_and_closes(ngram: Any, expected: dict[str, Any]) -> None:
    ids: list[int] = []
    last = None
    for last in ngram.stream(TEXTS[0], SamplingParams(max_tokens=60)):
        ids += last.outputs[0].delta_token_ids
    assert last is not None and last.finished
    assert ids == expected[TEXTS[0]]
    stream = ngram.stream(TEXTS[0], SamplingParams(max_tokens=60))
    next(stream)
    stream.close()
    assert ngram.engine.num_unfinished == 0
    with pytest.raises(RequestError):  # at the call, not at the first next()
        ngram.stream("", SamplingParams())


def test_asynchronous(ngram: Any, expected: dict[str, Any]) -> None:
    async def one(text: str) -> list[int]:
        output = await ngram.generate_async(text, SamplingParams(max_tokens=60))
        ids: list[int] = output.outputs[0].token_ids
        return ids

    async def go() -> list[list[int]]:
        return list(await asyncio.gather(*(one(t) for t in TEXTS)))

    assert asyncio.run(go()) == [expected[t] for t in TEXTS]


def test_chat(ngram: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=4)
    [chat] = ngram.chat(messages, params, use_tqdm=False)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.prompt == text
    ids = ngram.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert chat.prompt_token_ids == ids
    assert ids_of(ngram.generate(ids, params, use_tqdm=False)) == ids_of([chat])
    both = ngram.chat([messages, messages], params, use_tqdm=False)
    assert ids_of(both) == ids_of([chat]) * 2
    with pytest.raises(RequestError, match="role"):
        ngram.chat([{"role": "x", "content": "hi"}])


@pytest.mark.parametrize("options", [
    {"repetition_penalty": 1.5}, {"frequency_penalty": 1.0}, {"presence_penalty": -1.0},
    {"logit_bias": {5: 50.0}}, {"bad_words": ["a", *([t] for t in range(100, 180))]},
    {"allowed_token_ids": range(20, 60)},
    {"logprobs": 3}, {"min_tokens": 40}, {"stop": ["a"]}, {"ignore_eos": True},
])  # fmt: skip
def test_every_parameter_acts_and_equals_plain(ngram: Any, options: dict[str, Any]) -> None:
    spec = SamplingParams(max_tokens=50, **options)
    plain = dataclasses.replace(spec, speculative=False)
    a = ngram.generate(TEXTS, spec, use_tqdm=False)
    b = ngram.generate(TEXTS, plain, use_tqdm=False)
    assert ids_of(a) == ids_of(b)
    for x, y in zip(a, b, strict=True):
        assert x.outputs[0].text == y.outputs[0].text
        assert x.outputs[0].finish_reason == y.outputs[0].finish_reason
        assert x.outputs[0].logprobs == y.outputs[0].logprobs
    if not {"logprobs", "min_tokens", "stop", "ignore_eos"} & set(options):
        free = ngram.generate(TEXTS, SamplingParams(max_tokens=50), use_tqdm=False)
        assert ids_of(free) != ids_of(a), "the parameter changed nothing"


def test_construction_refusals(folder: Path, tmp_path: Path) -> None:
    for kwargs, error, message in (
        ({"tensor_parallel_size": 3}, ConfigError, "= 3: the model has 2 K/V heads"),
        ({"tensor_parallel_size": 0}, ConfigError, "tensor_parallel_size = 0"),
        (
            {"tensor_parallel_size": 2, "model_impl": "transformers"},
            UnsupportedModelError,
            "native",
        ),
        ({"pipeline_parallel_size": 2}, UnsupportedConfigError, "pipeline_parallel_size"),
        ({"dtype": "fp8"}, UnsupportedConfigError, "fp8"),
        ({"model_impl": "vllm"}, ConfigError, "model_impl"),
        ({"seed": 1.5}, ConfigError, "seed"),
        ({"speculative_config": [7, 7, 7], "max_draft_len": 82}, ConfigError, "82.*83"),
        ({"scheduler_config": {"max_seq_len": 513}}, ConfigError, "513.*512"),
        ({"kv_cache_config": {"dtype": "bfloat16"}, "dtype": "float32"}, ConfigError, "bfloat16"),
        ({"tokenizer": str(tmp_path)}, ModelError, "tokenizer"),
        ({"max_batch_size": 3, **LIMITS}, ConfigError, "two names of one limit"),
        ({"max_model_len": 5}, ConfigError, "write max_seq_len="),
    ):
        with pytest.raises(error, match=message):
            LLM(folder, **kwargs)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="nowhere"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"model = '': .*got an empty text; give one, or leave"):
        LLM("")
    with pytest.raises(ConfigError, match=r"model = 3: expected the path .*, got int"):
        LLM(3)  # type: ignore[arg-type]


def test_closing(folder: Path) -> None:
    llm = LLM(folder, **LIMITS)
    stream = llm.stream("abc", SamplingParams(max_tokens=50))
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("abc", use_tqdm=False)
    with pytest.raises(EngineError, match="closed"):
        llm.generate_async("abc")


def test_without_a_tokenizer(folder: Path, tmp_path: Path, expected: dict[str, Any]) -> None:
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with LLM(tmp_path, **LIMITS) as llm, LLM(tmp_path, tokenizer=folder, **LIMITS) as with_text:
        ids = with_text.tokenizer(TEXTS[0])["input_ids"]
        [output] = llm.generate(ids, SamplingParams(max_tokens=60), use_tqdm=False)
        assert output.outputs[0].token_ids == expected[TEXTS[0]]
        assert output.outputs[0].text == ""
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.generate("abc")


def test_plain_triple_costs_no_more(folder: Path, expected: dict[str, Any]) -> None:
    with LLM(folder, speculative_config=(1, 1, 0), max_draft_len=0, **LIMITS) as llm:
        [output] = llm.generate(TEXTS[1], SamplingParams(max_tokens=60), use_tqdm=False)
        assert output.outputs[0].token_ids == expected[TEXTS[1]]
        prompt = len(output.prompt_token_ids)
        # One row per token after the prompt's: nothing was drafted.
        assert output.metrics["num_rows"] == prompt + len(expected[TEXTS[1]]) - 1


def run_cli(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_cli_json_and_verify(
    folder: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (
        ["--prompt_lookup_config", "[10,2]"], ["--lookahead_config", "[7,7,7]"],
        ["--spec_decode_nextn", "6", "--max_matching_ngram_size", "3"], [],
    ):  # fmt: skip
        code, out, err = run_cli(
            ["generate", "--model", str(folder), "--input_text", *TEXTS, "--max_output_len", "60",
             "--json", "--verify", "--stats", "--max_seq_len", "256", *flags], capsys,
        )  # fmt: skip
        assert code == 0, err
        lines = [json.loads(line) for line in out.splitlines()]
        assert [line["token_ids"] for line in lines] == [expected[t] for t in TEXTS]
        assert [line["prompt"] for line in lines] == TEXTS
        for line in lines:
            assert line["identical"] is True
            assert line["finish_reason"] in ("stop", "length")
            assert line["metrics"]["speculative_decoding"]["mean_acceptance_length"] >= 1.0
        assert "tok/s" in err


def test_cli_says_where_its_own_limit_cut_a_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--model", str(folder), "--max_seq_len", "256", "--input_text", TEXTS[0],
            "--ignore_eos"]  # fmt: skip
    code, _, err = run_cli([*argv, "--stats"], capsys)
    assert code == 0
    assert "note: stopped at 128 tokens, the default of --max-output-len" in err
    assert re.search(r"tok/s  end\n +1 .*  length\n", err)
    for quiet in (["--max_output_len", "8"], ["--json"]):
        assert "note:" not in run_cli([*argv, *quiet], capsys)[2]


def test_cli_text_stream_and_file(
    folder: Path, tmp_path: Path, ngram: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["generate", "--model", str(folder), "--max_output_len", "20", "--max_seq_len", "256"]
    [want] = ngram.generate(TEXTS[1], SamplingParams(max_tokens=20), use_tqdm=False)
    code, out, err = run_cli([*base, "--input_text", TEXTS[1]], capsys)
    assert (code, out) == (0, want.outputs[0].text + "\n"), err
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(TEXTS))
    code, out, err = run_cli([*base, "--input_file", str(file), "--spec_decode_nextn", "5"], capsys)
    assert code == 0, err
    assert out.count("=== ") == len(TEXTS)
    assert want.outputs[0].text in out
    code, out, _ = run_cli(
        [*base, "--input_text", TEXTS[0], "--color_accepted", "always", "--lookahead_config",
         "[4,3,4]", "--no_adaptive"], capsys,
    )  # fmt: skip
    [colored] = ngram.generate(TEXTS[0], SamplingParams(max_tokens=20), use_tqdm=False)
    assert out.replace("\x1b[32m", "").replace("\x1b[0m", "") == colored.outputs[0].text + "\n"


def test_cli_verify_finds_a_difference(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specdec_ext.engine.loop import EngineLoop

    resolve = EngineLoop.resolve

    def biased(self: Any, ids: Any, params: Any) -> Any:
        if params.speculative_config is False:  # the plain run is made to differ
            params = dataclasses.replace(params, logit_bias={7: 100.0})
        return resolve(self, ids, params)

    monkeypatch.setattr(EngineLoop, "resolve", biased)
    argv = ["generate", "--model", str(folder), "--input_text", "abc", "--max_output_len", "5",
            "--max_seq_len", "256", "--spec_decode_nextn", "4", "--verify"]  # fmt: skip
    code, out, _ = run_cli(argv, capsys)
    assert code == 1
    assert out.endswith("identical: no\n")


def test_cli_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["inspect", "--model", str(folder), "--lookahead_config", "[7,7,7]", "--json"]
    code, out, err = run_cli(argv, capsys)
    assert code == 0, err
    report = json.loads(out)
    assert report["speculation"]["max_draft_len"] == 83
    assert report["speculation"]["step_tokens"] == 84
    assert report["memory"]["max_seq_len"] == 512
    assert report["model"]["attention"]
    code, out, _ = run_cli(argv[:-1], capsys)
    assert code == 0
    assert "pool_bytes" in out


@pytest.mark.parametrize("method", SPECULATION)
def test_sampled_text_is_the_same_with_every_drafter(folder: Path, method: str) -> None:
    """The same seed gives the text of plain sampling, alone and in a crowd; n gives n texts."""
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=40, ignore_eos=True)
    with LLM(folder, **LIMITS) as llm:
        plain = [llm.generate(text, params)[0].outputs[0] for text in TEXTS]
    with LLM(folder, speculative_config=SPECULATION[method], **LIMITS) as llm:
        crowd = [r.outputs[0] for r in llm.generate(TEXTS, params)]
        assert [(o.text, o.token_ids) for o in crowd] == [(o.text, o.token_ids) for o in plain]
        several = dataclasses.replace(params, n=3)
        (result,) = llm.generate(TEXTS[0], several)
        assert [o.index for o in result.outputs] == [0, 1, 2]
        assert result.outputs[0].token_ids == plain[0].token_ids
        assert len({tuple(o.token_ids) for o in result.outputs}) == 3
        assert result.metrics["num_generated_tokens"] == 120
        assert len(result.to_json_dict()["outputs"]) == 3
        (again,) = llm.generate(TEXTS[0], several)
        assert [o.token_ids for o in again.outputs] == [o.token_ids for o in result.outputs]
        *_, last = llm.stream(TEXTS[0], several)
        assert [o.token_ids for o in last.outputs] == [o.token_ids for o in result.outputs]

        async def wait() -> Any:
            return await llm.generate_async(TEXTS[0], several)

        final = asyncio.run(wait())
        assert final.finished
        assert [o.token_ids for o in final.outputs] == [o.token_ids for o in result.outputs]


def test_streams_of_several_outputs_add_up(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, n=4, ignore_eos=True)
    with LLM(folder, speculative_config="[10,2]", **LIMITS) as llm:
        texts, ids = [""] * 4, [[] for _ in range(4)]  # type: list[str], list[list[int]]
        for snapshot in llm.stream("abc", params):
            for out in snapshot.outputs:
                texts[out.index] += out.delta_text
                ids[out.index] += out.delta_token_ids
        assert texts == [out.text for out in snapshot.outputs]
        assert ids == [out.token_ids for out in snapshot.outputs]
        stream = llm.stream("abc", params)
        next(stream)
        stream.close()
        assert llm.engine.num_unfinished == 0


def test_verify_compares_sampled_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--model", str(folder), "--input_text", TEXTS[0], "--json", "--verify"]
    argv += ["--temperature", "0.9", "--top_k", "50", "--prompt_lookup_config", "[10,2]"]
    assert main([*argv, "--max_output_len", "30", "--disable_tqdm"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True

"""Synthetic acceptance that runs ahead: step by step what the host's executor keeps and says."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from draft_target_cases import CHAIN
from draft_target_cases import PROMPTS as CHAIN_PROMPTS
from draft_target_cases import folders as folders
from draft_target_cases import open_llm as open_chains
from driver import Delivery, Job, hash_engine, model_engine
from run_ahead_driver import FakeRecorder, run_ahead_hash_engine, run_ahead_model_engine
from test_run_ahead import METHODS, random_jobs
from test_run_ahead_brought import EXTERNAL, Guesser
from test_run_ahead_device import ENQUEUED, VIEWS
from test_run_ahead_llm import PROMPTS, VOCAB, open_llm, tokens_of

from dispatch_recorder import Recorder, no_synchronisation
from emulators import EMULATED, devices
from hash_target import HashFunction
from reference.synthetic_reference import SYNTHETIC, uniform
from specdec_ext import LookaheadDecodingConfig, NGramDecodingConfig, RequestError, SamplingParams
from specdec_ext.cli import main
from specdec_ext.engine.overlap import make_buckets
from specdec_ext.errors import SyntheticAcceptanceWarning
from specdec_ext.models import load_model
from tiny_models import save_llama, save_tiny

DRAFTING = {name: how for name, how in METHODS.items() if name != "none"}
RATES = [[0.9, 0.7, 0.4, 0.2], [1.0, 1.0], [0.0], [0.5] * 9]
GREEDY: dict[str, Any] = {}
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3, "top_k": 6},
    {"temperature": 0.4, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.01},
]


def jobs_of(
    rng: random.Random, function: HashFunction, method: str, laws: list[dict[str, Any]]
) -> list[Job]:
    jobs = []
    for job in random_jobs(rng, function, method, 6, 200):
        asked = {**rng.choice(laws), "seed": rng.randrange(2**64)}
        tokens = min(job.max_tokens, 60)
        jobs.append(dataclasses.replace(job, max_tokens=tokens, options={**job.options, **asked}))
    return jobs


def alone(function: HashFunction, method: str, job: Job, rates: list[float]) -> Delivery:
    """The request in the host's executor, with drafts of fixed length and room for them."""
    engine = hash_engine(
        function, adaptive=False, max_batch_size=1, max_seq_len=200, max_num_tokens=512,
        synthetic_acceptance_rates=rates, **METHODS[method],
    )  # fmt: skip
    (got,) = engine.run([dataclasses.replace(job, submit_step=0, cancel_step=None)])
    return got


def run_schedule(
    seed: int,
    depth: int,
    method: str,
    laws: list[dict[str, Any]],
    recorder: FakeRecorder | None = None,
) -> int:
    """One random schedule; returns the drafts that were kept."""
    rng = random.Random(seed)
    function = HashFunction(vocab=30, surprise=rng.choice([8, 30]), alphabet=4, seed=seed)
    rates = RATES[seed % len(RATES)]
    engine = run_ahead_hash_engine(
        function,
        page_size=rng.choice([1, 4, 16]),
        max_batch_size=4,
        max_seq_len=200,
        max_num_tokens=1024,
        depth=depth,
        stub=None if seed % 5 == 0 else seed,
        recorder=recorder,
        synthetic_acceptance_rates=rates,
        **METHODS[method],
    )
    jobs = jobs_of(rng, function, method, laws)
    kept = 0
    for job, got in zip(jobs, engine.run(jobs), strict=True):
        wanted = alone(function, method, job, rates)
        kept += got.num_accepted
        if got.cancelled:
            assert got.tokens == wanted.tokens[: len(got.tokens)]
            continue
        assert got.tokens == wanted.tokens, job.options
        assert (got.finish_reason, got.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
        # The same steps, draft for draft.
        assert got.forwards - -(-len(job.prompt) // 512) == wanted.forwards - 1
        assert (got.num_drafts, got.num_accepted) == (wanted.num_drafts, wanted.num_accepted)
    return kept


@pytest.mark.parametrize("laws", [[GREEDY], MIXED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", DRAFTING)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_schedules(depth: int, method: str, laws: list[dict[str, Any]]) -> None:
    kept = sum(run_schedule(seed, depth, method, laws) for seed in range(60, 68))
    assert kept > 100


@pytest.mark.parametrize("laws", [[GREEDY], MIXED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", DRAFTING)
def test_replayed_steps_say_the_same(method: str, laws: list[dict[str, Any]]) -> None:
    """Padding is poisoned."""
    replayed = 0
    for seed in range(80, 84):
        recorder = FakeRecorder()
        run_schedule(seed, seed % 3, method, laws, recorder)
        replayed += recorder.replayed
    assert replayed > 50


@pytest.mark.slow
@pytest.mark.parametrize("method", DRAFTING)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_many_schedules(depth: int, method: str) -> None:
    for seed in range(300, 360):
        run_schedule(seed, depth, method, [GREEDY] if seed % 2 else MIXED)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("method", DRAFTING)
def test_every_step_keeps_what_the_rates_say(method: str, temperature: float) -> None:
    """Step by step, by an independent Philox; a deep draft budget that follows acceptance too."""
    function = HashFunction(vocab=24, surprise=5)
    rates = [0.8, 0.6, 0.25, 0.1]
    engine = run_ahead_hash_engine(
        function, max_batch_size=3, max_seq_len=250, max_num_tokens=256, depth=2, adaptive=True,
        synthetic_acceptance_rates=rates, **METHODS[method],
    )  # fmt: skip
    prompts = [[1, 2, 3, 1, 2, 3], [5], [(7 * i) % 24 for i in range(30)]]
    rids = [
        engine.ex.submit(p, max_tokens=200, seed=100 + i, temperature=temperature)
        for i, p in enumerate(prompts)
    ]
    lengths = {rid: len(p) for rid, p in zip(rids, prompts, strict=True)}
    kept = steps = 0
    while engine.ex.num_unfinished:
        for out in engine.step() or []:
            at = lengths[out.request_id]
            lengths[out.request_id] += len(out.tokens)
            if out.num_drafts == 0:
                assert out.num_accepted == 0
                continue
            u = uniform(100 + rids.index(out.request_id), at, SYNTHETIC)
            wanted = sum(u < rate for rate in rates)
            # Lookahead's trees may be less deep than they have drafts.
            assert out.num_accepted <= min(wanted, out.num_drafts)
            if method == "ngram" or wanted < 2:
                assert out.num_accepted == min(wanted, out.num_drafts)
            kept += out.num_accepted
            steps += 1
    engine.assert_idle()
    assert kept > 100 and steps > 80
    assert all(lengths[rid] == len(p) + 200 for rid, p in zip(rids, prompts, strict=True))


def test_a_native_model_says_the_same(tmp_path_factory: Any) -> None:
    folder = save_tiny(tmp_path_factory.mktemp("synthetic") / "model")
    model = load_model(folder, dtype="float32", max_rows=512, max_seq_len=160)
    rng = random.Random(5)
    sizes = {"max_batch_size": 4, "max_seq_len": 160, "max_num_tokens": 512}
    synthetic = {"synthetic_acceptance_rates": RATES[0]}
    for method, how in DRAFTING.items():
        jobs = []
        for i in range(5):
            prompt = [rng.randrange(model.vocab_size) for _ in range(3 + 4 * i)] * 2
            options = {**MIXED[i % len(MIXED)], "seed": 77 + i}
            jobs.append(Job(prompt, 40, options, submit_step=i % 3))
        wanted = []
        for job in jobs:
            host = model_engine(model, adaptive=False, **sizes, **synthetic, **how)
            wanted += [d.tokens for d in host.run([dataclasses.replace(job, submit_step=0)])]
        for depth in (0, 1, 2):
            engine = run_ahead_model_engine(
                model, depth=depth, stub=depth or None, **sizes, **synthetic, **how
            )
            assert [d.tokens for d in engine.run(jobs)] == wanted, method


def test_a_request_without_speculation_and_choices_of_the_host_keep_the_models_text() -> None:
    """Besides them others are synthetic."""
    function = HashFunction(vocab=30, surprise=8, alphabet=4, seed=2)
    prompt = [1, 2, 3, 1, 2, 3]
    jobs = [
        Job(prompt, 50, {"speculative": False}),
        Job(prompt, 50, {"seed": 3}),
        Job(prompt, 50, {"logit_bias": {29: -1.0}}),
    ]
    sizes = {"max_batch_size": 3, "max_seq_len": 200, "max_num_tokens": 256}
    engine = run_ahead_hash_engine(
        function, depth=1, synthetic_acceptance_rates=[1.0, 1.0], **sizes, **METHODS["ngram"]
    )
    plain, synthetic, chosen = engine.run(jobs)
    own = function.reference(prompt, 50)
    assert plain.tokens == own and plain.num_drafts == 0
    assert synthetic.tokens != own and synthetic.num_accepted > 10
    without = hash_engine(function, **sizes, method="none")
    (wanted,) = without.run([jobs[2]])
    assert chosen.tokens == wanted.tokens and chosen.num_drafts > 0


def test_trees_that_a_drafter_brings() -> None:
    """Each step keeps what the rates say, as far as its tree goes down."""
    function = HashFunction(vocab=30, surprise=8, alphabet=4, seed=2)
    rates = [0.9, 0.5, 0.3]
    engine = run_ahead_hash_engine(
        function, max_batch_size=3, max_seq_len=200, max_num_tokens=128, depth=2, stub=4,
        drafter=Guesser(function, 6), synthetic_acceptance_rates=rates, **EXTERNAL,
    )  # fmt: skip
    prompts = [[1, 2, 3], [4], [7, 8] * 9]
    rids = [engine.ex.submit(p, max_tokens=90, seed=9 * i) for i, p in enumerate(prompts)]
    lengths = {rid: len(p) for rid, p in zip(rids, prompts, strict=True)}
    kept = as_wanted = steps = 0
    while engine.ex.num_unfinished:
        for out in engine.step() or []:
            u = uniform(9 * rids.index(out.request_id), lengths[out.request_id], SYNTHETIC)
            lengths[out.request_id] += len(out.tokens)
            if out.num_drafts == 0:
                continue
            wanted = sum(u < rate for rate in rates)
            assert out.num_accepted <= min(wanted, out.num_drafts)
            if wanted < 2:
                assert out.num_accepted == wanted
            kept += out.num_accepted
            as_wanted += out.num_accepted == wanted
            steps += 1
    engine.assert_idle()
    assert kept > 50 and steps > as_wanted > 0.5 * steps


# -- through LLM ----------------------------------------------------------------------------------

SPECS: dict[str, Any] = {
    "lookahead": LookaheadDecodingConfig(4, 3, 4, adaptive=False, synthetic_acceptance_length=2.5),
    "ngram": NGramDecodingConfig(4, 1, adaptive=False, synthetic_acceptance_rates=[0.9, 0.6, 0.6]),
}
LIMITS = {"max_batch_size": 4, "max_seq_len": 96, "max_num_tokens": 256}
PARAMS = [SamplingParams(max_tokens=40, ignore_eos=True, seed=i) for i in range(4)]
DRAWN = [dataclasses.replace(p, temperature=0.3 * i) for i, p in enumerate(PARAMS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("synthetic") / "target", 11, VOCAB)


def warns() -> Any:
    return pytest.warns(SyntheticAcceptanceWarning, match="the text is NOT the model's")


def synthetic_llm(folder: Path, method: str, depth: int | None, **options: Any) -> Any:
    scheduler = {**LIMITS, "run_ahead": depth}
    return open_llm(folder, SPECS[method], depth, scheduler_config=scheduler, **options)


@pytest.mark.parametrize("params", [PARAMS, DRAWN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", SPECS)
def test_marked_and_the_same_as_without_run_ahead(
    folder: Path, method: str, params: list[SamplingParams]
) -> None:
    texts, counts = [], []
    for depth in (None, 0, 1, 2):
        with warns(), synthetic_llm(folder, method, depth) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            metrics = llm.get_metrics()
            off = dataclasses.replace(PARAMS[0], speculative=False)
            (plain,) = llm.generate(PROMPTS[:1], off, use_tqdm=False)
            with pytest.raises(RequestError, match="keeps drafts at synthetic rates"):
                llm.generate([[1]], SamplingParams(temperature=1.0, acceptance="rejection"))
        texts.append(tokens_of(outputs))
        speculative = metrics["speculative_decoding"]
        counts.append((speculative["num_draft_tokens"], speculative["num_accepted_draft_tokens"]))
        assert metrics["synthetic_acceptance"]["rates"] == list(SPECS[method].synthetic_rates)
        for output in outputs:
            assert output.metrics["lossless"] is False
            assert output.metrics["acceptance"] == "synthetic (not the model's text)"
            assert "not the model's" in output.to_json_dict()["synthetic_acceptance"]["note"]
        assert plain.metrics["lossless"] is True
    assert texts == [texts[0]] * 4
    assert counts == [counts[0]] * 4 and counts[0][1] > 20


@devices
@pytest.mark.parametrize("law", ["greedy", "sampled"])
@pytest.mark.parametrize("method", SPECS)
def test_padded_steps_of_a_device(folder: Path, device: str, method: str, law: str) -> None:
    """Every bucket's operations, replayed with poisoned page tables; greedy: the CPU's tokens."""
    params = [dataclasses.replace(p, max_tokens=14) for p in (PARAMS if law == "greedy" else DRAWN)]
    texts = []
    for where, depth, padded in (
        ("cpu" if law == "greedy" else device, None, False),
        (device, 1, False),
        (device, 1, True),
    ):
        with warns(), synthetic_llm(folder, method, depth, device=where) as llm:
            if padded:
                pipeline = llm.engine._pipeline
                recorder = FakeRecorder()
                recorder.buffers, pipeline._recorder = pipeline.buffers, recorder
                most = pipeline.executor.max_rows_per_request
                pipeline.buckets = make_buckets(4, most, LIMITS["max_num_tokens"])
            texts.append(tokens_of(llm.generate(PROMPTS, params, use_tqdm=False)))
            if padded:
                assert recorder.recorded > 1 and recorder.replayed > 5
    assert texts == [texts[0]] * 3


@pytest.mark.parametrize("device", [pytest.param("cuda-emu", marks=EMULATED)])
@pytest.mark.parametrize("method", SPECS)
def test_every_access_of_a_padded_step_is_legal(folder: Path, device: str, method: str) -> None:
    """The emulation that checks bounds, races and initialisation."""
    test_padded_steps_of_a_device(folder, device, method, "greedy")


@devices
@pytest.mark.parametrize("law", [{}, {"temperature": 0.7, "top_p": 0.9}])
@pytest.mark.parametrize("method", SPECS)
def test_steps_wait_for_nothing_but_events(
    folder: Path, device: str, method: str, law: dict[str, Any]
) -> None:
    """No copy to the host but the ring's, no value read, no tensor made; a prompt joins midway."""
    params = SamplingParams(max_tokens=14, ignore_eos=True, **law)
    with warns(), synthetic_llm(folder, method, 1, device=device) as llm:
        pipeline = llm.engine._pipeline
        tokens_of(llm.generate(PROMPTS, params, use_tqdm=False))  # grows scratch memory
        for prompt in PROMPTS[:2]:
            pipeline.executor.submit(prompt, max_tokens=14, **law)
        assert pipeline.step() == []
        with no_synchronisation(device), Recorder() as seen:
            for step in range(8):
                if step == 3:
                    pipeline.executor.submit(PROMPTS[2], max_tokens=3, **law)
                pipeline.step()
        pipeline.drain()
    assert seen.names <= ENQUEUED | VIEWS


@pytest.mark.parametrize("draft", ["near", "far"])
def test_chains_of_a_draft_model(folders: dict[str, Path], draft: str) -> None:
    spec = {**CHAIN, "synthetic_acceptance_rates": [0.9, 0.8, 0.3]}
    texts, counts = [], []
    for depth in (None, 0, 1, 2):
        with (
            warns(),
            open_chains(folders, draft, 6, spec=spec, scheduler={"run_ahead": depth}) as llm,
        ):
            outputs = llm.generate(CHAIN_PROMPTS[:6], PARAMS[0], use_tqdm=False)
            speculative = llm.get_metrics()["speculative_decoding"]
        texts.append(tokens_of(outputs))
        counts.append((speculative["num_draft_tokens"], speculative["num_accepted_draft_tokens"]))
    assert texts == [texts[0]] * 4
    assert counts == [counts[0]] * 4 and counts[0][1] > 80


def test_the_command_marks_it(tmp_path: Path, capsys: Any) -> None:
    import json

    argv = ["generate", "--model", str(save_tiny(tmp_path / "m")), "--input_text", "abcabc",
            "--max_output_len", "60", "--json", "--stats", "--ignore_eos", "--run-ahead", "1",
            "--prompt_lookup_config", "[4,2]", "--no_adaptive",
            "--synthetic_acceptance_rates", "[1, 0.5]"]  # fmt: skip
    assert main(argv) == 0
    captured = capsys.readouterr()
    line = json.loads(captured.out)
    assert line["synthetic_acceptance"]["rates"] == [1.0, 0.5]
    assert line["metrics"]["lossless"] is False
    assert "acceptance: synthetic (not the model's text)" in captured.err
    assert "the text is NOT the model's" in captured.err

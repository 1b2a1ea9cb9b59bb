"""Acceptance rules from SamplingParams to the executor: labels, probabilities, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_drafter_seam import PROMPTS, VOCAB, make_llm
from test_drafter_seam import folder as folder

from specdec_ext import RequestError, SamplingParams, UserDrafterConfig
from specdec_ext.cli import main
from specdec_ext.drafters import Proposal

RULES: dict[str, dict[str, Any]] = {
    "exact_match": {},
    "rejection": {},
    "typical": {},
    "threshold": {"acceptance_threshold": 0.5},
}


class Uniform:
    """Draws drafts uniformly over a reduced vocabulary."""

    def __init__(self, form: str = "proposal") -> None:
        self.form = form
        self.rng = np.random.default_rng(5)
        self.ids = np.array([9, 2, 33, 7])

    def propose(self, history: list[int], budget: int) -> Any:
        tokens = self.rng.choice(self.ids, min(budget, 3)).tolist()
        if self.form == "tuple":
            rows = torch.zeros(len(tokens), VOCAB)
            rows[:, self.ids] = 0.25
            return tokens, None, rows
        rows = torch.full((len(tokens), 4), 0.25 if self.form == "proposal" else float("nan"))
        return Proposal(tokens, None, rows, vocab_ids=self.ids)


@pytest.mark.parametrize("rule", RULES)
def test_outputs_say_which_rule_ran_and_whether_it_is_lossless(folder: Path, rule: str) -> None:
    params = SamplingParams(
        max_tokens=12, temperature=1.0, seed=1, ignore_eos=True, acceptance=rule, **RULES[rule]
    )
    lossless = rule in ("exact_match", "rejection")
    assert params.lossless == lossless
    with make_llm(folder, UserDrafterConfig(drafter=Uniform(), max_draft_len=4)) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        metrics = llm.get_metrics()
    for output in outputs:
        assert output.metrics["lossless"] is lossless
        assert output.metrics["acceptance"] == (rule if lossless else f"{rule} (lossy)")
        assert len(output.outputs[0].token_ids) == 12
    assert metrics["drafter"]["refused_proposals"] == 0
    assert metrics["speculative_decoding"]["num_draft_tokens"] > 50


def test_a_tuple_of_rows_says_what_a_proposal_says(folder: Path) -> None:
    params = SamplingParams(
        max_tokens=40, temperature=1.0, seed=1, ignore_eos=True, acceptance="rejection"
    )
    texts, accepted = [], []
    for form in ("proposal", "tuple"):
        with make_llm(folder, UserDrafterConfig(drafter=Uniform(form), max_draft_len=4)) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            texts.append([out.outputs[0].token_ids for out in outputs])
            accepted.append(llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"])
    assert texts[0] == texts[1]
    assert accepted[0] == accepted[1] > 0


def test_probabilities_that_are_none_cost_the_drafts_and_nothing_else(folder: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
    rejecting = SamplingParams(
        max_tokens=20, temperature=1.0, seed=1, ignore_eos=True, acceptance="rejection"
    )
    with make_llm(folder) as llm:
        plain = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    with make_llm(folder, UserDrafterConfig(drafter=Uniform("nan"), max_draft_len=4)) as llm:
        outputs = llm.generate(PROMPTS, rejecting, use_tqdm=False)
        assert llm.get_metrics()["drafter"]["refused_proposals"] > 10
    assert [o.outputs[0].token_ids for o in outputs] == plain


def test_greedy_text_is_greedy_and_lossless_under_every_rule(folder: Path) -> None:
    with make_llm(folder) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        plain = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    for rule, options in RULES.items():
        params = SamplingParams(max_tokens=20, ignore_eos=True, acceptance=rule, **options)
        assert params.lossless
        with make_llm(folder, UserDrafterConfig(drafter=Uniform(), max_draft_len=4)) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == plain


def test_an_engine_without_drafts_refuses_a_rule(folder: Path) -> None:
    with (
        make_llm(folder) as llm,
        pytest.raises(RequestError, match="acceptance = 'rejection': this engine has no spec"),
    ):
        llm.generate(PROMPTS, SamplingParams(acceptance="rejection"), use_tqdm=False)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"acceptance": "typcal"}, "did you mean 'typical'"),
        ({"acceptance": 3}, "expected one of exact_match, rejection, typical, threshold"),
        ({"acceptance": "threshold"}, "acceptance_threshold is not set"),
        ({"acceptance_threshold": 0.5}, "a parameter of acceptance = 'threshold'"),
        ({"acceptance": "rejection", "posterior_alpha": 0.3}, "a parameter of .*'typical'"),
        ({"acceptance": "typical", "posterior_threshold": 0.0}, "out of range, allowed > 0"),
        ({"acceptance": "typical", "posterior_alpha": 1.01}, "out of range"),
        ({"acceptance": "typical", "posterior_alpha": float("nan")}, "must be finite"),
        ({"acceptance": "threshold", "acceptance_threshold": True}, "expected a number"),
    ],
)
def test_malformed_parameters(values: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        SamplingParams(**values)


def test_defaults_and_spellings() -> None:
    params = SamplingParams(acceptance="Typical", temperature=1)
    assert (params.acceptance, params.posterior_threshold, params.posterior_alpha) == (
        "typical", 0.09, 0.3,
    )  # fmt: skip
    assert params.acceptance_threshold is None
    same = SamplingParams.from_dict(
        {
            "acceptance": "typical",
            "typical_acceptance_sampler_posterior_threshold": 0.2,
            "typical_acceptance_sampler_posterior_alpha": 0.4,
        }
    )
    assert (same.posterior_threshold, same.posterior_alpha) == (0.2, 0.4)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--acceptance", "typical", "--no-speculation"], "there are no drafts to accept"),
        (["--acceptance", "typical", "--spec_decode_nextn", "4", "--temperature", "1", "--verify"],
         "that rule is lossy"),
        (["--acceptance", "threshold", "--spec_decode_nextn", "4"], "acceptance_threshold"),
        (["--posterior-alpha", "0.3", "--spec_decode_nextn", "4"], "posterior_alpha"),
        (["--acceptance", "nonsense", "--spec_decode_nextn", "4"], "expected one of exact_match"),
    ],
)  # fmt: skip
def test_cli_refuses_before_it_loads_a_model(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", "/nowhere", "--input_text", "a", *flags]) == 2
    assert text in capsys.readouterr().err

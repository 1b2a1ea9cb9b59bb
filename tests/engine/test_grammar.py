"""Output in a form: masked speculative text is masked plain text, by every method everywhere."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_forms import END, FORMS, add_tokenizer
from medusa_models import VOCAB
from method_cases import (
    HOST,
    METHODS,
    PROMPTS,
    STREAMS,
    Folders,
    Where,
    _param,
    check,
    open_llm,
    save_models,
    texts_of,
)

from specdec_ext import LLM, RequestError, SamplingParams, UnsupportedRequestError
from specdec_ext.engine import grammar_masks
from specdec_ext.text import grammar


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made = save_models(tmp_path_factory.mktemp("grammar"))
    for name in ("target", "near"):
        add_tokenizer(made[name])
    return made


def params_of(form: str, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=60, structured_outputs=FORMS[form], **more)


SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5}


@pytest.fixture(scope="module")
def plain(folders: Folders) -> dict[tuple[str, bool], list[list[int]]]:
    """Masked plain text, by form and whether it is sampled."""
    texts = {}
    with open_llm(folders, "none") as llm:
        for form in FORMS:
            texts[form, False] = texts_of(llm, params_of(form))
            texts[form, True] = texts_of(llm, params_of(form, **SAMPLED))
    return texts


def test_plain_text_has_its_form(folders: Folders, plain: Any) -> None:
    with open_llm(folders, "none") as llm:
        ended = 0
        for (form, _), texts in plain.items():
            for ids in texts:
                text = llm.tokenizer.decode(ids, skip_special_tokens=True)
                if ids[-1] != END:
                    assert len(ids) >= 60 or form in ("lark", "gbnf")
                    continue
                ended += 1
                if form == "json":
                    assert list(json.loads(text)) == ["name", "kind", "list"]
                elif form == "regex":
                    assert re.fullmatch(FORMS["regex"]["regex"], text)
                elif form == "choice":
                    assert text in FORMS["choice"]["choice"]
        assert ended > 20
        [output] = llm.generate([PROMPTS[0]], params_of("choice"), use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].text in FORMS["choice"]["choice"]


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("none", "redrafter-law")])
@pytest.mark.parametrize("where", [_param("host", 0), *STREAMS[:1], *STREAMS[2:]])
def test_every_method_gives_the_masked_plain_text(
    folders: Folders, plain: Any, where: Where, method: str
) -> None:
    with open_llm(folders, method, where) as llm:
        for (form, sampled), texts in plain.items():
            more = SAMPLED if sampled else {}
            assert texts_of(llm, params_of(form, **more)) == texts, (form, sampled)
        metrics, found = llm.get_metrics(), check(llm)
        assert found["num_accepted_draft_tokens"] > 0
        forced = metrics["grammar"]
        assert forced["accepted_grammar_tokens"] > 100 and not forced["rejected_grammar_tokens"]
        if where.place == "host" and method not in ("public",):
            assert metrics["executor"]["grammar_cut"] > 0


@pytest.mark.parametrize("method", ["chain", "tree", "medusa", "redrafter", "user", "ngram"])
def test_rejection_keeps_the_form(folders: Folders, method: str) -> None:
    """Drafts that were drawn and cut; the law itself is in test_grammar_law.py."""
    with open_llm(folders, method) as llm:
        for form in ("json", "regex"):
            outputs = llm.generate(
                PROMPTS, params_of(form, acceptance="rejection", **SAMPLED), use_tqdm=False
            )
            for output in outputs:
                assert output.outputs[0].finish_reason in ("stop", "length")
                if form == "regex" and output.outputs[0].finish_reason == "stop":
                    assert re.fullmatch(FORMS["regex"]["regex"], output.outputs[0].text)
        check(llm)


@pytest.mark.parametrize("where", [_param("host", 0), *STREAMS[1:]])
def test_beside_others_and_with_processors(folders: Folders, where: Where) -> None:
    """Requests without a grammar run as ever; other processors see what the mask has left."""
    free = SamplingParams(max_tokens=24)
    banned = params_of("regex", bad_words=[[VOCAB - 5]], logit_bias={3: 1.0})

    def shift(tokens: list[int], scores: Any) -> Any:
        scores[len(tokens) % VOCAB] += 2.0
        return scores

    shifted = params_of("regex", logits_processors=[shift], prediction="abcdabcdab12")
    scored = params_of("json", logprobs=2, min_tokens=2, prompt_logprobs=1)
    mixed = [free, params_of("json"), banned, shifted, params_of("lark", **SAMPLED), scored]
    with open_llm(folders, "none") as llm:
        alone = [
            texts_of(llm, dataclasses.replace(p, prediction=None), [prompt])[0]
            for p, prompt in zip(mixed, PROMPTS, strict=True)
        ]
    with open_llm(folders, "suffix", where) as llm:
        outputs = llm.generate(PROMPTS, mixed, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == alone
        check(llm)


@pytest.mark.parametrize("method", ["none", "ngram", "medusa"])
@pytest.mark.parametrize("where", [_param("host", 0), *STREAMS[:1]])
def test_greedy_text_needs_few_masks(
    folders: Folders, where: Where, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = []
    fill = grammar_masks._TreeWalk._fill

    def count(walk: Any, node: int, *where: Any) -> None:
        filled.append(node)
        fill(walk, node, *where)

    monkeypatch.setattr(grammar_masks._TreeWalk, "_fill", count)
    # A processor that changes nothing: every node is masked in front of it, needed or not.
    every = {"logits_processors": [lambda _, scores: scores]}
    with open_llm(folders, method, where) as llm:
        few = {form: texts_of(llm, params_of(form)) for form in FORMS}
        needed = len(filled)
        filled.clear()
        assert {form: texts_of(llm, params_of(form, **every)) for form in FORMS} == few
        assert 0 < needed < len(filled)


def test_what_is_forced_is_verified_in_one_pass(folders: Folders) -> None:
    """One text alone has the form: the pass of the prompt and one more."""
    params = SamplingParams(max_tokens=60, structured_outputs={"regex": "abcdefabcdefab12cd"})
    with open_llm(folders, "suffix") as llm:
        [output] = llm.generate([PROMPTS[1]], params, use_tqdm=False)
        assert output.outputs[0].text == "abcdefabcdefab12cd"
        assert output.outputs[0].finish_reason == "stop"
        assert output.metrics["num_forward_passes"] <= 2
        assert output.metrics["accepted_grammar_tokens"] >= 14
        assert output.metrics["rejected_grammar_tokens"] == 0
    with open_llm(folders, "none") as llm:
        [plain] = llm.generate([PROMPTS[1]], params, use_tqdm=False)
        assert plain.metrics["num_forward_passes"] == len(plain.outputs[0].token_ids)
        assert plain.outputs[0].token_ids == output.outputs[0].token_ids


def test_several_outputs_walk_by_themselves(folders: Folders) -> None:
    with open_llm(folders, "suffix") as llm:
        [output] = llm.generate([PROMPTS[2]], params_of("json", n=3, **SAMPLED), use_tqdm=False)
        texts = {choice.text for choice in output.outputs}
        assert len(texts) > 1
        for choice in output.outputs:
            if choice.finish_reason == "stop":
                assert list(json.loads(choice.text)) == ["name", "kind", "list"]


@pytest.fixture(scope="module")
def engine(folders: Folders) -> Iterator[LLM]:
    with open_llm(folders, "suffix", HOST) as llm:
        yield llm


RECURSIVE = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("form", "match"),
    [
        ({"json": {"type": "string", "not": {"const": "a"}}}, 'cannot be compiled: .*"not"'),
        ({"json": RECURSIVE}, "requires itself without end; make what refers"),
        ({"json": False}, "no finite text has this schema"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "cannot be compiled"),
        ({"json": {"$ref": "#/definitions/none"}}, "cannot be compiled"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"[^\s\S]"}, "allows no text"),
        ({"grammar": "start: nothing"}, "cannot be compiled"),
        ({"grammar": "root ::= ("}, "cannot be compiled"),
        ({"json": {"type": 5}}, "type must be a string"),
        ({"json": {"type": ["object", 5], "properties": {}}}, "cannot be compiled"),
        ({"json": {"type": "object", "properties": {"a": {}}, "required": [["a"]]}}, "required"),
        (
            {"json": {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]}},
            "requires itself without end",
        ),
        (
            {
                "json": {
                    "type": "object",
                    "patternProperties": {"^a": {"$ref": "#"}},
                    "additionalProperties": False,
                    "minProperties": 1,
                }
            },
            "requires itself without end",
        ),
        (
            {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(700)}}},
            "too large or too ambiguous",
        ),
        ({"grammar": 'start: "a" start'}, "too large or too ambiguous"),
        (
            {"grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(501))},
            "has 502 rules in GBNF, limit 500",
        ),
    ],
)
def test_what_cannot_be_held_is_refused(engine: LLM, form: Any, match: str) -> None:
    with pytest.raises(RequestError, match=f"structured_outputs.*{match}"):
        engine.generate([PROMPTS[0]], SamplingParams(structured_outputs=form), use_tqdm=False)
    assert engine.get_metrics()["executor"]["running"] == 0
    assert engine.engine.num_unfinished == 0


def test_compiling_that_takes_too_long_is_refused(
    engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.0)
    monkeypatch.setattr(grammar.GrammarCompiler, "_match", lambda *_: __import__("time").sleep(0.3))
    params = SamplingParams(structured_outputs={"regex": "abc[0-9]"})
    with pytest.raises(RequestError, match=r"compiling it takes longer than 0\.0 seconds"):
        engine.generate([PROMPTS[0]], params, use_tqdm=False)


@pytest.mark.parametrize("can_renew", [False, True])
def test_a_grammar_that_fails_ends_its_request_alone(
    folders: Folders, plain: Any, monkeypatch: pytest.MonkeyPatch, can_renew: bool
) -> None:
    """If another matcher, which shares nothing with those of others, fails as well, or takes too
    long to make. Later requests get a grammar that is compiled anew."""
    from specdec_ext.engine import grammar_masks

    made: list[Any] = []
    start = grammar_masks.GrammarMasks.start

    def remember(self: Any, rid: int, compiled: Any, **options: Any) -> None:
        start(self, rid, compiled, **options)
        made.append(self._outputs[rid])

    monkeypatch.setattr(grammar_masks.GrammarMasks, "start", remember)
    with open_llm(folders, "suffix") as llm:
        state = llm.engine.submit(llm.engine.resolve(PROMPTS[1], params_of("json")))
        made[0].matcher.consume_token(END)  # which it does not allow
        if not can_renew:
            made[0].grammar._make = None
        [other] = llm.generate([PROMPTS[2]], params_of("json"), use_tqdm=False)
        assert list(other.outputs[0].token_ids) == plain["json", False][2]
        llm.engine.run([state])
        if can_renew:
            assert state.token_ids == plain["json", False][1] and state.error is None
        else:
            assert state.finish_reason == "error"
            assert "the grammar of structured_outputs failed" in str(state.error)
        [again] = llm.generate([PROMPTS[1]], params_of("json"), use_tqdm=False)
        assert list(again.outputs[0].token_ids) == plain["json", False][1]
        assert made[2].grammar is not made[0].grammar
        check(llm)


def chain_of_references(length: int) -> dict[str, Any]:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "integer"}}}


def test_deep_forms_need_no_deep_stack_of_the_caller(engine: LLM) -> None:
    """A stack that overflows would end the process."""
    rules = "".join(f"a{i}: a{i + 1}\n" for i in range(10_000))
    forms: list[dict[str, Any]] = [
        {"json": chain_of_references(6000)},
        {"grammar": f'start: a0\n{rules}a10000: "a"\n'},
        {"choice": [f"t{i}" for i in range(6000)]},
    ]
    for form in forms:
        params = SamplingParams(max_tokens=4, structured_outputs=form)
        [output] = engine.generate([PROMPTS[0]], params, use_tqdm=False)
        assert output.outputs[0].error is None


def test_needs(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer, an end token, llguidance: named where one is missing."""
    params = params_of("regex")
    bare = tmp_path / "bare"
    shutil.copytree(folders["target"], bare)
    (bare / "tokenizer.json").unlink()
    (bare / "tokenizer_config.json").unlink()
    with LLM(bare) as llm, pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate([[1]], params, use_tqdm=False)
    with open_llm(folders, "none") as llm:
        monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
        with pytest.raises(RequestError, match=r"run: pip install specdec_ext\[grammar\]"):
            llm.generate([[1]], params, use_tqdm=False)


def test_synthetic_acceptance_holds_no_form(folders: Folders) -> None:
    spec = {"method": "suffix", "synthetic_acceptance_rates": [0.5]}
    with (
        pytest.warns(UserWarning),
        open_llm(folders, spec) as llm,
        pytest.raises(RequestError, match="synthetic"),
    ):
        llm.generate([[1]], params_of("regex"), use_tqdm=False)


@pytest.mark.parametrize(
    ("form", "error", "match"),
    [
        ("a", RequestError, "expected an object"),
        ({"json": {}, "regex": "a"}, RequestError, "json and regex: give one"),
        ({"jsn": {}}, RequestError, "jsn"),
        ({"json": "{"}, RequestError, "not JSON"),
        ({"json": 3}, RequestError, "expected a JSON schema"),
        ({"json": {"const": "a" * 300_000}}, RequestError, r"characters, limit 262144"),
        ({"regex": ""}, RequestError, "not empty"),
        ({"choice": []}, RequestError, "a list of texts"),
        ({"choice": ["a", ""]}, RequestError, "a list of texts"),
        ({"json_object": 1}, RequestError, "expected true or false"),
        ({"structural_tag": "{}"}, UnsupportedRequestError, "not supported"),
        ({"whitespace_pattern": " "}, RequestError, "none of json"),
        ({"type": "json_schema"}, RequestError, "json_schema"),
        ({"type": "xml"}, RequestError, "expected"),
    ],
)
def test_malformed(form: Any, error: type[RequestError], match: str) -> None:
    with pytest.raises(error, match=match):
        SamplingParams(structured_outputs=form)


def test_shapes_of_one_constraint() -> None:
    schema = {"type": "integer"}

    @dataclasses.dataclass
    class VllmShape:
        json: Any = None
        regex: str | None = None
        choice: Any = None
        grammar: str | None = None
        json_object: bool | None = None
        disable_fallback: bool = False
        disable_any_whitespace: bool = True
        disable_additional_properties: bool = False
        whitespace_pattern: str | None = None
        structural_tag: str | None = None

    named = {"name": "n", "schema": schema, "strict": True}
    forms = [
        {"json": schema},
        {"json": json.dumps(schema)},
        VllmShape(json=schema),
        {"type": "json_schema", "json_schema": named},
        {"type": "json_schema", **named},
    ]
    constraints = {SamplingParams(structured_outputs=form).structured_outputs for form in forms}
    assert len(constraints) == 1
    anything = {
        SamplingParams(structured_outputs={"json": x}).structured_outputs for x in (True, {})
    }
    assert len(anything) == 1
    for nothing in (None, {}, {"type": "text"}, {"json": None}):
        assert SamplingParams(structured_outputs=nothing).structured_outputs is None
    by_name = SamplingParams.from_dict({"guided_decoding": {"json": schema}})
    assert by_name.structured_outputs in constraints
    with pytest.raises(RequestError, match="ignore_eos = True with structured_outputs"):
        SamplingParams(structured_outputs={"json": schema}, ignore_eos=True)

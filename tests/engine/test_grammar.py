"""Output in a form: masked speculative text is masked plain text, by every method everywhere."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec_ext import LLM, RequestError, SamplingParams, UnsupportedRequestError, _core
from specdec_ext.engine import grammar_masks
from specdec_ext.request.structured_outputs import check_structured_outputs
from specdec_ext.text import grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-f]{1,6}$"},
        "kind": {"enum": ["abc", "abd"]},
        "list": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "kind", "list"],
    "additionalProperties": False,
}
FORMS: dict[str, Any] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": "(ab|cd){3,9}[0-9]{2}"},
    "choice": {"choice": ["abcdef", "abcabc", "123"]},
    "lark": {"grammar": 'start: item ("," item)* "]"\nitem: "ab" | "12" | "[" item "]"'},
    "gbnf": {"grammar": 'root ::= item ("," item)* "]"\nitem ::= "ab" | "[" item "]"'},
}
END = VOCAB - 1


def add_tokenizer(folder: Path) -> None:
    """48 tokens: what JSON is made of, two merged pairs, the end of a text."""
    signs = '{}[]":,-.Ġ' + "0123456789" + "abcdefghijklmnopqrstuvwx"
    vocab = {sign: i for i, sign in enumerate(signs)}
    for pair in ("ab", '":', "12"):
        vocab[pair] = len(vocab)
    core = Tokenizer(models.BPE(vocab, [("a", "b"), ('"', ":"), ("1", "2")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    assert len(vocab) == END and core.token_to_id("<|end|>") == END
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>").save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, "eos_token_id": END}))


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


@pytest.mark.parametrize("form", FORMS)
def test_a_token_is_allowed_where_its_bit_is_set(engine: LLM, form: str) -> None:
    """At every place of random texts, for every token: forced text, too, has one token alone."""
    rng = np.random.default_rng(3)
    constraint = check_structured_outputs(FORMS[form])
    assert engine.engine._compiler is not None
    for _ in range(4):
        output = grammar_masks._Output(engine.engine._compiler.compile(constraint), True)
        for _ in range(30):
            tree = SimpleNamespace(tokens=[0], parents=[-1], fixed=1)
            walk = grammar_masks._TreeWalk(output, tree)
            walk.run(fill=True)
            bits = np.unpackbits(walk.masks[0].view(np.uint8), bitorder="little")[:VOCAB]
            for token in range(VOCAB):
                probe = grammar_masks._TreeWalk(output, tree)
                assert probe._allows([], token) == bool(bits[token])
            token = int(rng.choice(np.flatnonzero(bits)))
            if token == END:
                break
            output.follow([token])


def mask_behind(compiled: grammar.Grammar, text: list[int]) -> np.ndarray:
    """What may follow a text, one bool per token, by a matcher that has seen nothing else."""
    matcher = compiled.matcher()
    assert matcher.consume_tokens(text)
    if matcher.is_stopped():
        return np.arange(VOCAB) == END
    words = np.zeros(compiled.words, dtype=np.uint32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)


def grown_tree(rng: np.random.Generator, compiled: grammar.Grammar, text: list[int]) -> Any:
    """Up to 12 drafts, mostly tokens that are allowed; siblings differ."""
    tokens, parents, paths = [text[-1] if text else 0], [-1], [[]]
    for _ in range(int(rng.integers(0, 13))):
        parent = int(rng.integers(max(0, len(tokens) - 3), len(tokens)))
        mask = np.zeros(VOCAB, dtype=bool)
        if paths[parent] is not None and END not in paths[parent]:
            mask = mask_behind(compiled, text + paths[parent])
        choice = np.flatnonzero(mask) if mask.any() and rng.random() < 0.8 else np.arange(VOCAB)
        token = int(rng.choice(choice))
        if any(parents[i] == parent and tokens[i] == token for i in range(1, len(tokens))):
            continue
        paths.append(paths[parent] + [token] if mask[token] else None)
        tokens.append(token)
        parents.append(parent)
    return SimpleNamespace(tokens=tokens, parents=parents, paths=paths, fixed=1)


def kept_of(tree: Any, kept: list[int]) -> Any:
    """The tree that a cut leaves."""
    nodes = [i for i, k in enumerate(kept) if k]
    parents = [-1, *(nodes.index(tree.parents[i]) for i in nodes[1:])]
    return SimpleNamespace(
        tokens=[tree.tokens[i] for i in nodes], parents=parents,
        paths=[tree.paths[i] for i in nodes], fixed=1,
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_walks_are_those_of_fresh_matchers(engine: LLM, form: str) -> None:
    """A matcher that stays where the last walk left it: cuts, masks and what is forced are those
    of matchers that begin with the text each time."""
    rng = np.random.default_rng(11)
    assert engine.engine._compiler is not None
    compiled = engine.engine._compiler.compile(check_structured_outputs(FORMS[form]))
    masked = followed = 0
    for _ in range(30):
        output, text = grammar_masks._Output(compiled, True), []
        while END not in text and len(text) < 40:
            fresh = grammar_masks._Output(compiled, True)
            fresh.follow(text)
            if rng.random() < 0.5:
                assert output.chain() == fresh.chain()
            tree = grown_tree(rng, compiled, text)
            kept = grammar_masks._TreeWalk(output, tree).run(fill=False)
            assert kept == [int(path is not None) for path in tree.paths]
            if rng.random() < 0.5:  # a step that was interrupted begins again
                assert output.chain() == fresh.chain()
            tree = kept_of(tree, kept)

            if rng.random() < 0.2:  # where tokens are drawn
                walk = grammar_masks._TreeWalk(output, tree)
                assert all(walk.run(fill=True))
                for node, path in enumerate(tree.paths):
                    bits = np.unpackbits(walk.masks[node].view(np.uint8), bitorder="little")
                    wanted = np.arange(VOCAB) == END
                    if END not in path:
                        wanted = mask_behind(compiled, text + path)
                    assert np.array_equal(bits[:VOCAB].astype(bool), wanted)

            # Scores that mostly favour drafts, some of them tokens that are not allowed.
            scores = rng.standard_normal((len(tree.tokens), VOCAB)).astype(np.float32)
            for node, parent in enumerate(tree.parents[1:], 1):
                scores[parent, tree.tokens[node]] += 4
            walk = grammar_masks._TreeWalk(output, tree)
            walk.follow_best(scores)
            node, path, chosen = 0, [], []
            while node >= 0:
                wanted = mask_behind(compiled, text + path)
                best = int(np.where(wanted, scores[node], -np.inf).argmax())
                bits = np.ones(VOCAB, dtype=bool)
                if len(walk.masks):
                    row = np.unpackbits(walk.masks[node].view(np.uint8), bitorder="little")
                    bits = row[:VOCAB].astype(bool)
                if not bits.all():
                    assert np.array_equal(bits, wanted)
                    masked += 1
                assert int(np.where(bits, scores[node], -np.inf).argmax()) == best
                chosen.append(best)
                path = [*path, best]
                node = -1 if best == END else next(
                    (i for i, mine in enumerate(tree.paths) if mine == path), -1
                )  # fmt: skip
            followed += len(chosen) > 1
            output.follow(chosen)
            text = text + chosen
    assert masked > 20 and followed > 20


def test_best_allowed() -> None:
    """Against NumPy: words of all bits, of none and of some; equal scores; the vocabulary's end."""
    rng = np.random.default_rng(5)
    for vocab in (1, 31, 32, 33, 48, 1000, 4099):
        words = -(-vocab // 32)
        for _ in range(40):
            scores = rng.integers(-3, 3, vocab).astype(np.float32)
            kinds = rng.integers(0, 3, words)
            mask = np.where(kinds == 0, 0, np.where(kinds == 1, -1, rng.integers(1, 2**31, words)))
            mask = mask.astype(np.int32)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab].astype(bool)
            expected = int(np.where(bits, scores, -np.inf).argmax()) if bits.any() else None
            assert _core.best_allowed(scores, mask) == expected
            if bits.any():
                for bad in (np.nan, np.inf):
                    spoilt = scores.copy()
                    spoilt[rng.choice(np.flatnonzero(bits))] = bad
                    assert _core.best_allowed(spoilt, mask) is None
                scores[bits] = -np.inf
                assert _core.best_allowed(scores, mask) is None
            scores[~bits] = np.nan  # not looked at
            scores[bits] = 1.0
            assert _core.best_allowed(scores, mask) == (bits.argmax() if bits.any() else None)
    with pytest.raises(ValueError, match="a bit for each"):
        _core.best_allowed(np.zeros(33, dtype=np.float32), np.zeros(1, dtype=np.int32))


@pytest.mark.parametrize(("bad", "rows"), [(np.nan, 2), (np.inf, 2), (5.0, 0)])
def test_a_row_without_a_best_token_is_masked(engine: LLM, bad: float, rows: int) -> None:
    """NaN has no order: what the executor chooses there and below has to be allowed."""
    assert engine.engine._compiler is not None
    compiled = engine.engine._compiler.compile(check_structured_outputs(FORMS["regex"]))
    (token, *_), other = np.flatnonzero(mask_behind(compiled, [])), END
    path = [int(token)]
    tree = SimpleNamespace(tokens=[0, *path], parents=[-1, 0], fixed=1)
    scores = np.zeros((2, VOCAB), dtype=np.float32)
    scores[0, token] = bad
    scores[1, np.flatnonzero(mask_behind(compiled, path))[0]] = 5.0
    walk = grammar_masks._TreeWalk(grammar_masks._Output(compiled, True), tree)
    walk.follow_best(scores)
    assert len(walk.masks) == rows
    for mask, text in zip(walk.masks, ([], path), strict=False):
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
        assert np.array_equal(bits, mask_behind(compiled, text)) and not bits[other]


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


def test_a_grammar_that_fails_ends_its_request_alone(
    folders: Folders, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        [other] = llm.generate([PROMPTS[2]], params_of("json"), use_tqdm=False)
        assert list(other.outputs[0].token_ids) == plain["json", False][2]
        assert state.finish_reason == "error"
        assert "the grammar of structured_outputs failed" in str(state.error)
        check(llm)


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
    for nothing in (None, {}, {"type": "text"}, {"json": None}):
        assert SamplingParams(structured_outputs=nothing).structured_outputs is None
    by_name = SamplingParams.from_dict({"guided_decoding": {"json": schema}})
    assert by_name.structured_outputs in constraints
    with pytest.raises(RequestError, match="ignore_eos = True with structured_outputs"):
        SamplingParams(structured_outputs={"json": schema}, ignore_eos=True)

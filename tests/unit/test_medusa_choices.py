"""Choices in all their forms, the tree that follows from them, and every refusal."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.medusa_reference import attends, closure, leaf_paths, positions, random_tree
from specdec_ext import (
    ConfigError,
    MedusaDecodingConfig,
    RequestError,
    SamplingParams,
    _core,
)
from specdec_ext.config.medusa_choices import (
    MAX_TOP_K,
    check_choices,
    medusa_tree,
    parse_choices,
    prune_choices,
    published_trees,
)
from specdec_ext.config.parse import parse_speculative_config
from specdec_ext.request.speculation import resolve_speculation, with_defaults

# The example of the TensorRT-LLM documentation: four paths, nine choices, ten step tokens.
PATHS = [[0, 0, 0, 0], [0, 1, 0], [1, 0], [1, 1]]
NINE = [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]]


def parse(value: Any) -> Any:
    return parse_choices(value, "medusa_choices", ConfigError)


def test_the_documented_example() -> None:
    from_paths, from_list = parse(PATHS), parse(NINE)
    assert from_paths == from_list == tuple(map(tuple, NINE))
    tree = medusa_tree(from_paths)
    assert len(tree.choices) == 9
    assert len(tree.paths) == 4 and tree.depth == 4 and tree.top_k == (2, 2, 1, 1)
    assert tree.paths == ((0, 1, 3, 7, 9), (0, 1, 4, 8), (0, 2, 5), (0, 2, 6))
    assert tree.parents == (-1, -1, 0, 0, 1, 1, 2, 3, 6)


def check_tree(nodes: list[tuple[int, ...]]) -> None:
    """Parents, mask, positions and paths against their definitions."""
    tree = medusa_tree(tuple(nodes))
    rows = len(nodes) + 1
    plan = _core.make_step_plan(
        [[0] * rows],
        parents=[[-1, *(p + 1 for p in tree.parents)]],
        kv_len=[11],
        page_table=[list(range(10))],
    )
    assert bool(plan.is_tree[0]) == any(p != i - 1 for i, p in enumerate(tree.parents))
    words = np.asarray(plan.mask)[:rows].astype(np.uint64)
    bits = [[bool(int(row[j // 32]) >> (j % 32) & 1) for j in range(rows)] for row in words]
    # A chain needs no mask and gets none.
    assert not plan.is_tree[0] or bits == attends(nodes)
    assert [int(p) - 11 for p in np.asarray(plan.positions)[:rows]] == positions(nodes)
    assert [list(path) for path in tree.paths] == leaf_paths(nodes)
    assert tree.depth == max(map(len, nodes))
    for head, count in enumerate(tree.top_k):
        assert count == 1 + max(n[head] for n in nodes if len(n) > head)


@pytest.mark.parametrize("name", published_trees())
def test_published_trees(name: str) -> None:
    choices = parse(name)
    assert choices == published_trees()[name]
    assert len(choices) == 63 and max(map(len, choices)) <= 4
    # They are sorted by their authors' estimates, parents first: that order is kept.
    assert parse([list(c) for c in choices]) == choices
    check_tree(list(choices))
    leaves = [c for c in choices if not any(o[:-1] == c for o in choices)]
    assert set(parse(leaves)) == set(choices)


def test_random_trees() -> None:
    rng = random.Random(3)
    for number in range(3000):
        nodes = random_tree(rng, rng.choice([4, 20, 127]), rng.choice([1, 3, 6]), 5)
        if number % 10 == 0 or len(nodes) < 30:
            check_tree(nodes)
        assert parse([list(n) for n in nodes]) == tuple(nodes)
        shuffled = rng.sample(nodes, len(nodes))
        again = parse([list(n) for n in shuffled])
        assert set(again) == set(nodes)
        assert all(c[:-1] in ((), *again[:i]) for i, c in enumerate(again))
        leaves = [n for n in nodes if not any(m[:-1] == n for m in nodes)]
        assert set(parse(leaves)) == closure(leaves) == set(nodes)
        assert parse(json.dumps(nodes)) == tuple(nodes)
        braces = ",".join("{" + ",".join(map(str, n)) + "}" for n in nodes)
        assert parse(braces) == tuple(nodes)


@pytest.mark.parametrize(
    "text",
    [
        "[[0],[1],[0,0]]",
        "{0},{1},{0,0}",
        "{{0},{1},{0,0}}",
        "((0,),(1,),(0,0))",
        " [0], [1],[0, 0] ",
    ],
)
def test_text(text: str) -> None:
    assert parse(text) == ((0,), (1,), (0, 0))


def test_files(tmp_path: Path) -> None:
    expected = ((0,), (1,), (0, 0))
    for name, text in {
        "a.json": "[[0],[1],[0,0]]",
        "b.json": '{"medusa_choices": [[0],[1],[0,0]]}',
        "c.yaml": "medusa_choices:\n- [0]\n- [1]\n- [0, 0]\n",
        "d.txt": "{0},{1},{0,0}\n",
        "e.yml": "- [0]\n- [1]\n- [0, 0]\n",
    }.items():
        (tmp_path / name).write_text(text)
        assert parse(tmp_path / name) == expected, name
        assert parse(str(tmp_path / name)) == expected
    (tmp_path / "name.txt").write_text("zephyr_stage2\n")
    (tmp_path / "name.yaml").write_text("medusa_choices: zephyr_stage2\n")
    assert parse(tmp_path / "name.txt") == parse(tmp_path / "name.yaml") == parse("zephyr_stage2")


STAR = [[i] for i in range(64)]
BAD: dict[str, tuple[Any, str]] = {
    "no list": (7, r"medusa_choices = 7: expected a list of choices, got int"),
    "mapping": ({"0": 1}, "expected a list of choices, got dict"),
    "empty": ([], "is empty; give at least one choice"),
    "empty choice": ([[0], []], r"\[1\] = \[\] has 0 ranks, allowed 1..32; the root is no choice"),
    "flat": ([0, 1], r"medusa_choices\[0\] = 0: expected a list of ranks, got int"),
    "text inside": (["0"], "expected a list of ranks, got str"),
    "float": ([[0.0]], r"medusa_choices\[0\] = \[0.0\]: rank = 0.0: expected an integer"),
    "bool": ([[True]], "expected an integer"),
    "negative": ([[0], [-1]], r"medusa_choices\[1\] = \[-1\]: rank = -1: out of range"),
    "rank": ([[0], [64]], r"medusa_choices\[1\] = \[64\]: rank = 64: .* 0..63"),
    "depth": ([[0] * 33], "has 33 ranks, allowed 1..32"),
    "duplicate": ([[0], [1], [0]], r"\[2\] = \[0\] is a duplicate of .*medusa_choices\[0\]"),
    "gap": ([[0], [0, 1, 0], [0, 1, 0, 0]], r"\[1\] = \[0, 1, 0\]: its parent \[0, 1\] is not"),
    "unknown parent": ([[0], [0, 0], [1, 0]], r"\[2\] = \[1, 0\]: its parent \[1\] is not among"),
    "too many": ([*STAR, *[[0, i] for i in range(64)]], "has 128 choices, limit 127"),
    "too many implied": ([[i, 0] for i in range(64)], "has 128 choices, limit 127"),
    "far too many": ([[0]] * 5000, "has 5000 choices, limit 127"),
    "unknown name": ("mc_sim_8b", "nor a published tree"),
    "no brackets": ("0,1", "neither a list such as"),
    "unbalanced": ("[[0],[1]", "not a list of choices"),
    "nothing": ("", "neither a list such as"),
    "no file": ("/nowhere/at/all.json", "cannot be read"),
    "long text": ("[" * 70000, "has 70000 characters, limit 65536"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_choices_are_refused(case: str) -> None:
    value, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        parse(value)
    with pytest.raises(RequestError, match=message):
        SamplingParams(medusa_choices=value)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    for name, text in {"a.json": "[{", "b.yaml": "x: 1", "c.txt": "tree", "d.yaml": ""}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=rf"{name}.*(expected|not) a list of choices"):
            parse(tmp_path / name)
    (tmp_path / "e.json").write_text("[[0],[0]]")
    with pytest.raises(ConfigError, match=r"e\.json'\)\[1\] = \[0\] is a duplicate"):
        parse(tmp_path / "e.json")
    (tmp_path / "f.json").write_text(" " * 70000)
    with pytest.raises(ConfigError, match="70000 bytes, limit 65536"):
        parse(tmp_path / "f.json")


def test_limits_name_the_choice() -> None:
    choices = parse(NINE)
    check_choices(choices, "f", ConfigError, num_heads=4, top_k=2, max_nodes=9)
    with pytest.raises(ConfigError, match=r"f: choice \[0, 0, 0, 0\] needs 4 heads, there are 3"):
        check_choices(choices, "f", ConfigError, num_heads=3)
    with pytest.raises(ConfigError, match=r"choice \[1\] has rank 1, ranks are 0..0"):
        check_choices(choices, "f", ConfigError, top_k=1)
    with pytest.raises(ConfigError, match=r"9 choices, the first too many is \[0, 1, 0\], limit 7"):
        check_choices(choices, "f", ConfigError, max_nodes=7)
    assert prune_choices(choices, 2) == choices[:6]
    assert MAX_TOP_K == 64


# -- the configuration ----------------------------------------------------------------------------


def header(folder: Path, names: list[str], file: str = "medusa_lm_head.safetensors") -> Path:
    """A safetensors file with a header alone: enough to count heads."""
    entries = {n: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in names}
    raw = json.dumps(entries).encode()
    (folder / file).write_bytes(struct.pack("<Q", len(raw)) + raw)
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ["0.0.linear.weight", "1.0.linear.weight", "1.1.weight", "2.0.linear.weight"],
        ["medusa_head.2.0.linear.weight", "model.layers.7.mlp.up_proj.weight"],
        ["blocks.0.layers.0.weight", "blocks.2.layers.0.weight", "lm_heads.2.weight"],
        ["medusa_heads.blocks.2.layers.1.weight", "token_map"],
    ],
)
def test_the_default_tree_follows_the_heads(tmp_path: Path, names: list[str]) -> None:
    config = MedusaDecodingConfig(header(tmp_path, names))
    assert config.max_draft_path_len == 3
    assert config.medusa_choices == prune_choices(published_trees()["mc_sim_7b_63"], 3)
    assert MedusaDecodingConfig(tmp_path, num_medusa_heads=1).max_draft_path_len == 1
    (tmp_path / "config.json").write_text('{"medusa_choices": [[0],[0,0],[0,0,0],[0,0,0,0]]}')
    assert MedusaDecodingConfig(tmp_path).medusa_choices == ((0,), (0, 0), (0, 0, 0))
    (tmp_path / "config.json").write_text('{"medusa_choices": [[0],[0]]}')
    with pytest.raises(ConfigError, match=r"config\.json: medusa_choices\[1\] = \[0\] is a dup"):
        MedusaDecodingConfig(tmp_path)


def test_configurations_in_all_forms(tmp_path: Path) -> None:
    expected = MedusaDecodingConfig(tmp_path, NINE, num_medusa_heads=4)
    assert (expected.max_draft_len, expected.max_draft_path_len) == (9, 4)
    for value in (
        {"method": "medusa", "model": str(tmp_path), "medusa_choices": PATHS,
         "num_medusa_heads": 4},
        {"decoding_type": "Medusa", "speculative_model_dir": str(tmp_path),
         "medusa_choices": "{0,0,0,0},{0,1,0},{1,0},{1,1}", "medusa_num_heads": 4},
        {"medusa_choices": PATHS, "model": str(tmp_path), "num_medusa_heads": 4},
        json.dumps({"method": "medusa", "medusa_model": str(tmp_path), "choices": NINE,
                    "num_medusa_heads": 4}),
    ):  # fmt: skip
        assert parse_speculative_config(value) == expected
    round_trip = expected.to_dict()
    assert json.loads(json.dumps(round_trip)) == round_trip
    assert parse_speculative_config(round_trip) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": 3}, r"MedusaDecodingConfig.model = 3: expected the path"),
        ({"model": "/nowhere/heads"}, "no such folder or file"),
        ({"num_medusa_heads": 0}, "num_medusa_heads = 0: out of range"),
        ({"num_medusa_heads": 3}, r"choice \[0, 0, 0, 0\] needs 4 heads, there are 3"),
        ({"medusa_choices": [[0], [0]]}, "is a duplicate"),
        ({"acceptance": "greedy"}, "acceptance = 'greedy': expected one of"),
        ({"posterior_threshold": 0.5}, "a parameter of acceptance = 'typical', here it is 'exact_"),
        ({"acceptance": "typical", "posterior_threshold": 1.5}, "threshold = 1.5: out of range"),
        ({"acceptance": "typical", "posterior_alpha": 0}, "alpha = 0.0: out of range, allowed > 0"),
        ({"dtype": "int7"}, "dtype"),
        ({"adaptive": 1}, "adaptive = 1: expected true or false"),
    ],
)
def test_bad_configurations_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        MedusaDecodingConfig(**{"model": tmp_path, "medusa_choices": NINE, **fields})


def test_acceptance_is_the_default_of_requests(tmp_path: Path) -> None:
    config = MedusaDecodingConfig(tmp_path, NINE, acceptance="typical", posterior_alpha=0.5)
    assert (config.posterior_threshold, config.posterior_alpha) == (0.09, 0.5)
    asked = with_defaults(SamplingParams(temperature=1.0), config)
    assert (asked.acceptance, asked.posterior_threshold, asked.posterior_alpha) == (
        "typical", 0.09, 0.5,
    )  # fmt: skip
    for other in (
        SamplingParams(temperature=1.0, acceptance="rejection"),
        SamplingParams(speculative=False),
        SamplingParams(max_draft_len=0),
    ):
        assert with_defaults(other, config) is other
    exact = MedusaDecodingConfig(tmp_path, NINE)
    assert exact.posterior_alpha is None
    assert with_defaults(asked, exact) is asked


def test_a_request_stays_within_the_engine(tmp_path: Path) -> None:
    config = MedusaDecodingConfig(tmp_path, NINE, num_medusa_heads=4)
    kwargs, depth, options = resolve_speculation(SamplingParams(), config)
    assert kwargs == {"speculative": True, "max_draft_len": 9} and depth == 4
    assert options == {"medusa_choices": config.medusa_choices, "adaptive": True}
    kwargs, depth, options = resolve_speculation(
        SamplingParams(medusa_choices=[[0, 2], [5]], max_draft_len=2), config
    )
    assert kwargs == {"speculative": True, "max_draft_len": 2} and depth == 1
    assert options == {"medusa_choices": ((0,), (5,), (0, 2)), "adaptive": True}
    assert resolve_speculation(SamplingParams(max_draft_len=0), config) == (
        {"speculative": False},
        0,
        {},
    )
    for params, message in (
        ({"medusa_choices": "mc_sim_7b_63"}, r"has 63 choices, .* limit 9; use a smaller tree, or"),
        ({"medusa_choices": [[0] * 5]}, r"choice \[0, 0, 0, 0, 0\] needs 5 heads, there are 4"),
        ({"max_draft_len": 10}, "max_draft_len = 10 is greater than the engine's 9"),
        ({"lookahead_config": [2, 2, 1]}, "decodes with Medusa"),
    ):
        with pytest.raises(RequestError, match=message):
            resolve_speculation(SamplingParams(**params), config)
    with pytest.raises(RequestError, match="speculative = False but"):
        SamplingParams(speculative=False, medusa_choices=[[0]])
    with pytest.raises(RequestError, match="both set"):
        SamplingParams(lookahead_config=[2, 2, 1], medusa_choices=[[0]])


def test_without_shipped_heads_the_model_must_be_named(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("specdec_ext.config.medusa.SHIPPED_HEADS", tmp_path / "none")
    with pytest.raises(ConfigError, match="ships no Medusa heads; give the folder"):
        MedusaDecodingConfig()
    with pytest.raises(ConfigError, match="ships no Medusa heads"):
        parse_speculative_config("medusa")
    header(tmp_path, ["0.0.linear.weight"])
    monkeypatch.setattr("specdec_ext.config.medusa.SHIPPED_HEADS", tmp_path)
    assert parse_speculative_config("medusa").max_draft_path_len == 1

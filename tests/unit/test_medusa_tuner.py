"""The tuner against exhaustive search, the budget of the running engine, drawing, the command."""

from __future__ import annotations

import io
import itertools
import json
import random
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import ConfigError
from specdec_ext._core import StepCost
from specdec_ext.cli import main
from specdec_ext.config.medusa_choices import parse_choices
from specdec_ext.config.medusa_drawing import _fills, draw_png, tree_svg, tree_text
from specdec_ext.config.medusa_tuner import (
    best_tree,
    check_rates,
    likelihood,
    read_rates,
    tune_size,
)
from specdec_ext.config.methods import published_trees


def random_rates(rng: random.Random, heads: int, ranks: int) -> Any:
    rates = []
    for _ in range(heads):
        weights = [rng.random() ** 3 for _ in range(ranks + 1)]
        rates.append([w / sum(weights) for w in weights[:ranks]])
    return check_rates(rates, "rates")


def test_the_tree_is_the_best_of_all_trees() -> None:
    """Against every tree of that many nodes over 2 heads and 3 ranks: 12 possible nodes."""
    rng = random.Random(1)
    nodes = [n for d in (1, 2) for n in itertools.product(range(3), repeat=d)]
    for _ in range(6):
        rates = random_rates(rng, 2, 3)
        worth = {n: rates[0][n[0]] * (rates[1][n[1]] if len(n) > 1 else 1.0) for n in nodes}
        for size in range(1, 7):
            best = max(
                sum(worth[n] for n in chosen)
                for chosen in itertools.combinations(nodes, size)
                if all(len(n) == 1 or n[:1] in chosen for n in chosen)
            )
            tree = best_tree(rates, size)
            assert sum(p for _, p in tree) == pytest.approx(best, rel=1e-12)
            assert all(p == pytest.approx(worth[n]) == likelihood(n, rates) for n, p in tree)


def test_trees_are_nested_valid_and_sorted() -> None:
    rng = random.Random(2)
    for _ in range(200):
        rates = random_rates(rng, rng.randint(1, 5), rng.randint(1, 10))
        tree = best_tree(rates, 127)
        assert parse_choices([list(c) for c, _ in tree], "t", ConfigError)
        assert all(a >= b for (_, a), (_, b) in itertools.pairwise(tree))
        assert best_tree(rates, 9) == tree[:9]
        seen: set[Any] = {()}
        for choice, _ in tree:
            assert choice[:-1] in seen
            seen.add(choice)
    assert best_tree(((0.0, 0.3), (0.0,)), 5) == [((1,), 0.3)]
    assert best_tree(((0.0,),), 5) == []


def test_the_size_weighs_tokens_by_time() -> None:
    rates = check_rates([[0.5, 0.2, 0.1], [0.5, 0.2]], "rates")
    tree = best_tree(rates, 20)
    flat = tune_size(tree, StepCost({1: 1.0, 64: 1.0}))
    assert [s.nodes for s in flat] == list(range(len(tree) + 1))
    assert flat[-1].tokens == pytest.approx(1 + 0.8 * 1.7) and flat[-1].gain == flat[-1].tokens
    assert max(flat, key=lambda s: s.gain).nodes == len(tree)
    dear = tune_size(tree, StepCost({1: 1.0, 2: 2.0, 64: 64.0}))
    assert max(dear, key=lambda s: s.gain).nodes == 0
    # Rows are free up to 4 and dear behind; the heads cost half a step.
    steps = tune_size(tree, StepCost({1: 1.0, 4: 1.0, 5: 3.0}), draft_seconds=0.5)
    assert max(steps, key=lambda s: s.gain).nodes == 3
    assert steps[3].cost == pytest.approx(1.5) and steps[4].cost == pytest.approx(3.5)
    assert steps[6].cost == pytest.approx(3.5 + 2 * 2.0 / 4)  # behind the last point


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "expected a list with the rates of each head"),
        ([], "expected a list"),
        ([0.5], r"rates\[0\] = 0.5: expected a list of 1..64 rates"),
        ([[0.5], []], r"rates\[1\] = \[\]"),
        ([[0.5, 1.5]], r"rates\[0\]\[1\] = 1.5: out of range"),
        ([["a"]], "expected a number"),
        ([[0.5, 0.6]], r"rates\[0\] sums to 1.1000: a head's guesses exclude each other"),
    ],
)
def test_bad_rates_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rates(value, "rates")


def test_rates_files(tmp_path: Path) -> None:
    expected = ((0.5, 0.25), (0.5,))
    rows = [[0.5, 0.25], [0.5]]
    for name, content in {
        "a.json": rows,
        "b.json": {"guess_rates": rows},
        "config.json": {"model_type": "medusa", "training": {"guess_rates": rows}},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
        assert read_rates(tmp_path / name) == expected
    assert read_rates(tmp_path) == expected
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no guess_rates in it; measure them"):
        read_rates(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_rates(tmp_path / "none.json")


def test_drawings_show_every_node() -> None:
    choices = published_trees()["vicuna_7b_stage2"]
    probability = {c: 0.9 ** len(c) * 0.5 ** sum(c) for c in choices}
    root = xml.etree.ElementTree.fromstring(tree_svg(choices, probability))
    name = "{http://www.w3.org/2000/svg}"
    titles = [t.text or "" for t in root.iter(name + "title")]
    assert len(titles) == 64 and "golden token" in titles
    assert "[0], accepted 0.900" in titles
    centres = {(c.get("cx"), c.get("cy")) for c in root.iter(name + "circle")}
    assert len(centres) == 64, "no two nodes lie on each other"
    assert len(list(root.iter(name + "line"))) == 63
    fill = {t: c.get("fill") for t, c in zip(titles, root.iter(name + "circle"), strict=True)}
    assert fill["[0], accepted 0.900"] == "#08519c", "the likeliest is the darkest"
    assert len(tree_text(choices, probability).splitlines()) == 64
    assert "accepted" not in tree_svg(choices, {})


def test_command(tmp_path: Path, capsys: Any) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps([[0.6, 0.2, 0.05], [0.5, 0.1], [0.4]]))
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({"1": 0.02, "4": 0.021, "16": 0.06}))
    out, svg = tmp_path / "tree.json", tmp_path / "tree.svg"
    base = ["tree", "--rates", str(rates)]
    files = ["--output", str(out), "--draw", str(svg)]
    assert main([*base, "--step-cost", str(cost), "--json", *files]) == 0
    report = json.loads(capsys.readouterr().out)
    best = max(report["sizes"], key=lambda s: s["gain"])
    assert report["nodes"] == best["nodes"] == 3 and best["gain"] > 1.5
    assert report["medusa_choices"] == [[0], [0, 0], [1]]
    assert report["expected_tokens"] == pytest.approx(1 + 0.6 + 0.3 + 0.2)
    assert parse_choices(out, "f", ConfigError) == ((0,), (0, 0), (1,))
    assert svg.read_text().startswith("<svg")
    assert main([*base, "--nodes", "2"]) == 0
    assert "2 nodes, 3 step tokens, 1 paths, depth 2" in capsys.readouterr().out
    assert main([*base, "--step-cost", str(cost)]) == 0
    assert "<- best" in capsys.readouterr().out
    assert main(["tree", "--medusa-choices", "{0,0,0,0},{0,1,0},{1,0},{1,1}"]) == 0
    text = capsys.readouterr().out
    assert "9 nodes, 10 step tokens, 4 paths, depth 4, top-k per head [2, 2, 1, 1]" in text
    for argv, code, message in (
        (["tree"], 2, "no tree; give --medusa-choices"),
        ([*base, "--draw", "x.gif"], 2, "expected a file name in .svg or .png"),
        ([*base, "--nodes", "128"], 4, "--nodes = 128: out of range"),
        ([*base, "--step-cost", str(out)], 4, "expected a JSON file such as"),
        (["tree", "--medusa-choices", "x"], 4, "nor a published tree"),
        (["tree", "--measure", "--medusa-model", str(tmp_path)], 2, "--measure needs --input-file"),
        (["generate", "--medusa-choices", "[[0]]", "--prompt", "x"], 2, "needs --medusa-model"),
        (["generate", "--medusa-model", "/none", "--prompt", "x"], 4, "no such folder or file"),
        (
            ["generate", "--medusa", "--lookahead_config", "[2,2,1]", "--prompt", "x"],
            2,
            "each name a method",
        ),
    ):
        assert main(argv) == code, argv
        assert message in capsys.readouterr().err


def test_medusa_without_shipped_heads_is_one_clear_error(
    monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr("specdec_ext.config.medusa.SHIPPED_HEADS", tmp_path / "none")
    assert main(["generate", "--medusa", "--prompt", "x"]) == 4
    assert "ships no Medusa heads; give the folder" in capsys.readouterr().err


def test_png_shows_every_node_shaded() -> None:
    from matplotlib import image as image_module

    choices = [(0,), (1,), (0, 0), (1, 0)]
    probability = {(): 1.0, (0,): 0.9, (1,): 0.1, (0, 0): 0.5, (1, 0): 0.02}
    image = image_module.imread(io.BytesIO(draw_png(choices, probability)))
    assert image.shape[0] > 150 and image.shape[1] > 100
    assert float(image[0, 0, :3].min()) == 1.0  # white paper
    drawn = {tuple(round(float(c), 2) for c in p) for p in image[:, :, :3].reshape(-1, 3)}
    for fill, _ in _fills(choices, probability).values():
        wanted = tuple(round(int(fill[i : i + 2], 16) / 255, 2) for i in (1, 3, 5))
        assert wanted in drawn, fill


def test_png_needs_matplotlib(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    argv = ["tree", "--medusa-choices", "mc_sim_7b_63", "--draw", str(tmp_path / "x.png")]
    assert main(argv) == 4
    assert "PNG needs matplotlib; run: pip install matplotlib" in capsys.readouterr().err

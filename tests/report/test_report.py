"""specdec report: figures of every kind of result file, and the page in a real browser."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import result_files as files

from specdec_ext import ConfigError
from specdec_ext.cli import main
from specdec_ext.report.drawing import to_svg
from specdec_ext.report.figures import Bars, Curves, HeatMap, Shares, cumulative, survival
from specdec_ext.report.page import render_page
from specdec_ext.report.read import KINDS, read_result

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
Capture = pytest.CaptureFixture[str]

MADE: dict[str, Any] = {
    "latency": files.PAIR,
    "throughput": {**files.PAIR, "benchmark": "throughput", "plain": None, "speedup": None},
    "sweep": files.SWEEP,
    "serve": files.SERVE,
    "tune": files.TUNE,
    "summarize": files.SUMMARIZE,
    "gpu": files.GPU,
    "trace": files.TRACE,
    "training": files.TRAINING,
}
# The figures that a page has of a file of this kind.
SLUGS = {
    "latency": ["tokens-per-pass", "speed", "time", "acceptance-by-depth", "latency",
                "first-token", "further-token"],
    "throughput": ["tokens-per-pass", "speed", "time", "acceptance-by-depth", "latency",
                   "first-token", "further-token"],
    "sweep": ["speed-up", "speed-up-bars", "tokens-per-pass", "latency"],
    "serve": ["speed", "first-token", "further-token", "acceptance-length", "first-token-4",
              "further-token-4"],
    "tune": ["step-cost", "speed-up", "tokens-per-pass", "plane"],
    "summarize": ["rouge", "speed", "tokens-per-pass"],
    "gpu": ["step-cost", "speculation-speed", "tokens-per-pass", "time", "attn-b8-m64-g4"],
    "trace": ["steps", "acceptance-by-depth", "acceptance-by-source", "latency"],
    "training": ["loss", "learning-rate", "accuracy", "accuracy-by-kind", "speed"],
    "acceptance": ["tokens-per-pass", "acceptance", "drafts"],
    "end_to_end": [f"{slug}-{dtype}" for dtype in ("float32", "bfloat16")
                   for slug in ("speed-up", "against-others", "tokens-per-pass", "latency")],
    "model_drafters": ["speed-up-bfloat16", "tokens-per-pass-bfloat16", "latency-bfloat16"],
    "step_cost": ["step-cost"],
}  # fmt: skip


def file_of(kind: str, folder: Path) -> Path:
    """A file of this kind: the newest that was committed, or one that is made."""
    if kind not in MADE:
        return max(RESULTS.glob(f"{kind}-*.json"))
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(MADE[kind]))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_figures(kind: str, tmp_path: Path) -> None:
    result = read_result(file_of(kind, tmp_path))
    assert [figure.slug for figure in result.figures] == SLUGS[kind]
    for figure in result.figures:
        header, rows = figure.table()
        assert rows and all(len(row) == len(header) for row in rows)
        numbers = [cell for row in rows for cell in row[1:] if cell]
        assert numbers and not any("nan" in cell for cell in numbers)


def test_a_training_run_is_thinned_and_says_what_it_measured(tmp_path: Path) -> None:
    figures: dict[str, Any] = {
        f.slug: f for f in read_result(file_of("training", tmp_path)).figures
    }
    loss = figures["loss"].series["loss"]
    assert len(loss) == 334 and loss[0] == (3, pytest.approx(2.998)) and loss[-1][0] == 1000
    assert figures["loss"].note == "means of 3 steps"
    assert figures["accuracy"].series["position 2"] == [(500, 0.1), (1000, 0.2)]
    assert figures["speed"].series == {"tokens/s": [30.0, 20.0]}
    assert "1.50 times" in figures["speed"].note and "2.25 tokens per pass" in figures["speed"].note
    path = tmp_path / "bare.json"
    path.write_text(json.dumps({**files.TRAINING, "measured": None, "evaluations": []}))
    assert [f.slug for f in read_result(path).figures] == ["loss", "learning-rate"]


def test_the_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    figures = {f.slug: f for f in read_result(file_of("latency", tmp_path)).figures}
    depth = figures["acceptance-by-depth"]
    assert isinstance(depth, Bars) and depth.series == {"ngram": [0.75, 0.25]}
    latency = figures["latency"]
    assert isinstance(latency, Shares)
    assert latency.series == {"ngram": [1.0, 2.0, 1.5], "plain": [2.0, 4.0, 3.0]}
    heat = read_result(file_of("sweep", tmp_path)).figures[0]
    assert isinstance(heat, HeatMap) and heat.values == {
        ("1", "adaptive"): 1.1, ("1", "2"): 1.1, ("4", "adaptive"): 1.4, ("4", "2"): 1.4,
    }  # fmt: skip
    served = {f.slug: f for f in read_result(file_of("serve", tmp_path)).figures}
    speed, lengths = served["speed"], served["acceptance-length"]
    assert isinstance(speed, Bars) and isinstance(lengths, Bars)
    assert speed.categories == ["1", "4"]
    assert speed.series == {"suffix": [90.0, 120.0], "127.0.0.1:8001": [60.0, 110.0]}
    assert lengths.series == {"suffix": [2.5, 2.0], "127.0.0.1:8001": [None, None]}
    cost = read_result(file_of("gpu", tmp_path)).figures[0]
    assert isinstance(cost, Curves) and cost.series == {
        "1 requests, fast": [(1, 5.0), (84, 5.5)],
        "1 requests, floor": [(1, 2.5), (84, 2.75)],
        "1 requests, exact": [(84, 5.6)],
    }
    trace = {f.slug: f for f in read_result(file_of("trace", tmp_path)).figures}
    by_depth, by_source = trace["acceptance-by-depth"], trace["acceptance-by-source"]
    assert isinstance(by_depth, Bars) and isinstance(by_source, Bars)
    assert by_depth.series == {"verified": [3, 2, 1], "accepted": [2, 2, 0]}
    assert by_source.categories == ["suffix", "prediction"]
    assert by_source.series == {"verified": [5, 2], "accepted": [3, 2]}


def test_shares_by_hand() -> None:
    assert cumulative([3.0, 1.0]) == [(1.0, 0.5), (3.0, 1.0)]
    assert survival([1, 2, 1]) == [0.75, 0.25]
    assert survival([]) == survival([0, 0]) == []
    hundred = {"a": [float(i) for i in range(1, 101)]}
    header, rows = Shares("s", "t", "ms", "share", series=hundred).table()
    assert header == ["ms", "a"]
    assert [row[1] for row in rows] == ["10", "25", "50", "75", "90", "99"]


def test_what_a_file_does_not_have_is_not_plotted(tmp_path: Path) -> None:
    emulated = {**files.GPU, "emulated": True, "stages": {"test": {"cells": {}}}}
    path = tmp_path / "emulated.json"
    path.write_text(json.dumps(emulated))
    result = read_result(path)
    assert result.figures == [] and ("emulated", "on a CPU: no times") in result.facts
    assert "nothing that is plotted" in render_page("x", [result])
    bare = {key: value for key, value in files.PAIR.items() if not key.endswith("ts_ms")}
    bare["speculative_decoding"] = {"acceptance_histogram": [0]}
    path.write_text(json.dumps({**bare, "plain": None}))
    assert [f.slug for f in read_result(path).figures] == [*SLUGS["latency"][:3], "latency"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"x\.json: not JSON"),
        ("[]", r"no key 'benchmark'.*specdec bench latency.*benchmarks\.step_cost"),
        ('{"benchmark": "draft_lookup"}', r"benchmark = 'draft_lookup'; a report is made of"),
        ('{"benchmark": ["x"]}', r"benchmark = \['x'\]"),
        ('{"benchmark": "latency"}', r"not as specdec bench latency writes it .*KeyError: 'plain'"),
        ('{"benchmark": "gpu", "stages": 3}', "not as benchmarks/gpu/run.sh writes it"),
    ],
)
def test_other_files_are_one_error(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_result(path)


def test_refusals_of_the_command(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "none.json"), "-o", str(page)]) == 4
    assert "none.json: cannot be read: No such file" in capsys.readouterr().err
    good = str(file_of("tune", tmp_path))
    (tmp_path / "other.json").write_text("{}")
    assert main(["report", good, str(tmp_path / "other.json"), "-o", str(page)]) == 4
    assert not page.exists()
    (tmp_path / "file").write_text("")
    assert main(["report", good, "-o", str(tmp_path / "file" / "page.html")]) == 2
    assert "no such folder" in capsys.readouterr().err
    nowhere = tmp_path / "nowhere" / "deep"
    for where in (["-o", str(nowhere / "page.html")], ["--pictures", str(nowhere)],
                  ["--pictures", str(tmp_path / "file")], ["-o", good]):  # fmt: skip
        assert main(["report", good, *where]) == 2, where
        words = capsys.readouterr().err
        assert re.search("no such folder .*make it first|is no folder|command reads", words), words
    assert not nowhere.parent.exists() and json.loads(Path(good).read_text())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", good, "-o", str(page)]) == 4
    assert "pip install 'specdec_ext[plots]'" in capsys.readouterr().err


def test_a_result_that_an_editor_has_marked(tmp_path: Path) -> None:
    path = file_of("sweep", tmp_path)
    figures = len(read_result(path).figures)
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert len(read_result(path).figures) == figures


def test_pictures(tmp_path: Path, capsys: Capture) -> None:
    source = str(file_of("acceptance", tmp_path))
    assert main(["report", source, "--pictures", str(tmp_path / "p")]) == 0
    made = sorted((tmp_path / "p").iterdir())
    ends = [path.name.rpartition("-")[2] for path in made]
    assert ends == ["acceptance.svg", "drafts.svg", "pass.svg"]
    text = made[2].read_text()
    assert text.startswith("<?xml") and ">Tokens per forward pass</title>" in text
    assert ">humaneval</text>" in text, "text is text, not outlines"
    assert "3 plots of 1 file:" in capsys.readouterr().out
    assert not Path("report.html").exists()


def test_texts_cannot_leave_their_place() -> None:
    hostile = '</title><script>alert(1)</script>" onload="x'
    figure = Bars("s", hostile, hostile, hostile, hostile, [hostile], {hostile: [1.0]})
    svg = to_svg(figure, "p")
    tags = re.findall(r"<[^>]*>", re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL))
    assert tags and not any("script" in tag or "onload" in tag for tag in tags)
    assert svg == to_svg(figure, "p"), "the same figure is the same text"


def test_the_page_in_a_browser(browser: Any, tmp_path: Path) -> None:
    """All kinds in one page: every plot is shown, nothing is loaded, nothing is complained of."""
    sources = [str(file_of(kind, tmp_path)) for kind in KINDS]
    target = tmp_path / "page.html"
    assert main(["report", *sources, "-o", str(target), "--title", "A <b>title</b>"]) == 0
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    problems: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(target.as_uri())
    slugs = page.evaluate("[...document.querySelectorAll('figure')].map(f => f.dataset.figure)")
    assert slugs == [slug for kind in KINDS for slug in SLUGS[kind]]
    sizes = page.evaluate(
        "[...document.querySelectorAll('figure > svg')].map(s => s.getBoundingClientRect())"
        ".map(r => Math.min(r.width, r.height))"
    )
    assert len(sizes) == len(slugs) and min(sizes) > 100
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(n => n.id)")
    assert len(ids) == len(set(ids))
    named = page.evaluate(
        "[...document.querySelectorAll('svg')].every(s => "
        "document.getElementById(s.getAttribute('aria-labelledby')).textContent.length > 0)"
    )
    assert named
    pictures = "[...document.querySelectorAll('figure > svg')]"
    drawn = page.evaluate(f"{pictures}.map(s => s.querySelectorAll('path').length)")
    assert min(drawn) > 3
    page.click("details summary")
    assert page.evaluate("document.querySelector('table').getBoundingClientRect().height") > 20
    assert page.evaluate("document.querySelector('h1').textContent") == "A <b>title</b>"
    assert problems == [] and asked == [target.as_uri()]
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.close()

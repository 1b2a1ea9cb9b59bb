"""The page at /, in a real browser: needs the playwright package and a Chromium of the system."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from servers import Gate, LiveServer, make_app

from specdec_ext import LLM, SamplingParams


def test_the_page_needs_nothing_from_elsewhere(live: LiveServer) -> None:
    reply = httpx2.get(live.url + "/")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    text = reply.text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert re.findall(r"(?:https?:)?//[\w.]+", text) == []
    assert re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(?!data:)", text) == []


@pytest.fixture
def page(browser: Any, live: LiveServer) -> Iterator[Any]:
    """The page, opened; fails at the end if its console had an error."""
    opened = browser.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda said: said.type == "error" and problems.append(said.text))
    expected = "Failed to load resource: the server responded with a status of 400"
    opened.goto(live.url)
    until(opened, "document.getElementById('model').textContent.startsWith('tiny')")
    yield opened
    assert [text for text in problems if not text.startswith(expected)] == []
    opened.close()


def until(page: Any, script: str) -> None:
    """Wait until `script` is true; the page's policy forbids Playwright's own way."""
    while not page.evaluate(script):
        page.wait_for_timeout(10)


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def finished(page: Any, answers: int) -> None:
    until(
        page,
        f"document.querySelectorAll('.assistant').length === {answers}"
        " && document.getElementById('stop').disabled",
    )


def test_a_conversation(page: Any, llm: LLM) -> None:
    """Typed, sent by the Enter key, streamed; drafted tokens are marked; compared with plain."""
    messages = [{"role": "user", "content": "abcabcabcabc"}]
    want = llm.chat(messages, SamplingParams(max_tokens=60), use_tqdm=False)[0]
    page.fill("#tokens", "60")
    ask(page, "abcabcabcabc")
    finished(page, 1)
    assert page.evaluate("document.querySelector('.assistant').textContent") == want.outputs[0].text
    spec = want.metrics["speculative_decoding"]
    drafted = page.evaluate("document.querySelectorAll('.assistant .source-draft').length")
    assert 0 < drafted <= spec["num_accepted_draft_tokens"]
    assert page.evaluate("document.querySelectorAll('#steps rect').length") > 0
    page.click("#again")
    finished(page, 2)
    texts = page.evaluate("[...document.querySelectorAll('.assistant')].map((n) => n.textContent)")
    assert texts == [want.outputs[0].text] * 2
    numbers = page.evaluate("document.getElementById('numbers').textContent")
    assert "tokens/s" in numbers and "\u2013" not in numbers
    assert page.evaluate("document.querySelectorAll('#speed polyline').length") == 2
    # The conversation goes on, and begins anew.
    ask(page, "and now?")
    finished(page, 3)
    page.click("#clear")
    assert page.evaluate("document.getElementById('log').children.length") == 0


def test_stop_and_switch(page: Any, llm: LLM, gate: Gate) -> None:
    gate.close()
    page.fill("#tokens", "400")
    ask(page, "hello")
    until(page, "!document.getElementById('stop').disabled")
    page.keyboard.press("Escape")
    until(page, "document.getElementById('log').textContent.includes('stopped')")
    gate.open()
    page.uncheck("#speculate")
    page.fill("#tokens", "20")
    ask(page, "abcabcabcabc")
    finished(page, 2)
    assert page.evaluate("document.querySelectorAll('.source-draft').length") == 0
    page.check("#speculate")
    page.fill("#drafts", "100")  # more than the server allows: its words are shown
    with page.expect_response("**/v1/chat/completions") as refused:
        ask(page, "x")
    assert refused.value.status == 400
    page.wait_for_selector(".error")
    assert "max_draft_len = 100" in page.evaluate("document.querySelector('.error').textContent")


def nodes(page: Any, kind: str) -> list[str]:
    """Labels of the drawn tree's nodes of a kind, from the text on."""
    return page.evaluate(  # type: ignore[no-any-return]
        f"[...document.querySelectorAll('#tree g.{kind} text')].map((n) => n.textContent)"
    )


def test_a_tree_of_one_step(page: Any, llm: LLM) -> None:
    """Every step's drafts, what was accepted of them and the model's own token; chosen by slider,
    keyboard, chart and answer."""
    params = SamplingParams(max_tokens=60, return_steps=True)
    messages = [{"role": "user", "content": "abcabcabcabc"}]
    [want] = llm.chat(messages, params, use_tqdm=False)
    steps = want.outputs[0].steps
    assert steps is not None
    page.fill("#tokens", "60")
    ask(page, "abcabcabcabc")
    finished(page, 1)
    assert page.evaluate("document.getElementById('step').max") == str(len(steps) - 1)
    page.focus("#step")
    page.keyboard.press("Home")
    text = lambda token: llm.tokenizer.decode([token])  # noqa: E731
    kinds = set()
    for number, step in enumerate(steps):
        assert page.input_value("#step") == str(number)
        accepted = [draft for draft in step.drafts if draft.accepted]
        own = step.token_ids[step.num_accepted :]
        assert nodes(page, "accepted") == [visible(text(draft.token_id)) for draft in accepted]
        assert len(nodes(page, "rejected")) == len(step.drafts) - len(accepted)
        assert nodes(page, "own") == [visible(text(token)) for token in own]
        edges = page.evaluate("document.querySelectorAll('#tree path.taken').length")
        assert edges == len(accepted) + len(own)
        said = page.evaluate("document.getElementById('said').textContent")
        counted = f"{len(step.drafts)} drafted, {len(accepted)} accepted"
        assert (counted if step.drafts else "othing was drafted") in said
        if own and len(accepted) < len(step.drafts):
            assert "itself, where" in said
            kinds.add("refused")
        kinds.update(draft.sources[0] for draft in accepted)
        page.keyboard.press("ArrowRight")
    assert {"ngram", "refused"} <= kinds
    page.click("#steps", position={"x": 2, "y": 40})
    assert page.input_value("#step") == "0"
    assert "1 of" in page.evaluate("document.getElementById('which').textContent")
    page.evaluate("[...document.querySelectorAll('.assistant span')].at(-1).click()")
    assert page.input_value("#step") == str(len(steps) - 1)


def test_drafts_of_one_source(browser: Any, tiny_path: Path) -> None:
    """The server has several; the answer is the same with each."""
    lookahead = {"method": "lookahead", "max_window_size": 4, "max_ngram_size": 3,
                 "max_verification_set_size": 4}  # fmt: skip
    config = {"method": "composite", "sources": ["suffix", lookahead], "adaptive": False}
    with LLM(tiny_path, speculative_config=config) as llm, LiveServer(make_app(llm)) as live:
        page = browser.new_page()
        page.goto(live.url)
        until(page, "document.getElementById('model').textContent.startsWith('tiny')")
        page.fill("#tokens", "60")
        texts = set()
        for name in ("suffix", "lookahead", ""):
            page.select_option("#method", name)
            page.click("#clear")
            ask(page, "abcabcabcabc")
            finished(page, 1)
            found = page.evaluate(
                "[...new Set(shown.steps.flatMap((s) => s.drafts.flatMap((d) => d.sources)))]"
            )
            assert found and (not name or found == [name]), found
            texts.add(page.evaluate("document.querySelector('.assistant').textContent"))
        assert len(texts) == 1
        page.close()


def visible(text: str) -> str:
    return text.replace(" ", "\u2423").replace("\n", "\u21b5").replace("\t", "\u21e5")


def test_a_predicted_output(page: Any, llm: LLM) -> None:
    """Its drafts have a colour of their own, are counted, and the answer is held against it."""
    messages = [{"role": "user", "content": "hello"}]
    want = llm.chat(messages, SamplingParams(max_tokens=40), use_tqdm=False)[0].outputs[0].text
    lines = want.split("\n")
    predicted = "\n".join(["not this", *lines])
    page.fill("#tokens", "40")
    page.fill("#prediction", predicted)
    ask(page, "hello")
    finished(page, 1)
    assert page.evaluate("document.querySelector('.assistant').textContent") == want
    marked = "[...document.querySelectorAll('.assistant [data-source=prediction]')]"
    assert page.evaluate(f"{marked}.length") > 0
    colour = f"getComputedStyle({marked}[0]).color"
    plain = "getComputedStyle(document.querySelector('.assistant')).color"
    assert page.evaluate(colour) != page.evaluate(plain)
    assert "prediction" in page.evaluate("document.getElementById('sources').textContent")
    removed = "[...document.querySelectorAll('.difference del')].map((n) => n.textContent)"
    assert page.evaluate(removed) == ["- not this\n"]
    kept = "[...document.querySelectorAll('.difference span')].map((n) => n.textContent)"
    assert page.evaluate(kept) == [f"  {line}\n" for line in lines]
    assert page.evaluate("document.querySelectorAll('.difference ins').length") == 0


def test_on_a_phone_and_by_keyboard(browser: Any, live: LiveServer) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.goto(live.url)
    until(page, "document.getElementById('model').textContent.startsWith('tiny')")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.fill("#tokens", "5")
    page.focus("#prompt")
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    assert page.input_value("#prompt") == "two\nlines"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"
    page.keyboard.press("Enter")
    finished(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    # A tree that is wider than the screen scrolls in its own box.
    drafts = [
        {"text": "word", "parent": i - 1, "accepted": True, "sources": ["ngram"]} for i in range(20)
    ]
    step = {"drafts": drafts, "tokens": [], "begin_ms": 0, "end_ms": 1, "num_rows": 21}
    page.evaluate("(step) => tree({steps: [step]}, 0)", step)
    assert page.evaluate("document.getElementById('tree').scrollWidth") > 1000
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.close()


def test_a_server_with_keys_asks_for_one(browser: Any, llm: LLM) -> None:
    with LiveServer(make_app(llm, api_keys=["a-key-of-ours"])) as live:
        page = browser.new_page()
        page.goto(live.url)
        until(page, "document.getElementById('model').textContent.includes('keys')")
        page.fill("#key", "a-key-of-ours")
        page.press("#key", "Tab")
        until(page, "document.getElementById('model').textContent.startsWith('tiny')")
        page.close()


@pytest.mark.slow
@pytest.mark.default_model
def test_the_default_model_in_a_picture(
    browser: Any, default_model_path: Path, tmp_path: Path
) -> None:
    """Drafts of two sources and more, each in its colour, and a step of which the model took some
    drafts; SPECDEC_PICTURES names the folder of the picture that the README shows."""
    code = "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n    return a * b\n"
    with (
        LLM() as llm,
        LiveServer(make_app(llm, served_model_names=["SmolLM2-135M-Instruct"])) as server,
    ):
        page = browser.new_page(viewport={"width": 1100, "height": 1020})
        page.goto(server.url)
        until(page, "document.getElementById('model').textContent.startsWith('Smol')")
        page.fill("#tokens", "160")
        page.fill("#prediction", code)
        ask(page, f"Repeat this Python code and add a docstring to each function:\n{code}")
        finished(page, 1)
        found = page.evaluate(
            "[...new Set([...document.querySelectorAll('.assistant [data-source]')]"
            ".map((n) => n.dataset.source))]"
        )
        assert {"model", "prediction"} < set(found)
        mixed = "s.drafts.some((d) => d.accepted) && s.drafts.some((d) => !d.accepted)"
        own = "s.tokens.some((t) => !t.from_draft)"
        page.evaluate(f"choose(shown.steps.findLastIndex((s) => {mixed} && {own}))")
        assert nodes(page, "accepted") and nodes(page, "rejected") and nodes(page, "own")
        picture = Path(os.environ.get("SPECDEC_PICTURES", tmp_path)) / "page.png"
        page.screenshot(path=picture)
        page.close()
    assert picture.stat().st_size < 300_000

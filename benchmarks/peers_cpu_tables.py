"""Figures and tables of `benchmarks.peers_cpu`, from its cells."""

from __future__ import annotations

from typing import Any

from benchmarks import common
from benchmarks.peers.cpu.job import FAST

OURS = "ours"
PREFILL = 512
# What the default speculation is held against peers on: code, questions with passages, summaries.
REPEATING = ("humaneval", "squad", "news")


def figures(cell: dict[str, Any], sets: list[str]) -> dict[str, Any]:
    """Rates of one cell, in tokens per second; by_set: prompts included, per kind of prompt."""
    counts = [len(answer) for answer in cell["tokens"]]
    total, prompt = sum(cell["total_s"]), sum(cell["prompt_s"])
    found: dict[str, Any] = {
        "decode": (sum(counts) - len(counts)) / (total - prompt),
        "end_to_end": sum(counts) / total,
        "prefill": PREFILL / common.median(cell["prefill_s"]),
        "rss_mb": cell["rss_mb"],
        "load_s": cell["load_s"],
        "first_token_s": cell["first_token_s"],
    }
    if "batch_s" in cell:
        found["batch"] = cell["batch_tokens"] / cell["batch_s"]
    if len(counts) == len(sets):
        found["by_set"] = {
            name: sum(n for n, s in zip(counts, sets, strict=True) if s == name)
            / sum(t for t, s in zip(cell["total_s"], sets, strict=True) if s == name)
            for name in dict.fromkeys(sets)
        }
        found["tokens_by_set"] = {
            name: sum(n for n, s in zip(counts, sets, strict=True) if s == name)
            for name in dict.fromkeys(sets)
        }
    return found


def seconds_until(cell: dict[str, Any], prompt: int, count: int) -> float:
    """Returns the time of an answer's first `count` tokens, prompt included: tokens behind the
    first are taken to come evenly."""
    length, first = len(cell["tokens"][prompt]), cell["prompt_s"][prompt]
    steps = (count - 1) / (length - 1) if length > 1 else 0.0
    return float(first + steps * (cell["total_s"][prompt] - first))


def equal_lengths(ours: dict[str, Any], theirs: dict[str, Any], prompts: list[int]) -> float | None:
    """Returns their time over ours for as many tokens of each answer as both have; None where an
    answer is empty. Rates of whole answers compare lengths, too: a prompt's time is a smaller part
    of a longer answer's."""
    counts = {i: min(len(c["tokens"][i]) for c in (ours, theirs)) for i in prompts}
    if not prompts or 0 in counts.values():
        return None
    mine, other = (sum(seconds_until(c, i, n) for i, n in counts.items()) for c in (ours, theirs))
    return other / mine


def summarise(cells: dict[str, Any], sets: list[str]) -> dict[str, Any]:
    """Per width and program: medians over rounds, every round, versions, equal texts; per width
    the ratios of ours to the peers, taken within a round."""
    rounds: dict[str, dict[str, dict[int, Any]]] = {}
    for key, cell in cells.items():
        width, program, number = key.split("/")
        rounds.setdefault(width, {}).setdefault(program, {})[int(number)] = cell
    return {width: _summarise_width(programs, sets) for width, programs in rounds.items()}


def _summarise_width(programs: dict[str, dict[int, Any]], sets: list[str]) -> dict[str, Any]:
    lines, measured = {}, {}
    for program, by_round in programs.items():
        good = {n: figures(c, sets) for n, c in by_round.items() if "failed" not in c}
        if not good:
            lines[program] = {"failed": next(iter(by_round.values()))["failed"]}
            continue
        measured[program] = good
        first = next(iter(good.values()))
        names = [name for name in first if not name.endswith("by_set")]
        lines[program] = {
            "median": {name: common.median([g[name] for g in good.values()]) for name in names},
            "rounds": good,
            "version": next(c for c in by_round.values() if "failed" not in c)["version"],
            "load_average": [c["load_average"] for c in by_round.values()],
            "same_text_as_plain": _same_text(programs, program, _plain_of(program)),
        }
        if program == f"{OURS} plain" and "llama_cpp plain" in programs:
            lines[program]["same_text_as_llama_cpp"] = _same_text(
                programs, program, "llama_cpp plain"
            )
    ratios = _ratios(measured) | _equal_length_ratios(programs, sets)
    return {"programs": lines, "ratios": ratios}


def _plain_of(program: str) -> str:
    """The program whose text this one's should be: its own, decoded plainly."""
    peer, method = program.split()[:2]
    mode = FAST if method.startswith(FAST) else ""
    return f"{peer} {mode}plain"


def _same_text(programs: dict[str, dict[int, Any]], a: str, b: str) -> str:
    """'k/n': how many answers of the first round are the same tokens; '' without them."""
    texts = [
        next((c["tokens"] for c in programs.get(name, {}).values() if "tokens" in c), None)
        for name in (a, b)
    ]
    if texts[0] is None or texts[1] is None or len(texts[0]) != len(texts[1]):
        return ""
    same = sum(x == y for x, y in zip(texts[0], texts[1], strict=True))
    return f"{same}/{len(texts[0])}"


def _ratios(measured: dict[str, dict[int, Any]]) -> dict[str, Any]:
    """ours / peer. `best`: the best program of any peer in that round and on that kind of text."""
    peers = {name: r for name, r in measured.items() if not name.startswith(OURS)}
    idle = {name: r for name, r in peers.items() if "beside" not in name}
    found: dict[str, Any] = {}

    def add(name: str, ours: str, others: dict[str, Any], read: Any) -> None:
        values = []
        for number, mine in measured.get(ours, {}).items():
            theirs = [read(r[number]) for r in others.values() if number in r]
            theirs = [value for value in theirs if value is not None]
            if theirs and read(mine) is not None:
                values.append(read(mine) / max(theirs))
        if values:
            found[name] = common.spread(values)

    peer: str
    for peer in ("llama_cpp plain", "openvino plain"):
        one: dict[str, Any] = {peer: peers[peer]} if peer in peers else {}
        add(f"plain / {peer}, decode", f"{OURS} plain", one, lambda f: f["decode"])
    for mode in ("", FAST):
        words = mode.replace("_", " ")
        plain, default = f"{OURS} {mode}plain", f"{OURS} {mode}default"
        add(f"{words}prefill / best peer", plain, idle, lambda f: f["prefill"])
        add(f"{words}batch of 8 / best peer", plain, idle, lambda f: f.get("batch"))
        add(f"{words}default / best peer, end to end", default, idle, lambda f: f["end_to_end"])
    for text in REPEATING:
        add(
            f"default / best peer, {text}", f"{OURS} default", idle,
            lambda f, text=text: f.get("by_set", {}).get(text),
        )  # fmt: skip
    return found


def _equal_length_ratios(programs: dict[str, dict[int, Any]], sets: list[str]) -> dict[str, Any]:
    """Those of the default to the best peer on each kind of text, for the same number of tokens."""
    peers = [
        r for name, r in programs.items() if not name.startswith(OURS) and "beside" not in name
    ]
    found: dict[str, Any] = {}
    for text in REPEATING:
        prompts = [i for i, name in enumerate(sets) if name == text]
        values = []
        for number, mine in programs.get(f"{OURS} default", {}).items():
            cells = [cell for r in peers if (cell := r.get(number)) and "failed" not in cell]
            ratios = [] if "failed" in mine else [equal_lengths(mine, c, prompts) for c in cells]
            values += [min(known)] if (known := [r for r in ratios if r is not None]) else []
        if values:
            found[f"default / best peer, {text}, equal lengths"] = common.spread(values)
    return found


def tables_of(result: dict[str, Any]) -> list[str]:
    """Markdown: the programs of all widths, then the ratios."""
    header = ["width, program", "decode", "end to end", "prefill", "batch 8", "RSS, MB", "load, s",
              "first token, s", "own plain text"]  # fmt: skip
    rows: list[list[Any]] = []
    ratios: list[list[Any]] = []
    for width, found in result["results"].items():
        for program, line in found["programs"].items():
            name = f"{width}, {program.replace('_', '.')}"
            if "failed" in line:
                rows.append([name, f"failed: {line['failed']}", *[""] * 7])
                continue
            m = line["median"]
            speeds = [f"{m[key]:.0f}" for key in ("decode", "end_to_end", "prefill")]
            batch = f"{m['batch']:.0f}" if "batch" in m else ""
            rows.append([name, *speeds, batch, f"{m['rss_mb']:.0f}", m["load_s"],
                         m["first_token_s"], line["same_text_as_plain"]])  # fmt: skip
        for name, r in found["ratios"].items():
            ratios.append([f"{width}: {name.replace('_', '.')}", r["median"], r["min"], r["max"]])
    tables = [common.markdown(header, rows)]
    tables.append(common.markdown(["ours / theirs", "median", "least", "most"], ratios))
    if result["not_installed"]:
        tables.append("Not installed: " + ", ".join(result["not_installed"]) + ".")
    return tables

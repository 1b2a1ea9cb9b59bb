"""The training card: what was trained, on what, and what it measured; as JSON and as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["card_text", "write_card"]

CARD_JSON = "training_card.json"
CARD_TEXT = "TRAINING_CARD.md"


def write_card(folder: Path, card: dict[str, Any]) -> None:
    """Write both forms into `folder`."""
    text = json.dumps(card, indent=1, sort_keys=True) + "\n"
    (folder / CARD_JSON).write_text(text, encoding="utf-8")
    (folder / CARD_TEXT).write_text(card_text(card), encoding="utf-8")


def card_text(card: dict[str, Any]) -> str:
    """The card as Markdown."""
    data, model, train = card["data"], card["target"], card["training"]
    held = card["held_out"]
    lines = [
        f"# {card['product']} for {model['name']}",
        "",
        f"Made by `{card['command']}`, specdec_ext {card['version']}.",
        "",
        f"- Licence: {card['licence']}",
        f"- Target: {model['name']}, weights sha256 `{model['sha256']}`",
        f"- Files: {', '.join(f'{f} ({b} bytes)' for f, b in sorted(card['files'].items()))}",
        f"- Data: {data['train_texts']} texts with {data['train_tokens']} tokens "
        f"{'of the user' if data['texts'] == 'given' else 'written by the target itself'}; "
        f"{data['held_out_texts']} texts ({data['held_out_tokens']} tokens) held out; "
        f"{data['dropped_texts']} dropped for sharing 13 words with evaluation text "
        f"({', '.join(entry['name'] for entry in data['excluded']) or 'none was given'})",
        f"- Share of the held-out tokens inside the reduced vocabulary "
        f"({data['draft_vocab_size']} tokens): {data['coverage']:.4f}",
        f"- Training: {train['steps']} steps of {train['batch_texts']} texts, seed "
        f"{train['seed']}, last loss {train['last_loss']:.4f}",
        *(f"- {remark}" for remark in card.get("remarks", ())),
        "",
        "Sources of the texts:",
        "",
        *(f"- {name}: {words}" for name, words in data["sources"].items()),
        "",
        "On held-out text:",
        "",
    ]
    accuracy = ", ".join(f"{x:.3f}" for x in held["accuracy"])
    lines.append(f"- top-1 accuracy by position: {accuracy}")
    lines.append(
        "- top-1 accuracy of the first position by kind of text: "
        + ", ".join(f"{k} {v:.3f}" for k, v in held["accuracy_by_category"].items())
    )
    if "chain" in held:
        chain = ", ".join(f"{x:.3f}" for x in held["chain"])
        lines.append(f"- share of places where a chain of 1, 2, ... is right as a whole: {chain}")
    measured = card["measured"]
    if measured and "error" not in measured:
        speed = measured["tokens_per_second"]
        lines += [
            f"- {measured['prompts']} held-out prompts, greedy, up to {measured['max_tokens']} "
            f"tokens, one at a time on {card['run']['device']}: {measured['tokens_per_pass']:.2f} "
            f"tokens per pass with every draft verified "
            f"({100 * measured['acceptance_rate']:.0f} % of the drafts accepted); "
            f"{speed['drafted']:.1f} tokens/s, plain {speed['plain']:.1f} "
            f"({measured['speedup']:.2f} times); {measured['equal_to_plain']} of "
            f"{measured['prompts']} texts equal to plain decoding",
        ]
    lines += ["", f"Used by `{card['use']}`, where DIR is this folder."]
    return "\n".join(lines) + "\n"

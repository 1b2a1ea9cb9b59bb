"""Forms of output over a vocabulary of 48 tokens, and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from medusa_models import VOCAB
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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


def form_tokenizer() -> Tokenizer:
    """48 tokens: what JSON is made of, three merged pairs, the end of a text."""
    signs = '{}[]":,-.Ġ' + "0123456789" + "abcdefghijklmnopqrstuvwx"
    vocab = {sign: i for i, sign in enumerate(signs)}
    for pair in ("ab", '":', "12"):
        vocab[pair] = len(vocab)
    core = Tokenizer(models.BPE(vocab, [("a", "b"), ('"', ":"), ("1", "2")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    assert len(vocab) == END and core.token_to_id("<|end|>") == END
    return core


def add_tokenizer(folder: Path) -> None:
    """form_tokenizer() for a model's folder."""
    core = form_tokenizer()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>").save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, "eos_token_id": END}))

"""tokenizer.json without transformers, against transformers' reading of the same folder."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec_ext.models.default import default_model
from specdec_ext.text.detokenizer import DetokenizerFactory
from specdec_ext.text.file_tokenizer import FileTokenizer, read_file_tokenizer
from specdec_ext.text.tokenizer import load_tokenizer

TEXTS = [
    "",
    " ",
    "hello world",
    " indented\n\n\tcode()",
    "naïve café ﬁ ½",
    "日本語テキスト 한국어",
    "🙂👩‍👩‍👧‍👦 emoji \U0001f9ff",
    "<|end|>hello<|end|> <plain é>x<plain é>",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> </s><s>",
    "a\x00b\ufffd\u2581c",
    "x" * 500,
]
SPECIAL = {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>"}


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w"), ("ã", "ģ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    core = Tokenizer(models.BPE(vocab, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


def byte_fallback() -> Tokenizer:
    vocab = {f"<0x{i:02X}>": i for i in range(256)}
    for piece in ("\u2581", "h", "e", "l", "o", "w", "r", "d", "\u2581h", "el", "lo"):
        vocab[piece] = len(vocab)
    merges = [("\u2581", "h"), ("e", "l"), ("l", "o")]
    core = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return core


def with_bos(core: Tokenizer) -> Tokenizer:
    token_id = core.token_to_id("<s>")
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", token_id)])
    return core


def save(core: Tokenizer, folder: Path, **options: Any) -> Path:
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL.values()])
    core.add_tokens(["<plain é>", AddedToken("<left>", lstrip=True)])
    if options.pop("has_bos", False):
        core = with_bos(core)
    made = PreTrainedTokenizerFast(tokenizer_object=core, **{**SPECIAL, **options})
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, make, options in (
        ("byte_level", byte_level, {}),
        ("byte_fallback", byte_fallback, {"has_bos": True, "model_max_length": 77}),
    ):
        made[name] = save(make(), tmp_path_factory.mktemp(name), **options)
    return made


def pair(folder: Path) -> tuple[FileTokenizer, Any]:
    ours = read_file_tokenizer(folder)
    assert ours is not None
    return ours, AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def assert_same_ids(ours: FileTokenizer, theirs: Any, text: str) -> None:
    for special in (True, False):
        want = theirs(text, add_special_tokens=special)
        assert ours(text, add_special_tokens=special)["input_ids"] == want["input_ids"]
        assert ours.encode(text, add_special_tokens=special) == want["input_ids"]


def assert_same_text(ours: FileTokenizer, theirs: Any, ids: list[int]) -> None:
    for skip in (True, False):
        want = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == want
        decoder = DetokenizerFactory(ours).make(skip)
        reference = DetokenizerFactory(theirs).make(skip)
        for token in ids:
            assert decoder.push(token) == reference.push(token)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_texts_and_ids(folders, name):
    ours, theirs = pair(folders[name])
    for text in TEXTS:
        assert_same_ids(ours, theirs, text)
        assert_same_text(ours, theirs, theirs(text)["input_ids"])
    draw = random.Random(0)
    for _ in range(50):
        assert_same_text(ours, theirs, [draw.randrange(len(theirs)) for _ in range(12)])


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_any_text(folders, name):
    ours, theirs = pair(folders[name])

    @settings(max_examples=150, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text: str) -> None:
        assert_same_ids(ours, theirs, text)

    check()


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_what_else_the_engine_asks(folders, name):
    ours, theirs = pair(folders[name])
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template == ours.get_chat_template()
    assert ours.model_max_length == theirs.model_max_length
    for kind in ("bos", "eos", "unk", "pad"):
        for attribute in (f"{kind}_token", f"{kind}_token_id"):
            assert getattr(ours, attribute) == getattr(theirs, attribute)
    for token in ("<s>", "<plain é>", "no such token"):
        assert ours.convert_tokens_to_ids(token) == theirs.convert_tokens_to_ids(token)
    assert ours.convert_tokens_to_ids(["<s>"]) == theirs.convert_tokens_to_ids(["<s>"])


def test_the_rest_is_transformers_own(folders):
    ours, theirs = pair(folders["byte_level"])
    assert ours.convert_ids_to_tokens([1, 2]) == theirs.convert_ids_to_tokens([1, 2])
    assert ours(["a", "hello"])["input_ids"] == theirs(["a", "hello"])["input_ids"]
    assert ours("hello", return_tensors="np")["input_ids"].shape == (1, 3)
    messages = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(messages, tokenize=False) == "hello"
    with pytest.raises(AttributeError):
        _ = ours._no_such_attribute


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": None},
        {"eos_token": "hello"},
        {"extra_special_tokens": ["<plain é>"]},
        {"split_special_tokens": True},
        {"added_tokens_decoder": {"3": {"content": "x", "special": True}}},
        {"auto_map": {"AutoTokenizer": "x.Y"}},
        {"model_max_length": 0},
        {"chat_template": [{"name": "default", "template": "x"}]},
    ],
)
def test_what_needs_transformers_is_left_to_it(folders, tmp_path, change):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folders["byte_level"] / name).read_bytes())
    assert read_file_tokenizer(tmp_path) is not None
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert read_file_tokenizer(tmp_path) is None


def test_files_that_transformers_merges_are_left_to_it(folders, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folders["byte_level"] / name).read_bytes())
    assert read_file_tokenizer(tmp_path, "mistral") is None
    path = tmp_path / "tokenizer_config.json"
    listed = json.loads(path.read_text())
    (tmp_path / "added_tokens.json").write_text('{"<more>": 3}')
    listed.pop("added_tokens_decoder", None)
    path.write_text(json.dumps(listed))
    assert read_file_tokenizer(tmp_path) is None
    assert not isinstance(load_tokenizer(tmp_path, tmp_path), FileTokenizer)
    (tmp_path / "added_tokens.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"image_token": "<s>"}')
    assert read_file_tokenizer(tmp_path) is None
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "hello"}')
    assert read_file_tokenizer(tmp_path) is None


END = "<|endoftext|>"
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def as_qwen2() -> Tokenizer:
    core = byte_level()
    core.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    core.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    core.add_special_tokens([END, "<|im_start|>", "<|im_end|>"])
    core.add_tokens(["<plain é>", AddedToken("<left>", lstrip=True)])
    return core


def as_gpt2() -> Tokenizer:
    core = byte_level()
    core.add_special_tokens([END, "<s>"])
    return core


def as_llama(scheme: str = "first") -> Tokenizer:
    core = byte_fallback()
    core.normalizer = None
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    core.add_tokens(["<plain é>"])
    return with_bos(core)


def as_gemma() -> Tokenizer:
    core = byte_fallback()
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>"])
    return core


OWN = {"eos_token": "<|im_end|>", "pad_token": END, "bos_token": None, "unk_token": None}
# name -> tokenizer, model_type, tokenizer_config.json
CLASSES: dict[str, tuple[Any, str | None, dict[str, Any]]] = {
    "qwen2": (as_qwen2, "qwen2", {"tokenizer_class": "Qwen2Tokenizer", "errors": "replace", **OWN}),
    "qwen3": (as_qwen2, "qwen3", {"tokenizer_class": "Qwen2TokenizerFast"}),
    "distilled": (as_qwen2, "qwen2", {"tokenizer_class": "LlamaTokenizerFast", **OWN}),
    "qwen2 plain": (as_qwen2, "qwen2", {"tokenizer_class": "PreTrainedTokenizerFast", **OWN}),
    "gpt2": (as_gpt2, "llama", {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>"}),
    "gpt2 fast": (as_gpt2, None, {"tokenizer_class": "GPT2TokenizerFast"}),
    "llama": (as_llama, "llama", {"tokenizer_class": "LlamaTokenizer", "sp_model_kwargs": {},
                                  "use_default_system_prompt": True}),
    "llama legacy": (partial(as_llama, "always"), "llama",
                     {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}),
    "llama 3": (as_gpt2, "llama", {"tokenizer_class": "LlamaTokenizerFast", "eos_token": END}),
    "gemma": (as_gemma, "gemma3_text", {"tokenizer_class": "GemmaTokenizer",
                                        "spaces_between_special_tokens": False}),
}  # fmt: skip


def write_folder(folder: Path, name: str, **changes: Any) -> str | None:
    """Files of CLASSES; the model's type."""
    make, model_type, config = CLASSES[name]
    folder.mkdir(exist_ok=True)
    make().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **changes}))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return model_type


def without_transformers(folder: Path, model_type: str | None) -> tuple[FileTokenizer, Any]:
    ours = read_file_tokenizer(folder, model_type)
    assert ours is not None
    return ours, AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def assert_same_tokenizer(ours: FileTokenizer, theirs: Any) -> None:
    draw = random.Random(3)
    parts = [*TEXTS, "\u0041\u030a\u2126", "  \r\n \t", "It's 12345 ''LL", "<left>", " <left>", END,
             "\u2581 \u2581\u2581", "<pad><mask><bos>", "\ue000\u0301", "<s>", " "]  # fmt: skip
    texts = [*parts, *("".join(draw.choices(parts, k=4)) for _ in range(40))]
    for text in texts:
        assert_same_ids(ours, theirs, text)
    for _ in range(30):
        ids = [draw.randrange(len(theirs)) for _ in range(12)]
        assert_same_text(ours, theirs, ids)
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    for kind in ("bos", "eos", "unk", "pad"):
        assert getattr(ours, f"{kind}_token_id") == getattr(theirs, f"{kind}_token_id")
    assert ours.model_max_length == theirs.model_max_length


@pytest.mark.parametrize("name", CLASSES)
def test_classes_that_say_what_the_file_says(name: str, tmp_path: Path) -> None:
    model_type = write_folder(tmp_path, name)
    assert_same_tokenizer(*without_transformers(tmp_path, model_type))


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "llama", "gemma", "llama 3"])
def test_old_files_beside_the_tokenizer(name: str, tmp_path: Path) -> None:
    model_type = write_folder(tmp_path, name)
    core = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    added = {token.content: i for i, token in core.get_added_tokens_decoder().items()}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    [first, *_] = [t.content for t in core.get_added_tokens_decoder().values() if t.special]
    named = {"eos_token": {"content": first, "lstrip": False}, "additional_special_tokens": [first]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    ours, theirs = without_transformers(tmp_path, model_type)
    assert ours.eos_token == first == theirs.eos_token
    for text in TEXTS:
        assert_same_ids(ours, theirs, text)
    listed = {
        token_id: {"content": token.content, "special": token.special, "lstrip": token.lstrip,
                   "normalized": token.normalized}
        for token_id, token in core.get_added_tokens_decoder().items()
    }  # fmt: skip
    write_folder(tmp_path, name, added_tokens_decoder=listed)
    (tmp_path / "added_tokens.json").write_text('{"<ignored>": 7}')
    assert_same_tokenizer(*without_transformers(tmp_path, model_type))


def differing(name: str, change: Any) -> Tokenizer:
    core: Tokenizer = CLASSES[name][0]()
    change(core)
    return core


@pytest.mark.parametrize(("name", "change"), [
    ("qwen2", lambda core: setattr(core, "normalizer", normalizers.NFKC())),
    ("qwen2 plain", lambda core: setattr(core, "pre_tokenizer", pre_tokenizers.ByteLevel())),
    ("qwen3", lambda core: core.add_special_tokens([AddedToken(END, lstrip=True)])),
    ("gpt2", lambda core: setattr(core, "pre_tokenizer", pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), core.pre_tokenizer]))),
    ("gpt2", lambda core: setattr(core.model, "ignore_merges", True)),
    ("gpt2", lambda core: setattr(core.model, "dropout", 0.5)),
    ("llama", lambda core: setattr(core, "normalizer", normalizers.Prepend("\u2581"))),
    ("llama", lambda core: setattr(core, "decoder", decoders.ByteFallback())),
    ("gemma", lambda core: setattr(core.model, "byte_fallback", False)),
])  # fmt: skip
def test_classes_that_say_something_else(name: str, change: Any, tmp_path: Path) -> None:
    """transformers 5 makes another tokenizer of such a file than version 4: it is asked."""
    model_type = write_folder(tmp_path, name)
    assert read_file_tokenizer(tmp_path, model_type) is not None
    differing(name, change).save(str(tmp_path / "tokenizer.json"))
    assert read_file_tokenizer(tmp_path, model_type) is None


def test_models_whose_classes_are_not_known_here(tmp_path: Path) -> None:
    write_folder(tmp_path, "gpt2")
    assert read_file_tokenizer(tmp_path, "gpt2") is None
    assert read_file_tokenizer(tmp_path, "mistral") is None
    write_folder(tmp_path, "qwen3", add_prefix_space=True)
    assert read_file_tokenizer(tmp_path, "qwen3") is None
    write_folder(tmp_path, "gemma", unk_token="<bos>")
    assert read_file_tokenizer(tmp_path, "gemma3_text") is not None  # nothing is unknown
    write_folder(tmp_path, "gemma", mask_token="<none>")
    assert read_file_tokenizer(tmp_path, "gemma3_text") is None


def test_truncation_is_left_to_transformers(folders, tmp_path):
    content = json.loads((folders["byte_level"] / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = (folders["byte_level"] / "tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text(config)
    assert read_file_tokenizer(tmp_path) is None


def test_loading_imports_neither_torch_nor_transformers(folders):
    script = (
        "import sys; from pathlib import Path\n"
        "from specdec_ext.text.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer(None, Path({str(folders['byte_level'])!r}))\n"
        "tokenizer.decode(tokenizer('hello')['input_ids'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.default_model
def test_the_default_model(tmp_path):
    ours, theirs = pair(default_model())
    for text in TEXTS:
        assert_same_ids(ours, theirs, text)
        assert_same_text(ours, theirs, theirs(text)["input_ids"])
    draw = random.Random(1)
    for _ in range(50):
        assert_same_text(ours, theirs, [draw.randrange(len(theirs)) for _ in range(20)])
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.get_vocab() == theirs.get_vocab()


def test_tokens_of_ids_need_no_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.save_pretrained(tmp_path)
    ours = read_file_tokenizer(tmp_path)
    assert ours is not None
    monkeypatch.setattr(FileTokenizer, "_transformers", pytest.fail)
    ids = theirs("naive code")["input_ids"]
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(ids[0]) == theirs.convert_ids_to_tokens(ids[0])

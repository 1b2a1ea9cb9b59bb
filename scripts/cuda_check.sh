#!/usr/bin/env bash
# What a machine without a GPU can prove about the CUDA side (docs/gpu.md): every source compiles,
# nothing spills, registers are as recorded, the machine code holds the instructions it was written
# for, generated files are current. Ends with one line; unchanged objects are not compiled again.
# Options: see `scripts/cuda_check.sh --help`.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
exec "$python" -m scripts.cuda_check "$@"

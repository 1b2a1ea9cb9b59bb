#!/usr/bin/env bash
# Builds, tests and measures on a CUDA GPU. Every part runs in a process of its own with a limit of
# its own; run it again and it goes on where it stopped. Needs no network. How and what: docs/gpu.md,
# and `benchmarks/gpu/run.sh --help`.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
case " $* " in
  *" --emulated "*) [ ! -x .venv/bin/python ] || python=.venv/bin/python ;;
  *) export PYTHONPATH="$PWD/build/gpu/site${PYTHONPATH:+:$PYTHONPATH}" ;;
esac
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
exec "$python" -m benchmarks.gpu "$@"

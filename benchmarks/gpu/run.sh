#!/usr/bin/env bash
# Builds, tests and measures on a CUDA GPU. Every stage ends within eight minutes; run it again and
# it goes on where it stopped. Needs no network. How and what: docs/gpu.md.
#
#   benchmarks/gpu/run.sh STAGE... [options]     STAGE: build test sanitize bench-kernel bench-step all
#   --out DIR      where the result file lies (default benchmarks/results)
#   --cells EXPR   only parts whose name matches the regular expression
#   --quick        the targets alone, fewer rounds
#   --force        measure again what already has a result for this commit
#   --commit ID    of this copy, if it is not a git checkout
#   --seconds N    of a stage: start nothing after that (default 420)
#   --emulated     every stage on the CPU with tiny sizes: shows that the script works, measures
#                  nothing, writes to build/gpu-emulated/
set -uo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$root/benchmarks/gpu/run.sh"; }

stages=() options=() emulated=
while [ $# -gt 0 ]; do
  case $1 in
    build | test | sanitize | bench-kernel | bench-step) stages+=("$1") ;;
    all) stages+=(build test sanitize bench-kernel bench-step) ;;
    --emulated) emulated=1 options+=("$1") ;;
    --quick | --force) options+=("$1") ;;
    --out | --cells | --commit | --seconds)
      [ $# -ge 2 ] || { echo "$1 needs a value" >&2; exit 2; }
      options+=("$1" "$2")
      shift
      ;;
    -h | --help) usage; exit 0 ;;
    *) echo "unknown argument: $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
[ ${#stages[@]} -gt 0 ] || { usage >&2; exit 2; }

if [ -n "$emulated" ]; then
  python=.venv/bin/python
  [ -x "$python" ] || python=${PYTHON:-python3}
else
  python=${PYTHON:-python3}
  export PYTHONPATH="$root/build/gpu/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE

worst=0
for stage in "${stages[@]}"; do
  echo "== $stage"
  # The stage stops by itself; the limit is for a program that hangs in it.
  timeout --kill-after=10 480 "$python" -m benchmarks.gpu "$stage" "${options[@]}"
  status=$?
  case $status in
    0) ;;
    75) echo "$stage: not everything was done; run it again to go on" ;;
    *) echo "$stage: failed ($status)" ;;
  esac
  [ "$status" -eq 0 ] || [ "$worst" -eq 1 ] || worst=$status
  # Nothing that follows can work without a build.
  [ "$stage" != build ] || [ "$status" -eq 0 ] || break
done
exit "$worst"

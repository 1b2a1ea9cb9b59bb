#!/usr/bin/env bash
# Compiles every CUDA source to machine code for sm_80 and sm_90a. Nothing is linked or run.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v nvcc >/dev/null; then
  echo "cuda-check: skipped, no nvcc on PATH"
  exit 0
fi
out=build/cuda-check
mkdir -p "$out"
count=0
for source in $(find cuda -name '*.cu' | sort); do
  for arch in sm_80 sm_90a; do
    nvcc -std=c++20 -arch="$arch" --expt-relaxed-constexpr -Icpp -Icuda -c "$source" \
      -o "$out/$(basename "$source").$arch.o"
    count=$((count + 1))
  done
done
echo "cuda-check: $count objects compiled"

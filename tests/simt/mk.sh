#!/bin/sh
# Builds one emulated program both ways: mk.sh SOURCE NAME -> build/emu/NAME and build/emu/NAME_check.
# The second has every access of the kernels checked. Extra compiler options go into EMU_FLAGS.
set -eu
cd "$(dirname "$0")/../.."
# nvcc may be a wrapper: it says itself where its headers are.
cuda=${CUDA_INC:-$(nvcc --dryrun -x cu -c /dev/null -o /dev/null 2>&1 |
  sed -n 's/^#\$ INCLUDES="-I\([^"]*\)".*/\1/p')}
out=${EMU_OUT:-build/emu}
mkdir -p "$out"
flags="-std=c++20 -isystem $cuda -Icpp -Icuda -Itests -Wall -Wextra -Wno-unknown-pragmas -Wno-psabi
  -fno-strict-aliasing -ffp-contract=off ${EMU_FLAGS:-}"
flags="$flags -DSIMT_REGISTERS=\"$PWD/docs/kernels/registers.md\""
checks="check sanitizer streams"
units="simt async limits matrix registers tally no_check"
for unit in $units $checks; do
  for source in tests/simt/$unit.cc tests/simt/*.h; do
    if [ ! "$out/$unit.o" -nt "$source" ]; then
      g++ $flags -O3 -c "tests/simt/$unit.cc" -o "$out/$unit.$$.o"
      mv "$out/$unit.$$.o" "$out/$unit.o"
      break
    fi
  done
done
objects() { for unit in "$@"; do echo "$out/$unit.o"; done; }
plain=$(objects $units)
g++ $flags -x c++ -O2 -c "$1" -o "$out/$2.o"
g++ "$out/$2.o" $plain -o "$out/$2"
g++ $flags -x c++ -O1 -g -fsanitize=thread,undefined -fno-sanitize=vptr -c "$1" -o "$out/$2_check.o"
g++ "$out/$2_check.o" $plain $(objects $checks) -o "$out/$2_check"

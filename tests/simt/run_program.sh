#!/bin/sh
# Builds an emulated program and runs it with every access checked: run_program.sh SOURCE. Says its
# last line if it passes, the last twenty and fails if it does not.
set -u
cd "$(dirname "$0")/../.."
name=$(basename "${1%.*}")
log=build/emu/$name.log
mkdir -p build/emu
rm -f "$log"
if tests/simt/mk.sh "$1" "$name" && "build/emu/${name}_check" > "$log" 2>&1; then
  echo "$name: $(tail -1 "$log")"
else
  tail -20 "$log" 2> /dev/null
  echo "$name: failed"
  exit 1
fi

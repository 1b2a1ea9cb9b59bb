"""Records the corpus, or checks it, for the instruction set of this process.

    python tests/corpus/record.py                      record data/<isa>.json.gz
    python tests/corpus/record.py --check              replay and compare; 1 if a token differs
    SPECDEC_CPU_ISA=avx2 python tests/corpus/record.py ...    the same for another set

Run it with the Python of the environment in question: what was recorded came from that of commit
cebcf29, by this script. --scheduler '{"max_batch_size": 1}' sets further fields of SchedulerConfig
in every engine of a check; a batch's size or anything else about the schedule changes no text.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import corpus_groups
import corpus_models
import corpus_replay

import specdec_ext


def commit() -> str:
    """The commit whose code runs."""
    folder = Path(specdec_ext.__file__).parent
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default="", help="a regular expression: groups to check")
    parser.add_argument("--scheduler", type=json.loads, default={}, help="JSON, with --check")
    args = parser.parse_args()
    isa = corpus_replay.instruction_set()
    path = corpus_replay.DATA / f"{isa}.json.gz"
    groups = [g for g in corpus_groups.all_groups() if re.search(args.only, g.name)]
    if not args.check and (args.only or args.scheduler):
        parser.error("--only and --scheduler go with --check: a recording is whole")
    expected, about = corpus_replay.read(path) if args.check else ({}, {})
    begin, answers, lines = time.process_time(), {}, []
    with tempfile.TemporaryDirectory() as root:
        folders = corpus_models.write_models(Path(root))
        folders["default"] = Path(specdec_ext.default_model())
        for group in groups:
            answers[group.name], metrics = corpus_replay.replay(group, folders, args.scheduler)
            accepted = metrics["speculative_decoding"]["num_accepted_draft_tokens"]
            failed = [a for a in answers[group.name] if any(out[1] == "error" for out in a)]
            if failed or (group.drafts and accepted == 0):
                print(f"{group.name}: {len(failed)} requests failed, {accepted} drafts accepted")
                return 1
            if args.check:
                lines += corpus_replay.differences(group, answers[group.name], expected[group.name])
    print("\n".join(lines))
    count = sum(len(group.requests) for group in groups)
    seconds = time.process_time() - begin
    print(f"{isa}: {count} requests in {len(groups)} groups, {len(lines)} differ; {seconds:.0f} s")
    if not args.check:
        about = {
            "isa": isa,
            "commit": commit(),
            "requests": count,
            "definitions": corpus_replay.definitions(groups),
        }
        corpus_replay.write(path, answers, about)
        print(f"{path.name}: {path.stat().st_size} bytes, commit {about['commit']}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

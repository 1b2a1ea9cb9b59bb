"""runners.Ours in the environment whose Python runs this file: JSON lines in, JSON lines out.

runners.Elsewhere starts it. The first line makes the program, {"model", "dtype", "spec": a
configuration as a dict, or null, "options": of LLM}; every other is a call, {"prompts": [[ids]],
"max_tokens", further options of Ours.generate}, and is answered by the fields of its Run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

# This checkout's way of calling and timing, on the package of the environment.
sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks import runners


def main() -> None:
    import specdec_ext

    def answer(value: object) -> None:
        print(json.dumps(value), flush=True)

    answer({"package": str(specdec_ext.__file__), "isa": specdec_ext.build_info()["cpu_isa"]})
    lines = iter(sys.stdin)
    made = json.loads(next(lines))
    program = runners.Ours(
        Path(made["model"]), made["dtype"], made["spec"], device="cpu", **made["options"]
    )
    answer({})
    for line in lines:
        call = json.loads(line)
        run = program.generate(call.pop("prompts"), call.pop("max_tokens"), **call)
        answer(asdict(run))
    program.close()


if __name__ == "__main__":
    main()

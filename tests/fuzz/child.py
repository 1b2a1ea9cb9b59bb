"""Runs calls FIRST to FIRST + COUNT of a seed in this process; the parent reads how it ended.

Call number i depends on (seed, i) alone, so a call that stops a process can be run by itself.
Every call is written to the log before it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import resource
import sys
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def use_core(path: str) -> None:
    """Takes the extension BUILD/cpp/bind/_core*.so in place of the installed one."""
    (testing,) = Path(path).parents[2].glob("tests/bind/_core_testing*.so")
    for name, file in (("_core", path), ("_core_testing", testing)):
        spec = importlib.util.spec_from_file_location(f"specdec_ext.{name}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"specdec_ext.{name}"] = module
        spec.loader.exec_module(module)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    core = os.environ.get("SPECDEC_CORE")
    if core:
        use_core(core)
    else:  # what an absurd size asks for is refused, not swapped (a sanitizer needs the space)
        resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30, 12 * 2**30))
    import drafter_targets  # noqa: F401  # enter their own
    import object_targets  # noqa: F401
    import torch
    from targets import TARGETS

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = [name for name in TARGETS if name.startswith(given.only)]
    findings = 0
    with given.log.open("w") as log:

        def note(text: str) -> None:
            log.write(f"  {text}\n")
            log.flush()

        for i in range(given.first, given.first + given.count):
            rng = random.Random(f"{given.seed}:{i}")
            torch.manual_seed(i)
            name = rng.choice(names)
            log.write(f"call {i}: {name}\n")
            try:  # refusals are taken by attempt(), which makes the call
                TARGETS[name](rng, note)
            except Exception:
                findings += 1
                print(f"call {i}: {name}: an exception that is no refusal", file=sys.stderr)
                traceback.print_exc()
        log.write("end\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

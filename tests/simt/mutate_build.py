"""The emulated library with a mutant in it, at the least cost.

What a mutant does not touch is linked as `make emu` built it: only the suite's objects that are
compiled from the broken file, as ninja knows it, are compiled again, in a copy of the sources.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from mutants import SUITES, Mutant
from mutants.model import Suite

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "emu" / "cmake"
LIBRARY = ROOT / "build" / "emu" / "libspecdec_emu.so"
FAST = "libspecdec_emu_fast.so"  # tests of it run on the checked one too
LISTS = ("cuda/attention/instances/launchers.h", "cpp/backend/attention/instances.h")  # of names


class Stale(Exception):
    """A mutant does not fit the sources, or the sources do not build."""


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def places(mutant: Mutant) -> tuple[str, list[re.Match[str]]]:
    """The source and where the mutant's text stands in it, however lines are broken."""
    source = (ROOT / mutant.file).read_text()
    words = [re.escape(word) for word in mutant.old.split()]
    return source, list(re.finditer(r"\s+".join(words), source))


def broken(mutant: Mutant) -> str:
    """The mutant's file as it stands with the mutant in it."""
    source, found = places(mutant)
    if len(found) != 1:
        raise Stale(f"{mutant.name}: the text occurs {len(found)} times in {mutant.file}, not once")
    begin, end = found[0].span()
    return source[:begin] + mutant.new + source[end:]


def commands() -> list[list[str]]:
    """The build of the checked library, command by command; the last one links."""
    done = run(["ninja", "-C", str(BUILD), "-t", "commands", LIBRARY.name])
    lines = [line.removeprefix(": && ").removesuffix(" && :") for line in done.stdout.splitlines()]
    steps = [shlex.split(line) for line in lines]
    # A compiler cache would only look for what was never compiled before.
    return [step[step[0].endswith("ccache") :] for step in steps if "-o" in step]


def output_of(step: list[str]) -> str:
    return step[step.index("-o") + 1]


def dependencies() -> dict[str, set[str]]:
    """Object by object, the files that it was compiled from."""
    found: dict[str, set[str]] = {}
    name = ""
    for line in run(["ninja", "-C", str(BUILD), "-t", "deps"]).stdout.splitlines():
        if line.startswith(" "):
            found[name].add(os.path.normpath(BUILD / line.strip()))
        elif ": #deps" in line:
            name = line.split(": #deps")[0]
            found[name] = set()
    return found


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


class Workshop:
    """A copy of the sources in which a process builds its mutants, one at a time."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.made = scratch / "made"
        self.library = self.made / LIBRARY.name
        shutil.rmtree(scratch, ignore_errors=True)
        for folder in ("cpp", "cuda", "tests/simt"):
            shutil.copytree(ROOT / folder, scratch / folder)
        self.empty()
        steps = commands()
        self.compiles = [s for s in steps if "-c" in s and "kernels_checked" in output_of(s)]
        self.link = next(s for s in steps if output_of(s).endswith(LIBRARY.name))
        self.sources_of = dependencies()

    def empty(self) -> None:
        """Takes away what was made."""
        shutil.rmtree(self.made, ignore_errors=True)
        self.made.mkdir()

    def build(self, mutant: Mutant) -> Path:
        """The library with the mutant in it."""
        file = self.scratch / mutant.file
        file.write_text(broken(mutant))
        try:
            return self._build(SUITES[mutant.suite], mutant.file)
        finally:
            shutil.copyfile(ROOT / mutant.file, file)

    def build_whole(self, suite: Suite) -> Path:
        """The library without a mutant, the suite's objects compiled as with one."""
        return self._build(suite, "")

    def place(self, library: Path) -> None:
        """Puts a library where those with a mutant stand."""
        self.empty()
        self.library.symlink_to(library)
        (self.made / FAST).symlink_to(library)

    def _build(self, suite: Suite, file: str) -> Path:
        """The suite's objects that are compiled from the file, or all of them, and the rest."""
        self.empty()
        link = list(self.link)
        compiled = 0
        if suite.unit:
            # Stands before the objects that have the same kernels: the linker takes the first.
            source, made = self.made / "unit.cu", self.made / "unit.o"
            source.write_text(suite.unit)
            self._compile(self.compiles[0], str(source), made)
            compiled += str(self.scratch / file) in made.with_suffix(".d").read_text()
            link.insert(link.index("-o"), "-Wl,--allow-multiple-definition")
            link.insert(link.index("-o"), str(made))
        for step in self.compiles:
            name = output_of(step)
            if not any(re.search(pattern, name) for pattern in suite.objects):
                continue
            if not file or str(ROOT / file) in self.sources_of[name]:
                made = self.made / (Path(name).name + ".o")
                self._compile(step, None, made)
                link = [str(made) if arg == name else arg for arg in link]
                compiled += 1
        if not compiled:
            raise Stale(f"no object of the suite is compiled from {file}")
        link[link.index("-o") + 1] = str(self.library)
        done = run(link, cwd=BUILD)
        if done.returncode:
            raise Stale(f"does not link:\n{done.stderr[-3000:]}")
        (self.made / FAST).symlink_to(self.library)
        return self.library

    def _compile(self, step: list[str], source: str | None, made: Path) -> None:
        """A step of the build with the copied sources, perhaps another source, to `made`."""
        moved = [arg.replace(f"{ROOT}/c", f"{self.scratch}/c") for arg in step]
        moved = [arg.replace(f"{ROOT}/tests", f"{self.scratch}/tests") for arg in moved]
        # An object is tested once: optimising it takes longer than it saves.
        moved = ["-O0" if arg == "-O1" else arg for arg in moved]
        moved[moved.index("-o") + 1] = str(made)
        for flag in ("-MF", "-MT"):
            if flag in moved:
                moved[moved.index(flag) + 1] = str(made.with_suffix(".d"))
        if source is not None:
            moved[moved.index("-c") + 1] = source
        done = run(moved, cwd=BUILD)
        if done.returncode:
            raise Stale(f"does not compile:\n{done.stderr[-3000:]}")

    def read_files(self) -> list[Path]:
        """The project's files that what was compiled last was compiled from."""
        found = set()
        for listing in self.made.glob("*.d"):
            for word in listing.read_text().replace("\\\n", " ").split():
                path = Path(word.removesuffix(":"))
                if path.is_relative_to(self.scratch) and path.suffix not in (".o", ".d"):
                    path = ROOT / path.relative_to(self.scratch)
                if any(path.is_relative_to(ROOT / folder) for folder in ("cpp", "cuda")):
                    found.add(path)
        found -= {ROOT / path for path in LISTS}
        return sorted(found)

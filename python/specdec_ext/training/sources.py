"""Which texts a run trains on, and which it must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..models.config_reader import ModelConfig
from ..models.folder_cache import file_sha256
from ..models.rope import max_position
from .data import HELD_OUT
from .options import DEFAULT_PROMPTS, TrainOptions
from .overlap import read_texts
from .passes import SELF_MAX_TOKENS
from .prompts import SOURCES, make_prompts
from .texts import Frame, Task, example_tasks, prompt_tasks
from .user_data import read_examples

__all__ = ["Exclusion", "describe_sources", "make_tasks"]


def make_tasks(options: TrainOptions, config: ModelConfig, frame: Frame) -> list[Task]:
    """Every text of the run, checked. Raises ConfigError."""
    collect = options.collect
    new = collect.max_new_tokens
    limit = max_position(config.hf) - max(new, SELF_MAX_TOKENS)
    if limit < 1:
        raise ConfigError(
            f"max_new_tokens = {new}: the target has {max_position(config.hf)} positions, and a "
            "prompt needs some of them; lower --max-new-tokens"
        )
    how = {"max_prompt_len": min(collect.max_prompt_len, limit), "max_new_tokens": new}
    files = options.data or options.prompts
    if not files:
        prompts = make_prompts(collect.num_prompts or DEFAULT_PROMPTS, collect.seed)
        tasks = prompt_tasks(prompts, frame, **how)
    else:
        examples = read_examples(files, prompts=not options.data)
        tasks = example_tasks(examples, frame, seed=collect.seed, **how)[: collect.num_prompts]
    if len(tasks) < 2:
        raise ConfigError(
            f"{', '.join(map(str, files)) or 'num_prompts'}: {len(tasks)} texts are too few to "
            f"train on and to hold out every {HELD_OUT}th; give more"
        )
    return tasks


def describe_sources(options: TrainOptions) -> dict[str, str]:
    """For the card: names and contents of the user's files, no folders of this machine."""
    files = options.data or options.prompts
    if not files:
        return dict(SOURCES)
    how = "given with its answers" if options.data else "prompts, answered by the target"
    described = {}
    for file in map(Path, files):
        path = file.expanduser()
        digest = f", sha256 {file_sha256(path)}" if path.is_file() else ""
        described[path.name] = f"the user's own data: {how}{digest}"
    return described


class Exclusion:
    """The texts of the excluded files, read once as they are needed. ConfigError if one cannot be.

    report  after reading: name, sha256 and number of strings of each file
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [Path(path).expanduser() for path in paths]
        self.report: list[dict[str, Any]] = []
        for path in self._paths:
            if not path.is_file():
                raise ConfigError(f"exclude = {str(path)!r}: no such file; give text files")

    def __iter__(self) -> Iterator[str]:
        self.report = []
        for path in self._paths:
            entry: dict[str, Any] = {
                "name": path.name,
                "sha256": file_sha256(path),
                "strings": 0,
            }
            self.report.append(entry)
            for text in read_texts(path):
                entry["strings"] += 1
                yield text

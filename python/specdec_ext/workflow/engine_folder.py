"""An engine folder, as `specdec build` writes it.

engine.json      limits, mode, what it was built for, the command that builds it again
model/           an ordinary model folder, and step_cost.json: T(rows, context); packed.bin: the
                 weights as the CPU's decoder packs them (docs/packed_weights.md)
medusa/ or redrafter/   what drafts, if the checkpoint has it
manifest.json    what went in; size and sha256 of every file
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from .._version import __version__
from ..config.dtypes import normalize_dtype
from ..config.engine import KvCacheConfig, SchedulerConfig
from ..config.lookahead import LookaheadDecodingConfig
from ..config.methods import MedusaDecodingConfig, ReDrafterDecodingConfig
from ..config.names import canonical_method
from ..config.ngram import NGramDecodingConfig
from ..config.parse import (
    SpeculativeConfig,
    parse_kv_cache_config,
    parse_scheduler_config,
    parse_speculative_config,
)
from ..config.sources import AutoDecodingConfig
from ..config.suffix import SuffixDecodingConfig
from ..errors import ConfigError, ModelError
from ..models.folder_cache import MANIFEST
from ..models.json_file import read_json
from .convert import CHECKPOINT, MEDUSA, REDRAFTER
from .folder_writer import check_folder

if TYPE_CHECKING:
    from ..llm import LLM

__all__ = ["ENGINE", "ENGINE_FILE", "EXTERNAL", "MODEL", "EngineFolder", "engine_mode"]

ENGINE, ENGINE_FILE, MODEL = "engine", "engine.json", "model"
# TensorRT-LLM's mode of drafts from outside: prompt lookup and draft models are built alike.
EXTERNAL = "draft_tokens_external"
_VERSION = 2
# Mode of a build -> what it has room for, where that is not the mode's own method alone.
_RUN_BY = {EXTERNAL: ("ngram", "draft_target"), "auto": ("auto", "suffix", "ngram")}
_LIMITS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")


def engine_mode(mode: str | None) -> str:
    """What an engine's speculative_decoding_mode means: a method, EXTERNAL or "none"."""
    name = ("none" if mode is None else mode).strip().lower().replace("-", "_")
    return EXTERNAL if name == EXTERNAL else canonical_method(name, "speculative_decoding_mode")


def _instead(folder: Path) -> str:
    """What a folder without engine.json is, as far as it can be told, and what to do with it."""
    if not (folder / "config.json").is_file():
        command = f"specdec build --checkpoint_dir=DIR --output_dir={folder}"
        return f"not a complete engine; build it with {command}"
    manifest = folder / MANIFEST
    kind = read_json(manifest, "the manifest").get("kind") if manifest.is_file() else None
    if kind == CHECKPOINT:
        command = f"specdec build --checkpoint_dir={folder} --output_dir=ENGINE"
        return f"a checkpoint, not an engine; build one of it: {command}"
    command = f"specdec convert --model_dir={folder} --output_dir=CKPT"
    return (
        "a model, not an engine; name it with --model, or make an engine of it with "
        f"{command} and specdec build"
    )


@dataclass(frozen=True)
class EngineFolder:
    """What engine.json says.

    mode           as given to `specdec build`; None: no speculation
    max_draft_len  drafts of one step that the limits have room for
    dtype          of K and V
    device         "cpu", "cuda:0", ...; isa: of the CPU, "" on a device
    tp_size        ranks that the model is spread over
    rebuild        the command that builds it
    """

    path: Path
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_beam_width: int
    max_draft_len: int
    tokens_per_block: int
    mode: str | None
    gather_generation_logits: bool
    dtype: str
    device: str
    isa: str
    tp_size: int
    built_by: str
    rebuild: tuple[str, ...]

    @classmethod
    def open(cls, path: str | Path) -> EngineFolder:
        """Read and check a folder. Raises ModelError for one that is incomplete, damaged or of
        another version or instruction set, with the command that builds it again."""
        folder = Path(path).expanduser()
        if folder.is_dir() and not (folder / ENGINE_FILE).is_file():
            raise ModelError(f"{folder}: {ENGINE_FILE} is missing: {_instead(folder)}")
        engine = cls._read(folder) if folder.is_dir() else None
        again = f"build it again: {engine.command}" if engine else "build it with specdec build"
        check_folder(folder, ENGINE, again)
        assert engine is not None  # check_folder refuses what is no folder
        here = {"version": __version__, "isa": _core.cpu_isa() if engine.isa else ""}
        for name, built in (("version", engine.built_by), ("isa", engine.isa)):
            if built != here[name]:
                what = "specdec_ext" if name == "version" else "instruction set"
                raise ModelError(
                    f"{folder}: built for {what} {built!r}, this is {here[name]!r}; {again}"
                )
        return engine

    @classmethod
    def _read(cls, folder: Path) -> EngineFolder:
        file = folder / ENGINE_FILE
        content = read_json(file, "the engine's description")
        if content.get("version") != _VERSION:
            raise ModelError(
                f"{file}: version = {content.get('version')!r}, this specdec_ext reads {_VERSION}; "
                "build the engine again with specdec build"
            )
        names = [field.name for field in dataclasses.fields(cls) if field.name != "path"]
        missing = [name for name in names if name not in content]
        if missing:
            raise ModelError(f"{file}: {missing[0]} is missing; build the engine again")
        values = {name: content[name] for name in names}
        place = f"--output_dir={folder.resolve()}"  # an engine may have been moved since
        again = [place if w.startswith("--output_dir=") else w for w in map(str, values["rebuild"])]
        return cls(path=folder, **{**values, "rebuild": tuple(again)})

    def write(self, folder: Path) -> None:
        """engine.json, into `folder`."""
        content = {**dataclasses.asdict(self), "version": _VERSION}
        del content["path"]
        (folder / ENGINE_FILE).write_text(json.dumps(content, indent=1) + "\n")

    @property
    def command(self) -> str:
        return shlex.join(self.rebuild)

    @property
    def model(self) -> Path:
        return self.path / MODEL

    @property
    def heads(self) -> Path | None:
        """The folder of what drafts beside the model."""
        here = [self.path / name for name in (MEDUSA, REDRAFTER)]
        return next((folder for folder in here if folder.is_dir()), None)

    def speculation(self, given: SpeculativeConfig | None) -> SpeculativeConfig | None:
        """The run-time place of the three: what an engine of this mode runs, asked for `given`.

        None: what the mode alone says. Raises ConfigError naming both numbers.
        """
        method, room = engine_mode(self.mode), self.max_draft_len
        if given is None:
            return self._default(method)
        need, words = (
            given.max_draft_len,
            f"{given.method} with max_draft_len = {given.max_draft_len}",
        )
        if isinstance(given, LookaheadDecodingConfig):
            words = f"lookahead (W,N,G) = {given.triple} with max_draft_len(W,N,G) = {need}"
        allowed = _RUN_BY.get(method, (method,))
        if given.method not in allowed:
            raise ConfigError(
                f"{self.path}: built with speculative_decoding_mode = {self.mode!r} and "
                f"max_draft_len = {room}, asked for {words}; ask for "
                f"{' or '.join(name for name in allowed)}, or build it again for this: "
                f"{self._rebuilt(given)}"
            )
        # A window's size is fixed by the build; of other methods the room is an upper bound.
        if need > room or (method == "lookahead" and need != room):
            ask = f"ask for at most {room}"
            if method == "lookahead":
                ask = f"ask for a (W,N,G) with {room}" + (", such as [7,7,7]" if room == 83 else "")
            raise ConfigError(
                f"{self.path}: built with max_draft_len = {room}, asked for {words}; {ask}, or "
                f"build it again for this: {self._rebuilt(given, self.mode)}"
            )
        return given

    def _default(self, method: str) -> SpeculativeConfig | None:
        room, heads = self.max_draft_len, self.heads
        if method == "ngram":
            return NGramDecodingConfig(max_draft_len=room)
        if method == "suffix":
            return SuffixDecodingConfig(max_draft_len=room)
        if method == "auto":
            return AutoDecodingConfig(max_draft_len=room)
        if method == "medusa":
            return MedusaDecodingConfig(heads)
        if method == "redrafter":
            return ReDrafterDecodingConfig(heads)
        if method in ("none", EXTERNAL):  # drafts, if any, come with the requests
            return None
        remedy = "name the draft model: --draft_engine_dir DIR"
        if method == "eagle3":
            remedy = "name the head: --eagle3 (the shipped one) or --eagle3_model DIR"
        if method == "lookahead":
            remedy = f"give --lookahead_config=[W,N,G] with max_draft_len(W,N,G) = {room}"
            remedy += ", which is [7,7,7]" if room == 83 else ""
        raise ConfigError(
            f"{self.path}: built with speculative_decoding_mode = {self.mode!r} and max_draft_len "
            f"= {room}: that alone does not say how to draft; {remedy}"
        )

    def _rebuilt(self, config: SpeculativeConfig, mode: str | None = None) -> str:
        keep = ("--max_draft_len", "--speculative_decoding_mode")
        words = [word for word in self.rebuild if not word.startswith(keep)]
        modes = {"lookahead": "lookahead_decoding", "redrafter": "explicit_draft_tokens"}
        mode = mode or modes.get(config.method, config.method)
        words += [f"--max_draft_len={config.max_draft_len}", f"--speculative_decoding_mode={mode}"]
        return shlex.join(words)

    def scheduler(self, given: SchedulerConfig) -> SchedulerConfig:
        """`given` within the limits of the build, which stand where it says nothing. Raises
        ConfigError naming both numbers."""
        unsaid = SchedulerConfig()
        values = {}
        for name in _LIMITS:
            limit, asked = getattr(self, name), getattr(given, name)
            if asked is None or asked == getattr(unsaid, name):
                values[name] = limit
            elif asked > limit:
                raise ConfigError(
                    f"{self.path}: built with {name} = {limit}, asked for {name} = {asked}; lower "
                    f"it to {limit}, or build the engine again with --{name}={asked}"
                )
        return dataclasses.replace(given, **values)

    def kv_cache(self, given: KvCacheConfig) -> KvCacheConfig:
        """`given` with the page size of the build. Raises ConfigError for another one."""
        asked, built = given.tokens_per_block, self.tokens_per_block
        if asked not in (KvCacheConfig.tokens_per_block, built):
            raise ConfigError(
                f"{self.path}: built with tokens_per_block = {built}, asked for {asked}; leave it "
                f"out, or build the engine again with --tokens_per_block={asked}"
            )
        return dataclasses.replace(given, tokens_per_block=built)

    def load(
        self,
        speculative_config: Any = None,
        scheduler_config: Any = None,
        kv_cache_config: Any = None,
        *,
        device: str = "auto",
        **how: Any,
    ) -> LLM:
        """An LLM of this engine; `how` are others of LLM's arguments. Raises ConfigError for what
        the build has no room for."""
        from ..llm import LLM

        how["tensor_parallel_size"] = self.check_ranks(how.get("tensor_parallel_size"))
        return LLM(
            self.model,
            speculative_config=self.speculation(parse_speculative_config(speculative_config)),
            scheduler_config=self.scheduler(parse_scheduler_config(scheduler_config)),
            kv_cache_config=self.kv_cache(parse_kv_cache_config(kv_cache_config)),
            device=self.check_device(device),
            **how,
        )

    def check_dtype(self, dtype: str) -> None:
        """Raises ConfigError for a dtype that is not the engine's."""
        if normalize_dtype("dtype", dtype) not in ("auto", self.dtype):
            raise ConfigError(
                f"{self.path}: built in {self.dtype}, asked for dtype = {dtype!r}; leave it out, "
                "or convert the checkpoint to it (specdec convert --dtype) and build again"
            )

    def check_ranks(self, asked: int | None) -> int:
        """The ranks to run on; None: as built. Raises ConfigError naming both numbers."""
        if asked not in (None, self.tp_size):
            raise ConfigError(
                f"{self.path}: built with tp_size = {self.tp_size}, asked for "
                f"tensor_parallel_size = {asked}; use tensor_parallel_size={self.tp_size} "
                f"(--tp_size {self.tp_size}), or convert the model with --tp_size={asked} and "
                "build it again"
            )
        return self.tp_size

    def check_device(self, device: str) -> str:
        """The device to run on. Raises ConfigError for one that the engine was not built for."""
        if device not in ("auto", self.device) and f"{device}:0" != self.device:
            raise ConfigError(
                f"{self.path}: built for device {self.device!r}, asked for {device!r}; leave "
                f"--device out, or build it again: {self.command} --device={device}"
            )
        return self.device

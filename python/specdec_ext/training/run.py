"""From a model folder to a folder of trained heads: data, training, files, card."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from ..config.build_check import check_threads_variable
from ..drafters.eagle3.shape import NUM_TAPS
from ..errors import ConfigError, ModelError
from ..models.config_reader import ModelConfig, read_config
from ..models.default import MODEL_NAME, default_model
from ..models.fingerprint import model_sha256
from ..models.folder_cache import cache_root
from ..models.load import native_weight_bytes
from ..models.native_config import NotNativeError, native_shape
from ..models.place import CPU, resolve_device
from ..text.tokenizer import eos_token_ids, load_tokenizer
from .cache import CacheReader, CacheWriter, fingerprint
from .card import CARD_JSON
from .collect import Collector, collect, shard_keys
from .data import TRAINED_PROMPT, TrainingData
from .estimate import Estimate, Machine, Work, estimate_run, measure_machine
from .finish import finish
from .interrupts import Interrupts, Stopped
from .loop import Training
from .options import TrainOptions
from .passes import TargetPasses
from .products import check_product, make_product, trained_size
from .ranks import Ranks, alone, started_ranks
from .sources import Exclusion, make_tasks
from .texts import Frame, Task
from .work_folder import own_work_folder

__all__ = ["Progress", "train"]


class Progress(Protocol):
    """Who shows how far it is; every method may be called often, on the first rank alone."""

    def on_estimate(self, estimate: Estimate, machine: Machine) -> None: ...

    def on_collect(self, collector: Collector) -> None: ...

    def on_train(self, training: Training) -> None: ...

    def on_measure(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """What is known, and has been checked, before anything is collected."""

    options: TrainOptions
    config: ModelConfig
    name: str
    sha: str
    tokenizer: Any
    frame: Frame
    tasks: list[Task]
    excluded: Exclusion
    cache_dir: Path
    work_dir: Path


def train(options: TrainOptions, progress: Progress) -> dict[str, Any]:
    """Run it all; returns the card, on ranks but the first an empty one.

    ConfigError or ModelError before any work for what cannot be done; Stopped when it was
    interrupted and has saved its state.
    """
    excluded = Exclusion(options.exclude)
    check_threads_variable()
    _check_output(options.output)
    with ExitStack() as held:
        return _train(options, excluded, progress, held)


def _train(
    options: TrainOptions, excluded: Exclusion, progress: Progress, held: ExitStack
) -> dict[str, Any]:
    with started_ranks(options.device) as ranks:
        prepared = _prepare(options, excluded)
        options = prepared.options
        begin = time.monotonic()
        if ranks.is_first:
            held.enter_context(own_work_folder(prepared.work_dir))
        with Interrupts() as interrupts:
            estimate = _collect(prepared, ranks, interrupts, progress)
            collected = time.monotonic()
            reader = CacheReader(
                prepared.cache_dir, shard_keys(prepared.tasks, options.collect.shard_size)
            )
            assert options.draft_vocab_size is not None
            data = TrainingData(
                reader,
                draft_vocab_size=options.draft_vocab_size,
                decode=prepared.tokenizer.decode if options.exclude else None,
                exclude=excluded,
            )
            product = make_product(
                options, data, prepared.config, prepared.sha, prepared.name, ranks.device
            )
            training = Training(
                product, data, options.settings, folder=prepared.work_dir, ranks=ranks
            )
            on_step = progress.on_train if ranks.is_first else None
            training.run(on_step, interrupts=interrupts)
        facts = {
            "device": str(ranks.device),
            "ranks": ranks.world,
            "estimate": estimate.to_dict(),
            "collect_seconds": round(collected - begin, 1),
            "train_seconds": round(time.monotonic() - collected, 1),
        }
    if not ranks.is_first:
        return {}
    if options.measure_prompts > 0:
        progress.on_measure()
    target = {"name": prepared.name, "sha256": prepared.sha}
    with alone():
        card = finish(options, training, data, prepared.config.path, target, facts, excluded.report)
    if options.work_dir is None:
        shutil.rmtree(prepared.work_dir, ignore_errors=True)
    return card


def _prepare(options: TrainOptions, excluded: Exclusion) -> _Prepared:
    model = default_model() if options.model is None else Path(options.model).expanduser()
    config = read_config(model)
    options = options.for_target(config)
    check_product(options, config)
    tokenizer = load_tokenizer(None, model)
    if tokenizer is None:
        raise ModelError(
            f"{model}: has no tokenizer, and training data need one; put its files into the folder"
        )
    eos = eos_token_ids(config.eos_token_ids, config.vocab_size, tokenizer)
    frame = Frame(tokenizer, options.chat_template, eos)
    tasks = make_tasks(options, config, frame)
    sha = model_sha256(model)
    name = MODEL_NAME if options.model is None else model.name
    root = cache_root() / "training"
    # Another run has another checkpoint; an equal one goes on from it.
    what = {**dataclasses.asdict(options), "texts": [task.key for task in tasks]}
    del what["output"]  # where the result goes does not change it
    run = fingerprint(json.loads(json.dumps(what, default=str)))[:12]
    return _Prepared(
        options, config, name, sha, tokenizer, frame, tasks, excluded,
        options.cache_dir or root / f"{name}-{sha[:12]}",
        options.work_dir or root / f"work-{options.product}-{sha[:12]}-{run}",
    )  # fmt: skip


def _collect(
    prepared: _Prepared, ranks: Ranks, interrupts: Interrupts, progress: Progress
) -> Estimate:
    """Complete the cache; what cannot fit is refused before the target is loaded."""
    options, config, tasks = prepared.options, prepared.config, prepared.tasks
    settings = options.collect
    machine = measure_machine(ranks.device, prepared.cache_dir)
    writer = CacheWriter(
        prepared.cache_dir,
        {
            "model_sha256": prepared.sha,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
        },
    )
    keys = shard_keys(tasks, settings.shard_size)
    missing = {key for part in keys if not writer.has(part) for key in part}
    todo = [task for task in tasks if task.key in missing]
    estimate = estimate_run(_work(prepared, todo, ranks), machine)
    if ranks.is_first:
        progress.on_estimate(estimate, machine)
    estimate.check(machine, prepared.cache_dir)
    stopped: Stopped | None = None
    if todo:
        place = CPU if ranks.device.type == "cpu" else resolve_device(str(ranks.device))
        longest = max(len(task.ids) for task in tasks)
        passes = TargetPasses(
            config.path,
            prepared.tokenizer,
            prepared.frame,
            max_prompt_len=max(longest, min(settings.max_prompt_len, 64)),
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            place=place,
        )
        passes.model.head_rows(torch.zeros(1, dtype=torch.int32))  # refused now, not afterwards
        collector = Collector(writer, passes, tasks, settings.shard_size, ranks=ranks)
        ranks.wait()  # all have read what an earlier run left, before any writes its own
        try:
            collect(
                collector,
                interrupts=interrupts,
                time_limit_s=options.collect_time_limit,
                on_step=progress.on_collect if ranks.is_first else None,
            )
        except Stopped as error:
            stopped = error
    if ranks.any(stopped is not None):
        raise stopped or Stopped("another rank was stopped")
    if ranks.is_first and all(writer.has(part) for part in keys):
        writer.drop("pending-*.safetensors")
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return estimate


def _work(prepared: _Prepared, todo: list[Task], ranks: Ranks) -> Work:
    options, config = prepared.options, prepared.config
    settings, collect = options.settings, options.collect
    width = 4 if config.dtype in (None, "float32") else 2
    weights = native_weight_bytes(config, width)
    try:
        kv = 2 * native_shape(config).num_layers * config.num_kv_heads * config.head_dim * width
    except NotNativeError:
        kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
        weights = sum(f.stat().st_size for f in config.path.glob("*.safetensors"))
    new = collect.max_new_tokens
    lengths = [len(task.answer) if task.answer is not None else new for task in prepared.tasks]
    written = [new for task in todo if task.answer is None]
    read = sum(len(task.ids) + len(task.answer or ()) for task in todo)
    mean = sum(lengths) / len(lengths)
    parts = settings.accumulation * ranks.world
    rows = int(mean * -(-settings.batch_texts // parts))
    trained, widths = trained_size(options, config)
    prompts = [len(task.ids) for task in prepared.tasks]
    state_tokens = state_bytes = 0
    # Rows of the trained network for each of the batch's; a drafter reads prompts, too.
    if options.product == "medusa":
        share = sum(1 / (h + 1) for h in range(options.num_heads)) / options.num_heads
    elif options.product == "redrafter":
        share = options.draft_len / 3
    elif options.product == "eagle3":
        share = options.draft_len * (
            1 + min(TRAINED_PROMPT, collect.max_prompt_len) / max(1.0, mean)
        )
        kept = sum(lengths) + sum(min(length, TRAINED_PROMPT) for length in prompts)
        state_tokens = sum(lengths) + sum(prompts)
        state_bytes = kept * NUM_TAPS * config.hidden_size * 2
    else:
        share = 1 + min(TRAINED_PROMPT, collect.max_prompt_len) / max(1.0, mean)
    assert options.draft_vocab_size is not None
    return Work(
        product=options.product,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        target_bytes=weights,
        target_parameters=weights // width,
        kv_token_bytes=kv,
        write_tokens=sum(written),
        read_tokens=read,
        cache_tokens=sum(written) + sum(len(task.answer or ()) for task in todo),
        max_prompt_len=collect.max_prompt_len,
        max_new_tokens=new,
        batch_size=collect.batch_size,
        draft_vocab_size=options.draft_vocab_size,
        trained=trained,
        widths=widths,
        embeds=options.product != "medusa",
        rows=rows,
        trained_rows=int(rows * share),
        step_rows=int(mean * settings.batch_texts),
        steps=settings.steps,
        ranks=ranks.world,
        state_tokens=state_tokens,
        state_bytes=state_bytes,
        epochs=settings.steps * settings.batch_texts / len(lengths),
    )


def _check_output(output: Path) -> None:
    """An existing folder is only replaced if an earlier run wrote it: a model's is not."""
    if not output.exists():
        return
    if not output.is_dir() or (any(output.iterdir()) and not (output / CARD_JSON).is_file()):
        raise ConfigError(
            f"output = {str(output)!r}: exists and was not written by this command; give another "
            "folder"
        )

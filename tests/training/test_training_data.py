"""Prompts, the overlap test, the cache on disk, batches."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from workshop import MAX_NEW, MAX_PROMPT, NUM_PROMPTS, SHARD, Workshop

from emulators import devices
from specdec_ext.errors import ConfigError, ModelError
from specdec_ext.models import load_model
from specdec_ext.models.place import resolve_device
from specdec_ext.training import cache
from specdec_ext.training.cache import CacheReader, CacheWriter, TextRecord
from specdec_ext.training.collect import Collector, collect
from specdec_ext.training.data import HELD_OUT, TrainingData, frequent_tokens
from specdec_ext.training.interrupts import Interrupts, Stopped
from specdec_ext.training.overlap import NGRAM, read_texts, shared_runs
from specdec_ext.training.prompts import CATEGORIES, make_prompts
from specdec_ext.training.texts import Task

CPU = torch.device("cpu")

# -- prompts --------------------------------------------------------------------------------------


def test_prompts_are_a_function_of_count_and_seed() -> None:
    first, again, other = make_prompts(200, 1), make_prompts(200, 1), make_prompts(200, 2)
    assert first == again
    assert first != other
    assert len({p.seed for p in first}) == len(first)


def test_every_part_of_the_list_is_a_mix() -> None:
    prompts = make_prompts(400, 3)
    for at in range(0, 400, 100):
        part = [p.category for p in prompts[at : at + 100]]
        for category, share in CATEGORIES.items():
            assert abs(part.count(category) - 100 * share) <= 4, (at, category)


def test_prompts_repeat_rarely_and_only_self_is_empty() -> None:
    prompts = make_prompts(2000, 4)
    texts = [p.text for p in prompts if p.category != "self"]
    assert len(set(texts)) > 0.99 * len(texts)
    assert all((p.text == "") == (p.category == "self") for p in prompts)


# -- overlap --------------------------------------------------------------------------------------

WORDS = [f"w{i}" for i in range(100)]


def test_a_run_of_thirteen_words_is_found_and_twelve_are_not() -> None:
    ours = ["other words", "A, b! " + "; ".join(WORDS[:NGRAM]).upper() + " end"]
    assert shared_runs(ours, [" ".join(["x", *WORDS[:NGRAM], "y"])]) == {1: " ".join(WORDS[:NGRAM])}
    assert shared_runs(ours, [" ".join(["x", *WORDS[: NGRAM - 1], "y"])]) == {}
    assert shared_runs(ours, ["_".join(WORDS[:NGRAM])]) != {}  # markup hides nothing


def test_overlap_equals_a_plain_search() -> None:
    rng = random.Random(7)
    texts = [[rng.choice("ab") for _ in range(60)] for _ in range(40)]
    ours, theirs = texts[:20], texts[20:]

    def runs(words: list[str]) -> set[tuple[str, ...]]:
        return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}

    shared = {i for i, a in enumerate(ours) if any(runs(a) & runs(b) for b in theirs)}
    assert 0 < len(shared) < len(ours)
    found = shared_runs([" ".join(a) for a in ours], (" ".join(b) for b in theirs))
    assert set(found) == shared


def test_texts_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"q": "one", "n": 3, "l": ["two", {"x": "three"}]}\n"four"\n'
    )
    (tmp_path / "b.txt").write_text("five\nsix")
    assert list(read_texts(tmp_path / "a.jsonl")) == ["one", "two", "three", "four"]
    assert list(read_texts(tmp_path / "b.txt")) == ["five\nsix"]
    (tmp_path / "c.json").write_text("{")
    for name in ("c.json", "missing.txt"):
        with pytest.raises(ConfigError, match=name):
            list(read_texts(tmp_path / name))


def test_a_text_that_overlaps_is_not_trained_on(
    workshop: Workshop, tasks: list[Task], cache_dir: Path
) -> None:
    reader = workshop.reader(cache_dir, tasks)
    chosen = next(r for r in reader if r.category == "chat" and r.index % HELD_OUT)

    def decode(ids: list[int]) -> str:  # bytes of a random model hold few words: make some
        return " ".join(f"t{i}" for i in ids)

    spoilt = decode(chosen.tokens.tolist()[-20:])
    data = TrainingData(reader, draft_vocab_size=200, decode=decode, exclude=[spoilt])
    plain = TrainingData(reader, draft_vocab_size=200)
    assert data.dropped >= 1
    assert chosen.index not in {r.index for r in (*data.train, *data.held_out)}
    assert len(data.train) + len(data.held_out) + data.dropped == len(plain.train) + len(
        plain.held_out
    )


# -- the cache ------------------------------------------------------------------------------------


def test_hidden_states_are_what_decided_the_tokens(
    target: Path, workshop: Workshop, tasks: list[Task], cache_dir: Path
) -> None:
    """The head on a greedy text's hidden states gives its tokens; float16 costs a near tie."""
    model = load_model(target, max_rows=64)
    records = workshop.reader(cache_dir, tasks, verify=True)
    greedy = [r for r in records if not tasks[r.index].temperature]
    assert len(greedy) > 30
    for record in greedy:
        scores = model.head(record.hidden.float())
        chosen = scores.gather(1, record.continuation.to(torch.int64)[:, None])[:, 0]
        assert bool((scores.max(dim=1).values - chosen <= 0.02).all())
        assert record.prompt_len <= MAX_PROMPT
        assert 1 <= len(record.continuation) <= MAX_NEW
        assert record.category == tasks[record.index].category


def test_reading_a_text_gives_the_bits_of_writing_it(
    workshop: Workshop, tasks: list[Task], cache_dir: Path, tmp_path: Path
) -> None:
    """The user's texts and the target's own go through other passes to the same hidden states."""
    written = list(workshop.reader(cache_dir, tasks))[:20]
    given = [
        Task(
            key=r.key, category=r.category, ids=tuple(r.tokens[: r.prompt_len].tolist()),
            answer=tuple(r.continuation.tolist()),
        )
        for r in written
    ]  # fmt: skip
    for batch in (8, 3):
        folder = tmp_path / str(batch)
        collect(workshop.collector(folder, given, batch))
        read = list(workshop.reader(folder, given))
        assert [r.index for r in read] == list(range(20))
        for mine, theirs in zip(read, written, strict=True):
            assert torch.equal(mine.tokens, theirs.tokens)
            assert torch.equal(mine.hidden, theirs.hidden)


def test_every_prompt_is_there_once(workshop: Workshop, tasks: list[Task], cache_dir: Path) -> None:
    records = list(workshop.reader(cache_dir, tasks))
    assert [r.index for r in records] == list(range(NUM_PROMPTS))
    assert [r.key for r in records] == [task.key for task in tasks]


def same_files(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_a_killed_run_is_continued_to_the_same_bytes(
    workshop: Workshop, tasks: list[Task], cache_dir: Path, tmp_path: Path
) -> None:
    collector = workshop.collector(tmp_path, tasks, 5)
    while not list(tmp_path.glob("shard-*.safetensors")):
        assert collector.step()
    del collector
    assert len(list(tmp_path.glob("shard-*.safetensors"))) < 5
    collect(workshop.collector(tmp_path, tasks, 7))
    same_files(cache_dir, tmp_path)


def test_an_interrupt_keeps_every_finished_text(
    workshop: Workshop, tasks: list[Task], cache_dir: Path, tmp_path: Path
) -> None:
    """SIGINT in the middle of the first shard: what had ended is not written again."""
    with Interrupts() as interrupts:

        def on_step(collector: Collector) -> None:
            if collector.num_done == 5:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(Stopped, match="5 of 72 texts"):
            collect(workshop.collector(tmp_path, tasks, 5), interrupts=interrupts, on_step=on_step)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["pending-0.safetensors"]
    again = workshop.collector(tmp_path, tasks, 6)
    assert again.num_done == 5
    collect(again)
    same_files(cache_dir, tmp_path)


def test_what_is_done_is_saved_every_minute(
    workshop: Workshop, tasks: list[Task], tmp_path: Path
) -> None:
    times = itertools.count(0, 25.0)
    seen = []

    def on_step(collector: Collector) -> None:
        seen.append((tmp_path / "pending-0.safetensors").is_file())
        if len(seen) == 60:
            raise KeyError

    with pytest.raises(KeyError):
        collector = workshop.collector(tmp_path, tasks, 16)
        collect(collector, on_step=on_step, clock=lambda: next(times))
    first = seen.index(True)
    assert all(seen[first:]) and workshop.collector(tmp_path, tasks).num_done > 0


def test_a_cache_grows(
    workshop: Workshop, tasks: list[Task], cache_dir: Path, tmp_path: Path
) -> None:
    """More texts, in front or behind, leave what is there; equal texts are not made twice."""
    shutil.copytree(cache_dir, tmp_path / "cache")
    more = [*workshop.tasks(20, seed=5), *tasks]
    collector = workshop.collector(tmp_path / "cache", more)
    assert collector.num_done == NUM_PROMPTS
    collect(collector)
    assert {p.name for p in cache_dir.iterdir()} < {p.name for p in (tmp_path / "cache").iterdir()}
    grown = {r.key: r for r in workshop.reader(tmp_path / "cache", more)}
    assert len(grown) == 92
    for record in workshop.reader(cache_dir, tasks):
        assert torch.equal(grown[record.key].hidden, record.hidden)


def test_data_of_another_model_are_not_mixed_in(cache_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"holds data of another model: model_sha256"):
        CacheWriter(cache_dir, {"model_sha256": "other", "hidden_size": 32, "vocab_size": 258})


def test_a_time_limit_leaves_complete_shards(
    workshop: Workshop, tasks: list[Task], tmp_path: Path
) -> None:
    collect(workshop.collector(tmp_path, tasks), time_limit_s=0.0)
    with pytest.raises(ModelError, match="holds no complete shard yet"):
        workshop.reader(tmp_path, tasks)


def test_a_full_disk_leaves_nothing_half_written(
    workshop: Workshop, tasks: list[Task], cache_dir: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    real = cache.save_file

    def full(tensors: Any, path: Path, **how: Any) -> None:
        if len(list(tmp_path.glob("shard-*"))) < 2:
            return real(tensors, path, **how)
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "save_file", full)
    with pytest.raises(ModelError, match=r"No space left on device.*free space.*goes on with it"):
        collect(workshop.collector(tmp_path, tasks))
    assert not list(tmp_path.glob("*.partial")) and len(list(tmp_path.glob("shard-*"))) == 2
    monkeypatch.undo()
    collect(workshop.collector(tmp_path, tasks))
    same_files(cache_dir, tmp_path)


def test_damage_is_found(
    workshop: Workshop, tasks: list[Task], cache_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(cache_dir, folder)
    shard = sorted(folder.glob("shard-*"))[1]
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    CacheReader(folder)
    with pytest.raises(ModelError, match=r"damaged: its content does not match"):
        CacheReader(folder, verify=True)
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=r"shard-.*not a shard"):
        workshop.reader(folder, tasks)
    shutil.copy(sorted(cache_dir.glob("shard-*"))[0], shard)
    with pytest.raises(ModelError, match=r"other texts than its name says"):
        workshop.reader(folder, tasks)
    (folder / "cache.json").write_text("[]")
    with pytest.raises(ModelError, match="not a training cache"):
        CacheReader(folder)


def test_a_hidden_state_out_of_range_is_refused(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path, {"hidden_size": 2, "vocab_size": 9})
    hidden = torch.tensor([[1e9, 0.0]])
    record = TextRecord("00" * 32, "chat", torch.tensor([1, 2]), 1, hidden)
    with pytest.raises(ModelError, match="not finite in float16"):
        writer.write("shard-x.safetensors", [record])
    assert not list(tmp_path.glob("shard-*"))


@devices
def test_a_device_reads_and_writes_what_the_cpu_does(
    workshop: Workshop, tasks: list[Task], cache_dir: Path, device: str, tmp_path: Path
) -> None:
    """Batched on --device: the same greedy tokens; hidden states differ by rounding alone."""
    expected = [r for r in workshop.reader(cache_dir, tasks) if not tasks[r.index].temperature]
    expected = [r for r in expected if not tasks[r.index].self_written][:4]
    passes = workshop.passes(3, place=resolve_device(device))
    given = [
        Task(
            r.key, r.category, tuple(r.tokens[: r.prompt_len].tolist()),
            tuple(r.continuation.tolist()),
        )
        for r in expected
    ]  # fmt: skip
    for part in ([tasks[r.index] for r in expected], given):
        folder = tmp_path / str(part[0].answer is None)
        collect(Collector(workshop.writer(folder), passes, part, SHARD))
        for mine, theirs in zip(workshop.reader(folder, part), expected, strict=True):
            assert torch.equal(mine.tokens, theirs.tokens)
            assert torch.allclose(mine.hidden.float(), theirs.hidden.float(), atol=0.01)


# -- batches --------------------------------------------------------------------------------------


def test_the_split_is_by_prompt_and_the_vocabulary_by_frequency(data: TrainingData) -> None:
    assert all(r.index % HELD_OUT == 0 for r in data.held_out)
    assert not {r.index for r in data.train} & {r.index for r in data.held_out}
    counts = torch.bincount(torch.cat([r.continuation for r in data.train]), minlength=258)
    inside = counts[data.token_ids.to(torch.int64)]
    outside = counts.clone()
    outside[data.token_ids.to(torch.int64)] = 0
    assert int(inside.min()) >= int(outside.max())
    assert bool((data.token_ids[1:] > data.token_ids[:-1]).all())
    ranked = inside[data.ranked]
    assert bool((ranked[1:] <= ranked[:-1]).all())
    assert sorted(data.ranked.tolist()) == list(range(200))
    few = [TextRecord("0", "chat", torch.tensor([7, 7, 3]), 0, torch.zeros(3, 2))]
    assert frequent_tokens(few, 5, 9).tolist() == [7, 3, 0, 1, 2]


def test_pairs_stay_inside_their_text(data: TrainingData) -> None:
    [batch] = data.parts(3, 4, 11, CPU)
    expected = []
    base = 0
    for text in batch.texts:
        tokens = text.continuation.tolist()
        expected += [
            (base + j, base + j + 2)
            for j in range(len(tokens) - 2)
            if tokens[j + 2] in set(data.token_ids.tolist())
        ]
        base += len(tokens)
    rows, later = batch.pairs(2)
    assert list(zip(rows.tolist(), later.tolist(), strict=True)) == expected


def test_the_parts_of_a_step_are_its_texts_and_its_draws(data: TrainingData) -> None:
    [whole] = data.parts(2, 7, 5, CPU)
    parts = data.parts(2, 7, 5, CPU, 3)
    assert [t.key for part in parts for t in part.texts] == [t.key for t in whole.texts]
    assert all(torch.equal(part.step_labels, whole.labels) for part in parts)
    for stride in (1, 2, 3):
        chosen = [
            row + part.first_row
            for part in parts
            for row in part.every(torch.arange(len(part.tokens)), stride).tolist()
        ]
        assert chosen == whole.every(torch.arange(len(whole.tokens)), stride).tolist()
    assert len(data.parts(2, 2, 5, CPU, 5)) == 2  # more parts than texts: none is empty
    assert [p.first_row for p in data.parts(2, 7, 5, CPU, 3, slice(1, 2))] == [parts[1].first_row]


def test_an_epoch_holds_every_text_once(data: TrainingData) -> None:
    steps = len(data.train) // 4
    seen = [r.index for s in range(steps) for r in data.chosen(s, 4, 9)]
    assert len(seen) == len(set(seen)) == 4 * steps


def test_too_little_data_is_refused(workshop: Workshop, tasks: list[Task], cache_dir: Path) -> None:
    reader = workshop.reader(cache_dir, tasks)
    with pytest.raises(ConfigError, match="draft_vocab_size = 300"):
        TrainingData(reader, draft_vocab_size=300)
    reader._records = reader._records[1:5]
    with pytest.raises(ConfigError, match="too few"):
        TrainingData(reader, draft_vocab_size=100)

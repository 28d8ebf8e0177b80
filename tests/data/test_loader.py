"""Batches against a reference that goes row by row, and passes over the data."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.engine.worker import tiny
from tests.rows import train_vocabulary, write_data
from tests.small import item, rows_of
from xlme_ds.config import DataConfig, ObjectiveConfig
from xlme_ds.data.batch import Batch
from xlme_ds.data.collate import collate
from xlme_ds.data.loader import Loader
from xlme_ds.data.masking import draw_masks, philox
from xlme_ds.data.schema import EOS, TASKS, Rows, read_manifest, write_manifest
from xlme_ds.data.shards import RowStore
from xlme_ds.objectives import objective_of
from xlme_ds.train.data import open_loader

ROWS = 40
DATA = DataConfig(mono_rows=12, para_rows=12, micro_batch=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "mixed", ROWS)


def reference(folder: Path, numbers: list[list[int]], seed: int) -> Batch:
    """The batch of row numbers by task, one token at a time."""
    tokens, positions, segments, sides, languages, tasks, keys, masked, uniforms = ([] for _ in range(9))
    for task, name in enumerate(TASKS):
        records = [
            r
            for shard in read_manifest(folder / name).shards
            for r in pa.ipc.open_file(str(folder / name / shard.name)).read_all().to_pylist()
        ]
        for number in numbers[task]:
            record = records[number % len(records)]
            position, segment, side, language, codes = [], [], [], [], list(record["languages"])
            for n, length in enumerate(record["lengths"], 1):
                second, code = 0, codes.pop(0)
                for place in range(length):
                    position.append(place)
                    segment.append(n)
                    side.append(second)
                    language.append(code)
                    if task == 1 and record["tokens"][len(position) - 1] == EOS and not second:
                        second, code = 1, codes.pop(0)
            assert not codes
            padding = [0] * (len(record["tokens"]) - len(position))
            text = np.array([record["tokens"]], dtype=np.int32)
            row = Rows(
                text, np.array([len(record["lengths"])]), np.array(record["lengths"]), np.array(record["languages"])
            )
            where, uniform = draw_masks([(task, row, np.array([number]))], seed, 0.15)
            masked += [len(tokens) * len(record["tokens"]) + int(column) for column in where]
            uniforms += uniform.tolist()
            tokens.append(record["tokens"])
            positions.append(position + padding)
            segments.append(segment + padding)
            sides.append(side + padding)
            languages.append(language + padding)
            tasks.append(task)
            words = philox(*(np.uint64(n) for n in (0xFFFFFFFF, task, number, 0, seed)))
            key = words[0] + (words[1] << 32)
            keys.append(key - 2**64 if key >= 2**63 else key)
    integers = tokens, positions, segments, sides, languages, tasks, keys, masked
    return Batch(*(torch.tensor(part) for part in integers), torch.tensor(uniforms))


def assert_equal(one: Batch, other: Batch) -> None:
    assert not one.added and not other.added
    for name, ours, theirs in zip(Batch._fields, one.tensors(), other.tensors(), strict=False):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("step", [0, 2, 3, 7])  # step 3 wraps around within the step, 7 starts in the third pass
def test_a_batch_is_its_rows(folder: Path, world: int, step: int) -> None:
    for rank in range(world):
        loader = Loader(folder, DATA, 7, 0.15, rank, world)
        batches = loader.micro_batches(step)
        assert len(batches) == loader.plan.accumulation == 4 // world
        for micro, batch in enumerate(batches):
            start = step * 12 + (micro * world + rank) * 3
            assert_equal(batch, reference(folder, [list(range(start, start + 3))] * 2, 7))


@pytest.mark.parametrize("world", [1, 2])
def test_phases_read_their_folders(folder: Path, tmp_path: Path, world: int) -> None:
    """Row numbers go on at the border, modulo the rows of each folder; the shares are the phase's."""
    other = write_data(tmp_path / "other", 25, seed=3)
    data = replace(DATA, phase_steps=(2,), phase_mask_fractions=(0.15, 0.15))
    for rank in range(world):
        loader = Loader([folder, other], data, 7, 0.5, rank, world)
        for step, place in ((1, folder), (2, other), (5, other)):
            for micro, batch in enumerate(loader.micro_batches(step)):
                start = step * 12 + (micro * world + rank) * 3
                assert_equal(batch, reference(place, [list(range(start, start + 3))] * 2, 7))
    fractions = replace(data, phase_mask_fractions=(0.15, 0.6))
    both = [len(Loader([folder, folder], fractions, 7, 0.5).micro_batches(step)[0].masked_M) for step in (1, 2)]
    assert 3 < both[1] / both[0] < 5
    again = replace(data, phase_steps=(2, 5), phase_mask_fractions=(0.15,) * 3)
    shares = Loader([folder, other, folder], again, 7, 0.15).shares(0, 8)
    assert {store.rows: share for store, share in shares.items()} == {ROWS: 3 / 8, 25: 5 / 8}


@pytest.mark.parametrize(
    "made", [ObjectiveConfig("btmlm", pseudo_fractions=(0.5,)), ObjectiveConfig("mt", back_translation=("0:1",))]
)
def test_made_text_is_in_the_languages_of_its_phase(folder: Path, tmp_path: Path, made: ObjectiveConfig) -> None:
    codes = ("de", "en", "fr", "sv")
    more = write_data(tmp_path / "more", ROWS)
    manifest = read_manifest(more / "mono")
    write_manifest(more / "mono", replace(manifest, languages=codes))
    data = replace(DATA, para_rows=0, phase_steps=(2,))
    languages = codes if made.name == "mt" else ()
    for folders, phases in (((folder, more), (False, True)), ((more, folder), (True, False))):
        loader = Loader(folders, data, 1, 0.15, languages=languages, maker=objective_of(made))
        for step, has_sv in ((1, phases[0]), (3, phases[1])):
            batches = loader.micro_batches(step)
            found = torch.stack([batch.added.get("target_languages_BT", batch.languages_BT) for batch in batches])
            assert (found == codes.index("sv")).any().item() == has_sv


def test_the_text_of_every_phase_is_named(folder: Path, tmp_path: Path) -> None:
    """By the fingerprints of what it was mixed from: a model is not evaluated on text that any phase read."""
    for name, text in (("one", "b"), ("two", "a")):
        shutil.copytree(folder, tmp_path / name)
        for task in TASKS:
            manifest = read_manifest(tmp_path / name / task)
            encoded = {"encoded": f"{text} {task}"}
            write_manifest(tmp_path / name / task, replace(manifest, settings=manifest.settings | encoded))
    data = replace(DATA, phase_steps=(2, 2))
    loader = Loader([tmp_path / "one", tmp_path / "two", tmp_path / "one"], data, 7, 0.15)
    assert loader.encoded_fingerprints == ["a mono", "a para", "b mono", "b para"]
    both, second, third = (list(TASKS), *([f"{task} from step {step}" for task in TASKS] for step in (2, 4)))
    until = {steps: list(loader.fingerprints_until(steps)) for steps in (0, 2, 3, 4, 5)}
    assert until == {0: both, 2: both, 3: both + second, 4: both + second, 5: both + second + third}
    assert loader.fingerprints == loader.fingerprints_until(5)


def test_one_task_alone(folder: Path) -> None:
    loader = Loader(folder, replace(DATA, mono_rows=0), 7, 0.15)
    assert list(loader.fingerprints) == ["para"]
    assert_equal(loader.micro_batches(1)[0], reference(folder, [[], [12, 13, 14]], 7))


def test_unequal_tasks(folder: Path) -> None:
    loader = Loader(folder, replace(DATA, para_rows=4), 7, 0.15)
    assert_equal(loader.micro_batches(2)[1], reference(folder, [[27, 28, 29], [9]], 7))


def test_a_second_pass_reads_the_same_rows_under_new_masks(folder: Path) -> None:
    loader = Loader(folder, DataConfig(ROWS, ROWS, micro_batch=ROWS), 7, 0.15)
    first, second = loader.micro_batches(0)[0], loader.micro_batches(1)[0]
    for name in ("tokens_BT", "positions_BT", "segments_BT", "sides_BT", "languages_BT", "task_B"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert len(first.masked_M) == len(second.masked_M) and not torch.equal(first.masked_M, second.masked_M)
    # Two independent choices of 15% agree in about 15% of their positions.
    common = len(set(first.masked_M.tolist()) & set(second.masked_M.tolist())) / len(first.masked_M)
    assert 0.05 < common < 0.3
    assert_equal(first, Loader(folder, DataConfig(ROWS, ROWS, micro_batch=ROWS), 7, 0.15).micro_batches(0)[0])


def test_the_cut_changes_no_row(folder: Path) -> None:
    """The rows, masks and uniforms of a step, as a set, at several micro-batches and ranks."""
    steps = []
    for micro_batch, world in ((12, 1), (3, 1), (3, 2), (1, 4)):
        rows = []
        for rank in range(world):
            for batch in Loader(folder, replace(DATA, micro_batch=micro_batch), 7, 0.15, rank, world).micro_batches(3):
                masked, uniforms = batch.masked_M.numpy(), batch.uniforms_M.numpy()
                for n, (task, tokens) in enumerate(zip(batch.task_B.tolist(), batch.tokens_BT.tolist(), strict=True)):
                    mine = masked // 32 == n
                    rows.append((task, tokens, (masked[mine] - 32 * n).tolist(), uniforms[mine].tolist()))
        steps.append(sorted(rows))
    assert len(steps[0]) == 24
    assert all(other == steps[0] for other in steps[1:])


def test_tasks_in_turns(folder: Path) -> None:
    loader = Loader(folder, replace(DATA, alternate=True), 7, 0.15)
    assert_equal(loader.micro_batches(4)[1], reference(folder, [[27, 28, 29], []], 7))
    assert_equal(loader.micro_batches(5)[1], reference(folder, [[], [27, 28, 29]], 7))
    assert loader.describe_rows(4) == "mono 24-35" and loader.describe_rows(5, 1) == "para 27-29"
    assert Loader(folder, replace(DATA, micro_batch=1), 7, 0.15).describe_rows(2, 1) == "mono 25, para 25"
    text = Loader(folder, replace(DATA, para_rows=0), 7, 0.15)  # of 40 rows
    assert text.describe_rows(3) == "mono 36-39, mono 0-7", "as `xlme prep show` counts them"
    assert loader.probe().task_B.tolist() == [0, 1] and len(loader.first_rows(7).task_B) == 14
    assert len(loader.first_rows(1000).task_B) == 2 * ROWS


def test_languages_are_numbered_as_asked(folder: Path) -> None:
    ours, asked = (
        Loader(folder, DATA, 7, 0.15, languages=codes).micro_batches(1)[0] for codes in ((), ("fr", "xx", "en", "de"))
    )
    renumbered = torch.tensor([3, 2, 0])[ours.languages_BT]  # de, en, fr
    assert torch.equal(asked.languages_BT, renumbered * (ours.segments_BT > 0))
    assert_equal(asked._replace(languages_BT=ours.languages_BT), ours)
    with pytest.raises(
        ValueError,
        match=r"has text in fr, which model\.language_embeddings does not name: set .* to de en fr",
    ):
        Loader(folder, DATA, 7, 0.15, languages=("de", "en"))


@pytest.mark.parametrize("alternate", [False, True])
def test_a_phase_of_longer_rows(folder: Path, tmp_path: Path, alternate: bool) -> None:
    """Its steps have as many tokens, in fewer rows; row numbers continue, by hand. Shorter rows come back."""
    longer = write_data(tmp_path / "longer", 15, row_tokens=96, seed=4)
    data = DataConfig(12, 12, micro_batch=6, alternate=alternate, phase_steps=(3, 2))
    first_rows = {  # of each step, by task: 12 rows until step 3, then 4, from step 5 on 12
        False: [(0, 0), (12, 12), (24, 24), (36, 36), (40, 40), (44, 44), (56, 56)],
        True: [(0, None), (None, 0), (12, None), (None, 12), (24, None), (None, 16), (28, None)],
    }[alternate]
    for world in (1, 2):
        for rank in range(world):
            loader = Loader([folder, longer, folder], data, 7, 0.15, rank, world)
            assert (loader.plan.accumulation, loader.row_lengths) == (2 // world, [32, 96, 32])
            for step, starts in enumerate(first_rows):
                micro_rows = 2 if step in (3, 4) else 6
                place = longer if step in (3, 4) else folder
                for micro, batch in enumerate(loader.micro_batches(step)):
                    begin = (micro * world + rank) * micro_rows
                    rows = [[] if s is None else list(range(s + begin, s + begin + micro_rows)) for s in starts]
                    assert_equal(batch, reference(place, rows, 7))
    odd = replace(data, mono_rows=10, para_rows=10, micro_batch=5)
    with pytest.raises(ValueError, match=r"from step 3 on rows are 3 times as long, so that a step would have 10/3"):
        Loader([folder, longer, folder], odd, 7, 0.15)
    with pytest.raises(ValueError, match=r"and a micro-batch 1/3 \+ 1/3: choose data.mono_rows, data.para_rows and "):
        Loader([folder, longer, folder], replace(data, micro_batch=1), 7, 0.15)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocabulary_sha256": "1" * 64}, "encoded with different vocabularies: prepare them together"),
        ({"vocabulary_size": 201}, "encoded with different vocabularies"),
        ({"settings": {"row_tokens": 64, "layout": "xlme"}}, "rows of different lengths: mix them together"),
        ({"settings": {"row_tokens": 32, "layout": "xlm"}}, "rows of different layouts: mix them together"),
    ],
)
def test_tasks_that_do_not_belong_together(tmp_path: Path, change: dict, words: str) -> None:
    folder = write_data(tmp_path / "mixed", 16)
    write_manifest(folder / "para", replace(read_manifest(folder / "para"), **change))
    with pytest.raises(ValueError, match=words):
        Loader(folder, DATA, 7, 0.15)
    first, phases = write_data(tmp_path / "first", 16), replace(DATA, phase_steps=(2,))
    write_manifest(folder / "mono", replace(read_manifest(folder / "mono"), **change))
    if "lengths" in words:
        return  # those may be others in another phase
    with pytest.raises(ValueError, match=words):
        Loader([first, folder], phases, 7, 0.15)


@pytest.mark.parametrize(("lost", "content"), [("mono", "monolingual text"), ("para", "pairs")])
def test_a_folder_without_the_rows_of_a_task(tmp_path: Path, lost: str, content: str) -> None:
    """In any phase; it is none where the task is not read."""
    first, second = (write_data(tmp_path / name, 16) for name in ("first", "second"))
    shutil.rmtree(second / lost)
    told = (
        f"second has no {content}: set data.{lost}_rows to 0 (`--data.{lost}-rows 0`), or name a folder with {content}"
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        Loader([first, second], replace(DATA, phase_steps=(2,)), 7, 0.15)
    Loader(second, replace(DATA, **{f"{lost}_rows": 0}), 7, 0.15)


@pytest.mark.parametrize("change", ["one side", "a language too few"])
def test_pairs_without_two_sides_are_refused(change: str) -> None:
    rng = np.random.default_rng(0)
    packed = [[item(rng, 4, 5), item(rng, 7) if change == "one side" else item(rng, 2, 3)]]
    rows = rows_of(packed, 24, task=1)
    if change != "one side":
        rows = rows._replace(languages=rows.languages[1:])
    with pytest.raises(ValueError, match="a row has a pair without two sides, or a side without a language: mix"):
        collate([(1, rows, np.arange(1))], 1, 0.15)


def test_the_share_of_random_fakes_follows_the_step(folder: Path, tmp_path: Path) -> None:
    """In training alone: an evaluation, and a run without the setting, have none."""
    fakes = objective_of(ObjectiveConfig(random_fakes=("0:1", "4:0.2", "8:0")))
    loader = Loader(folder, DATA, 1, 0.15, maker=fakes)
    shares = [[float(batch.added["random_1"]) for batch in loader.micro_batches(step)] for step in (0, 2, 4, 6, 8, 20)]
    assert shares == [[pytest.approx(share)] * 4 for share in (1.0, 0.6, 0.2, 0.1, 0.0, 0.0)]
    assert not Loader(folder, DATA, 1, 0.15, maker=objective_of(ObjectiveConfig())).micro_batches(0)[0].added
    vocabulary = train_vocabulary(tmp_path / "vocab")
    ours = write_data(tmp_path, ROWS, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    config = tiny({"kind": "plain"}, 8, random_fakes=("0:1",), vocabulary=vocabulary.size)
    assert not open_loader(config, ours, heldout_data=config.data).micro_batches(0)[0].added
    assert float(open_loader(config, ours).micro_batches(0)[0].added["random_1"]) == 1.0


def test_rows_of_the_next_step_are_asked_for_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks the second, in two micro-batches of three rows a task."""
    asked: list[tuple[str, int, int]] = []
    prefetch = RowStore.prefetch

    def noted(store: RowStore, first: int, last: int) -> None:
        asked.append((store.folder.name, first, last))
        prefetch(store, first, last)

    monkeypatch.setattr(RowStore, "prefetch", noted)
    loader = Loader(folder, DATA, 3, 0.15, rank=1, world=2)
    for step in range(4):
        asked.clear()
        loader.micro_batches(step)
        firsts = [12 * (step + 1) + 3, 12 * (step + 1) + 9]
        assert asked == [(task, first % ROWS, (first + 2) % ROWS) for task in TASKS for first in firsts]

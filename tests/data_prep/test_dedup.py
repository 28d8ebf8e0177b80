"""Exact duplicates against a plain set in memory, whatever the blocks, slices, inputs and processes."""

import json
import lzma
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.encode import dedup
from data_prep.encode.dedup import BlockHashes, find_duplicates, load_duplicates, number_of_slices
from data_prep.encode.encode import EncodeConfig, run
from xlme_ds.data.schema import EOS, read_manifest
from xlme_ds.data.vocabulary import Vocabulary

Started = Callable[..., "subprocess.Popen[str]"]
Documents = list[list[str]]


def write_corpora(folder: Path, *inputs: Documents) -> list[str]:
    """One description an input, all of English, with exact_duplicates."""
    descriptions = []
    for number, documents in enumerate(inputs):
        data = folder / f"data{number}"
        data.mkdir()
        (data / "en.txt").write_text("\n\n".join("\n".join(document) for document in documents), encoding="utf-8")
        text = f'name = "c{number}"\nwhere = "{data}"\nformat = "cc100"\nfiles = "{{lang}}.txt"\nlanguages = ["en"]\n'
        (folder / f"c{number}.toml").write_text(text + "[filters.exact_duplicates]\n")
        descriptions.append(str(folder / f"c{number}.toml"))
    return descriptions


def without_duplicates(*inputs: Documents) -> Documents:
    """The reference: a set of all paragraphs."""
    seen: set[str] = set()
    kept = []
    for document in (document for documents in inputs for document in documents):
        fresh = []
        for paragraph in document:
            if paragraph not in seen:
                fresh.append(paragraph)
            seen.add(paragraph)
        kept += [fresh] if fresh else []
    return kept


def interrupt(config: EncodeConfig, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode until the first call of a function, as by Ctrl-C."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(function, interrupted)
        run(config)


def written(folder: Path) -> list[list[int]]:
    manifest = read_manifest(folder)
    tables = [pa.ipc.open_file(folder / shard.name).read_all() for shard in manifest.shards]
    return [row for table in tables for row in table["tokens"].to_pylist()]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


PARAGRAPHS = st.sampled_from([f"{word} {i}" for word in ("All", "human", "Rechten") for i in range(4)])
INPUT = st.lists(st.lists(PARAGRAPHS, min_size=1, max_size=5), min_size=1, max_size=25)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    one=INPUT,
    two=INPUT,
    block_bytes=st.sampled_from([1, 60, 10_000]),
    slice_size=st.sampled_from([1, 7, 1000]),
    batch_bytes=st.sampled_from([40, 1 << 20]),
)
def test_the_first_occurrence_stays(
    vocab: Path,
    monkeypatch: pytest.MonkeyPatch,
    one: Documents,
    two: Documents,
    block_bytes: int,
    slice_size: int,
    batch_bytes: int,
) -> None:
    monkeypatch.setattr(dedup, "_SLICE_HASHES", slice_size)
    monkeypatch.setattr("data_prep.readers.reader._PIECE_BYTES", batch_bytes)
    vocabulary = Vocabulary(vocab)
    expected = without_duplicates(one, two)
    with tempfile.TemporaryDirectory() as name:
        descriptions = tuple(write_corpora(Path(name), one, two))
        run(EncodeConfig(vocab, Path(name) / "out", corpus=descriptions, block_bytes=block_bytes))
        folder = Path(name) / "out" / "mono"
        found, counts = written(folder), read_manifest(folder).counts["by_language"]["en"]
        assert not (folder / "staged").exists()
        assert sorted(path.name for path in (folder / "tasks").iterdir()) == ["en-000.json", "en-001.json"]
    assert found == [
        [*(i for text in document for i in vocabulary.encode(text).tolist()), EOS] for document in expected
    ]
    paragraphs = sum(map(len, one + two))
    assert counts["documents_in"] == len(one + two) == counts["documents"] + sum(counts["dropped"].values())
    assert counts["documents"] == len(expected)
    assert counts["paragraphs_in"] == paragraphs == counts["paragraphs"] + counts["removed"].get("exact_duplicates", 0)
    assert counts["paragraphs"] == sum(map(len, expected))
    assert counts["characters"] == counts["bytes"] == sum(len(text) for document in expected for text in document)
    assert counts["tokens"] == sum(map(len, found))


@pytest.mark.parametrize("batch", [1, 2, 4000])
def test_pairs_are_compared_with_both_sides(
    vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr("data_prep.encode.token_ids._BATCH_PAIRS", batch)
    for name, lines in (("X.de-en.de", "a\na\nb\na\nᚠ a\nᚠ a\n"), ("X.de-en.en", "1\n2\n1\n1\n3\n3\n")):
        (tmp_path / name).write_text(lines)
    text = f'name = "x"\nwhere = "{tmp_path}"\nformat = "moses"\nfiles = "X.{{src}}-{{tgt}}.{{side}}"\npairs = "any"\n'
    (tmp_path / "x.toml").write_text(text + "[filters.exact_duplicates]\n")
    for number, block_bytes in enumerate((4, 1000)):
        run(EncodeConfig(vocab, tmp_path / f"out{number}", corpus=(str(tmp_path / "x.toml"),), block_bytes=block_bytes))
    manifests = [read_manifest(tmp_path / f"out{number}" / "para") for number in (0, 1)]
    assert len(manifests[0].shards) > len(manifests[1].shards) == 1
    assert manifests[0].counts == manifests[1].counts
    counts = manifests[0].counts["by_language"]["en-de"]
    assert (counts["pairs_in"], counts["pairs"], counts["dropped"]) == (6, 4, {"exact_duplicates": 2})
    table = pa.ipc.open_file(tmp_path / "out1" / "para" / manifests[1].shards[0].name).read_all()
    assert counts["tokens"] == sum(len(side) for row in table.to_pylist() for side in row.values())
    assert counts["unknown"] == sum(side.count(3) for row in table.to_pylist() for side in row.values()) > 0


def test_both_directions_are_one_pair(vocab: Path, tmp_path: Path) -> None:
    """CCAligned's en_XX-de_DE next to OPUS's de-en, which have a pair in common."""
    (tmp_path / "en_XX-de_DE.tsv").write_text("a\t1\t2\nb\t2\t2\nb\t2\t2\n")
    for code, lines in (("de", "1\n3\n1\n"), ("en", "a\nb\nb\n")):
        (tmp_path / f"X.de-en.{code}").write_text(lines)
    text = 'name = "{}"\nwhere = "{}"\nformat = "{}"\nfiles = "{}"\npairs = "any"\n[filters.exact_duplicates]\n'
    layouts = {"opus": ("moses", "X.{src}-{tgt}.{side}"), "ccaligned": ("ccaligned_tsv", "{src}-{tgt}.tsv")}
    for name, layout in layouts.items():
        (tmp_path / f"{name}.toml").write_text(text.format(name, tmp_path, *layout))
    run(EncodeConfig(vocab, tmp_path / "out", corpus=tuple(str(tmp_path / f"{name}.toml") for name in layouts)))
    manifest = read_manifest(tmp_path / "out/para")
    counts = manifest.counts["by_language"]
    assert list(counts) == ["en-de"] and {shard.name.split("/")[0] for shard in manifest.shards} == {"en-de"}
    assert (counts["en-de"]["pairs_in"], counts["en-de"]["dropped"]) == (6, {"exact_duplicates": 2})
    tables = [pa.ipc.open_file(tmp_path / "out/para" / shard.name).read_all() for shard in manifest.shards]
    vocabulary = Vocabulary(vocab)
    expected = [("a", "1"), ("b", "3"), ("b", "1"), ("b", "2")]
    assert [tuple(row.values()) for table in tables for row in table.to_pylist()] == [
        tuple(vocabulary.encode(side).tolist() for side in pair) for pair in expected
    ]


@pytest.mark.parametrize("block_bytes", [1, 1000])
def test_paragraphs_without_tokens_go_with_the_last_text_of_their_document(
    vocab: Path, tmp_path: Path, block_bytes: int
) -> None:
    """A zero-width space has no token: without the text next to it it is no document."""
    descriptions = write_corpora(tmp_path, [["one"], ["\u200b", "one"], ["two"]])
    run(EncodeConfig(vocab, tmp_path / "out", corpus=tuple(descriptions), block_bytes=block_bytes))
    counts = read_manifest(tmp_path / "out" / "mono").counts["by_language"]["en"]
    assert (counts["documents"], counts["dropped"]) == (2, {"exact_duplicates": 1})
    assert (counts["paragraphs"], sum(counts["removed"].values())) == (2, 2)
    assert counts["characters"] == counts["bytes"] == len("onetwo")


def test_where_one_side_ends_makes_another_pair() -> None:
    sides = [["ab", "a", "a b", "a", "a\t", "", "abc", "ab"], ["c", "bc", "c", "b c", "b", "abc", "", "c"]]
    forms = [[text.encode() for text in side] for side in sides]
    is_repeated, _ = BlockHashes().find_repeats(forms, np.ones(8, bool))
    assert is_repeated.tolist() == [False] * 7 + [True]


def test_slices_cut_the_hashes_without_loss(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [[str(number) for number in rng.integers(0, 3000, 1000)] for _ in range(6)]
    runs = []
    for number, block in enumerate(texts):
        stored = BlockHashes()
        is_repeated, hashes = stored.find_repeats([[text.encode() for text in block]], np.ones(len(block), bool))
        fresh = ~is_repeated
        texts[number] = [text for text, keep in zip(block, fresh, strict=True) if keep]
        assert len(texts[number]) == len(set(block))
        fresh_hashes = [hashes[i] for i in np.flatnonzero(fresh)]
        stored.add(fresh_hashes, *[np.ones(fresh.sum(), int)] * 3, np.arange(fresh.sum()))
        runs.append(tmp_path / f"{number}.arrow")
        stored.save(runs[-1], tmp_path)
        assert len(stored.hashes) == fresh.sum()
    expected = []
    seen: set[str] = set()
    for block in texts:
        expected.append([i for i, text in enumerate(block) if text in seen])
        seen |= set(block)
    for total in (1, 3, 64):
        found = [tmp_path / f"{i}-of-{total}" for i in range(total)]
        for number, path in enumerate(found):
            find_duplicates(runs, number, total, path, tmp_path)
        assert [sorted(load_duplicates(block, found).tolist()) for block in range(len(runs))] == expected
    assert [number_of_slices(number) for number in (0, 1, 4_000_000, 4_000_001)] == [1, 1, 1, 2]


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory, sentences: list[str]) -> list[str]:
    rng = np.random.default_rng(0)
    lines = [f"{sentences[i % 3]} {i}" for i in range(3000)]
    inputs = [[[lines[j] for j in rng.integers(0, 3000, 5)] for _ in range(800)] for _ in range(2)]
    return write_corpora(tmp_path_factory.mktemp("corpora"), *inputs)


def test_bytes_do_not_depend_on_processes_ranks_or_kills(
    larger: list[str],
    vocab: Path,
    tmp_path: Path,
    data_prep: Callable[..., "subprocess.CompletedProcess[str]"],
    start_data_prep: Started,
) -> None:
    flags = ["encode", "--vocab", vocab, "--block-bytes", 20_000, "--corpus", larger[0], "--corpus", larger[1], "--out"]
    assert data_prep(*flags, tmp_path / "one").returncode == 0
    expected = tree(tmp_path / "one")
    assert len(expected) > 30
    for name, settings_ in (("two", {"ranks": 0}), ("ranks", {"ranks": 2})):
        done = data_prep(*flags, tmp_path / name, *(["--processes", 2] if name == "two" else []), **settings_)
        assert done.returncode == 0, done.stderr
        assert tree(tmp_path / name) == expected
    folder = tmp_path / "killed" / "mono"
    for moment in ("tasks/en-000.00003.json", "tasks/en-001.encoded.json", "tasks/en-000.00005.final.json"):
        killed = start_data_prep(*flags, tmp_path / "killed", "--processes", 2)
        while not (folder / moment).exists() and killed.poll() is None:
            time.sleep(0.001)
        killed.kill()  # nothing, if it ended: the file does not stay, and may not have been seen
        killed.wait()
    assert data_prep(*flags, tmp_path / "killed").returncode == 0
    assert tree(tmp_path / "killed") == expected


def test_an_input_that_changed_before_its_duplicates_were_removed(
    vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted when all blocks are encoded: the text that they are of must still be there."""
    descriptions = write_corpora(tmp_path, [["All", "human"], ["All"]], [["human"], ["Rechten"]])
    config = EncodeConfig(vocab, tmp_path / "out", corpus=tuple(descriptions), block_bytes=4)

    interrupt(config, "data_prep.encode.encode.remove_duplicates", monkeypatch)
    path = tmp_path / "data1" / "en.txt"
    text = path.read_text()
    path.write_text(f"{text}\nhuman")
    with pytest.raises(ValueError, match=rf"en\.txt had {len(text)} bytes when it was encoded into .*: restore it, or"):
        run(config)
    path.write_text(text)
    run(config)
    assert read_manifest(tmp_path / "out" / "mono").counts["by_language"]["en"]["paragraphs"] == 3


def test_another_version_of_an_input_after_its_duplicates_were_found(
    vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted before a block is written; then a block's marker is lost, and the file has become unreadable, so that
    the user fetches it again and gets other text."""
    descriptions = write_corpora(tmp_path, [["All", "human"], ["All"]], [["human"], ["Rechten"]])
    plain, path = tmp_path / "data1" / "en.txt", tmp_path / "data1" / "en.txt.xz"
    path.write_bytes(lzma.compress(plain.read_bytes()))
    description = tmp_path / "c1.toml"
    description.write_text(description.read_text().replace("{lang}.txt", "{lang}.txt.xz"))
    config = EncodeConfig(vocab, tmp_path / "out", corpus=tuple(descriptions), block_bytes=4)

    interrupt(config, "data_prep.encode.remove_duplicates._write_block", monkeypatch)
    tasks = tmp_path / "out" / "mono" / "tasks"
    assert list(tasks.glob("en.*.json")) and not list(tasks.glob("*.final.json"))
    (tasks / "en-001.00000.json").unlink()
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ValueError, match=r"en\.txt\.xz"):
        run(config)
    path.write_bytes(lzma.compress(f"familia\n\n{plain.read_text()}".encode()))
    run(config)
    run(replace(config, out=tmp_path / "fresh"))
    found = written(tmp_path / "out" / "mono")
    assert found == written(tmp_path / "fresh" / "mono") and len(found) == 3


def test_a_lost_shard_makes_the_language_new(larger: list[str], vocab: Path, tmp_path: Path) -> None:
    config = EncodeConfig(vocab, tmp_path, corpus=tuple(larger), block_bytes=20_000)
    run(config)
    before = tree(tmp_path)
    (tmp_path / "mono" / "manifest.json").unlink()
    shards = json.loads((tmp_path / "mono" / "tasks" / "en-001.json").read_text())["shards"]
    (tmp_path / "mono" / shards[0]["name"]).unlink()
    run(config)
    assert tree(tmp_path) == before

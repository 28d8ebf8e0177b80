"""`stats` shows the counts of the manifests."""

import base64
import io
import re
import shutil
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest

from data_prep.encode import encode
from data_prep.inspect.stats import Section, StatsConfig, html, run
from data_prep.inspect.stats_plots import dropped_text_plot, length_plot, share_plot
from data_prep.inspect.stats_tables import (
    EDGES,
    StatsLine,
    dropped_text_table,
    dropped_text_tables,
    length_histograms,
    median,
    stats_lines,
    total,
)
from data_prep.mix import mix
from xlme_ds.data.schema import read_manifest, write_manifest


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, sentences: list[str], vocab: Path) -> Path:
    """encoded/ and data/; Swahili's only document is empty, Greek has characters that the vocabulary lacks."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "mono").mkdir()
    for code, text in (("en", sentences * 5), ("de", sentences), ("el", ["Όλοι"]), ("sw", [])):
        (folder / "mono" / f"{code}.txt").write_text("\n\n".join(text), encoding="utf-8")
    (folder / "para").mkdir()
    for code in ("de", "en"):
        lines = [*sentences * 4, "" if code == "en" else "Leer."]  # the last pair has an empty side
        (folder / "para" / f"X.de-en.{code}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    encode.run(encode.EncodeConfig(vocab=vocab, out=folder / "encoded", mono=folder / "mono", para=folder / "para"))
    mix.run(mix.MixConfig(folder / "encoded", vocab, folder / "data", 40, 6, row_tokens=128))
    return folder


def config(folder: Path, out: Path) -> StatsConfig:
    return StatsConfig(folder / "encoded", folder / "data", out)


def test_lines_are_the_manifests_counts(prepared: Path, tmp_path: Path) -> None:
    lines = {line.name: line for line in stats_lines(prepared / "encoded", prepared / "data", "mono")}
    encoded, mixed = read_manifest(prepared / "encoded" / "mono"), read_manifest(prepared / "data" / "mono")
    assert lines.keys() == encoded.counts["by_language"].keys() == {"en", "de", "el", "sw"}
    for name, line in lines.items():
        counts = encoded.counts["by_language"][name]
        assert (line.bytes, line.units, line.tokens) == (counts["bytes"], counts["documents"], counts["tokens"])
        assert (line.read, line.dropped) == (counts["documents_in"], sum(counts["dropped"].values()))
        drawn = mixed.counts["by_language"].get(name, {})
        shares = (drawn.get(key, 0) for key in ("used", "share_before", "share_after"))
        assert (line.used, line.share_before, line.share_after) == tuple(shares)
    assert lines["el"].unknown / lines["el"].tokens > 0.3 > lines["en"].unknown / lines["en"].tokens
    assert lines["sw"].tokens == lines["sw"].used == 0
    english, german = lines["en"], lines["de"]
    assert english.tokens / english.characters == pytest.approx(german.tokens / german.characters, rel=0.1)
    everything = total(list(lines.values()))
    assert everything.used == 40 and everything.share_after == pytest.approx(1)
    assert everything.available == sum(counts["available"] for counts in mixed.counts["by_language"].values())
    assert everything.cells("mono")["repeat"] == f"{40 / everything.available:.2f}×"


def test_the_language_with_most_text_comes_first(prepared: Path, tmp_path: Path) -> None:
    """Whatever share of the rows it has; of as much text, by name."""
    shutil.copytree(prepared / "data", tmp_path / "data")
    manifest = read_manifest(tmp_path / "data" / "mono")
    counts = manifest.counts["by_language"]
    for after, before, expected in ((0.9, 0.2, ["en", "de", "el", "sw"]), (0.0, None, ["de", "en", "el", "sw"])):
        counts["de"] |= {"share_after": after, "share_before": before or counts["en"]["share_before"]}
        write_manifest(tmp_path / "data" / "mono", manifest)
        assert [line.name for line in stats_lines(prepared / "encoded", tmp_path / "data", "mono")] == expected


@pytest.mark.parametrize(
    ("task", "packed", "name", "units", "used"),
    [
        ("mono", False, "language", "documents", "rows"),
        ("mono", True, "language", "documents", "items"),
        ("para", False, "pair", "pairs", "pairs"),
    ],
)
def test_cells_by_hand(task: str, packed: bool, name: str, units: str, used: str) -> None:
    line = StatsLine("sw", 1500, 12, 9, 2, 1, 2000, 5, 8000, 0.25, 0.4, 30, 12)
    assert line.cells(task, packed) == {
        name: "sw",
        "size": "1.5 kB",
        f"{units} read": "12",
        "dropped": "2",
        "too long": "1",
        units: "9",
        "tokens": "2,000",
        "unknown": "0.250%",
        "tokens/char": "0.250",
        "share before α": "25.000%",
        "share after α": "40.000%",
        f"{used} used": "30",
        "repeat": "2.50×",
    }


def test_pairs_dropped_and_too_long_add_up(prepared: Path, vocab: Path, tmp_path: Path) -> None:
    """Counted by hand: of 25 pairs one has an empty side, and the rows have no room for the longest ones."""
    pairs = pa.ipc.open_file(next((prepared / "encoded" / "para").rglob("*.arrow"))).read_all().to_pylist()
    lengths = sorted(len(pair["source"]) + len(pair["target"]) for pair in pairs)
    mix.run(mix.MixConfig(prepared / "encoded", vocab, tmp_path, para_rows=6, row_tokens=lengths[12] + 3))
    (line,) = stats_lines(prepared / "encoded", tmp_path, "para")
    long = sum(length > lengths[12] for length in lengths)
    assert 0 < long < 24 == len(lengths)
    assert (line.read, line.dropped, line.too_long, line.units) == (25, 1, long, 24 - long)
    row = line.cells("para")
    assert row["pairs read"] == "25"
    assert int(row["pairs"]) + int(row["dropped"]) + int(row["too long"]) == 25
    assert total([line, line]).read == 50


class Page(HTMLParser):
    """Cells of the page, its plots, and whatever it would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.sources: list[str] = []
        self._cell = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._cell = tag == "td"
        self.sources += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.cells.append(data)
            self._cell = False


def test_page_and_table(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(config(prepared, tmp_path))
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)  # without colours
    page = Page()
    page.feed((tmp_path / "stats.html").read_text(encoding="utf-8"))
    for task in ("mono", "para"):
        lines = stats_lines(prepared / "encoded", prepared / "data", task)
        cells = [cell for line in (*lines, total(lines)) for cell in line.cells(task).values()]
        start = page.cells.index(cells[0])
        assert page.cells[start : start + len(cells)] == cells
        assert all(cell in printed for cell in cells)
        lengths: dict[str, list[int]] = {}
        for path in (prepared / "encoded" / task).rglob("*.arrow"):
            for record in pa.ipc.open_file(path).read_all().to_pylist():
                for name in (path.parent.name, "all"):
                    lengths.setdefault(name, []).append(sum(map(len, record.values())))
        for name, values in lengths.items():
            middle = max(edge for edge in EDGES if edge <= sorted(values)[(len(values) - 1) // 2])
            table = printed[printed.index("Languages" if task == "mono" else "Language pairs") :]
            row = next(row for row in map(str.split, table.splitlines()) if row[:1] == [name])
            assert row[-1] == f"{middle:,}+"
    text = " ".join(re.sub("<[^>]*>", " ", (tmp_path / "stats.html").read_text(encoding="utf-8")).split())
    size = read_manifest(prepared / "data" / "mono").vocabulary_size
    assert f"α: 0.7 row: 128 tokens vocabulary: {size:,} ids seed: 0" in text
    assert "Languages (4)" in text and "Language pairs (1)" in text
    assert "1 (4.00%)" in page.cells and "1 (4.00%)" in printed  # of 25 pairs, the one with an empty side
    # shares and lengths of both tasks, and what the pairs lost
    assert len(page.sources) == 5 and all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)


def test_each_task_has_the_settings_of_its_own_mix(prepared: Path, vocab: Path, tmp_path: Path) -> None:
    """A second command mixes the pairs with other settings into the same folder."""
    alphas = {"mono": 0.3, "para": 1.0}
    for seed, (task, alpha) in enumerate(alphas.items()):
        rows = {f"{task}_rows": 4}
        mix.run(mix.MixConfig(prepared / "encoded", vocab, tmp_path, **rows, row_tokens=128, alpha=alpha, seed=seed))
    run(StatsConfig(prepared / "encoded", tmp_path, tmp_path / "out"))
    page = (tmp_path / "out" / "stats.html").read_text(encoding="utf-8")
    text = " ".join(re.sub("<[^>]*>", " ", page).split())
    assert re.findall(r"α: (\S+) .*? seed: (\d)", text) == [("0.3", "0"), ("1", "1")]
    plots = [base64.b64decode(plot).decode() for plot in re.findall(r"base64,([^\"]+)", page)]
    assert re.findall(r"sampled \(α = ([\d.]+)\)", "".join(plots)) == ["0.3", "1"]


def test_the_page_is_written_whoever_reads_the_tables(prepared: Path, tmp_path: Path) -> None:
    with (
        open("/dev/full", "wb", buffering=0) as full,
        redirect_stdout(io.TextIOWrapper(full, write_through=True)),
        pytest.raises(OSError, match="No space left"),
    ):
        run(config(prepared, tmp_path))
    assert (tmp_path / "stats.html").exists()


def test_what_looks_like_markup_is_text_on_the_page(prepared: Path) -> None:
    """A name or a reason comes out of the page as it went in, and begins no element."""
    name = "<script>alert(1)</script>&amp;\"'"
    line = StatsLine(name, 10, 1, 1, 0, 0, 5, 0, 10, 1.0, 1.0, 4, 4)
    table = dropped_text_table("documents", {name: 9}, {name: Counter({"<i>reason": 3})})
    lengths = {name: np.ones(len(EDGES), dtype=int)}
    written = html([Section("mono", [line], lengths, [table], read_manifest(prepared / "data" / "mono"))])
    page = Page()
    page.feed(written)
    assert page.cells.count(name) == 2 and "<script>alert" not in written and "<i>" not in written
    assert "&lt;i&gt;reason" in written


def test_plot_shows_every_language_and_the_same_each_time() -> None:
    line = StatsLine("xx", 10, 1, 1, 0, 0, 5, 0, 10, 0.0, 0.0, 0, 0)
    lines = [
        line._replace(name="aa", share_before=0.9, share_after=0.6, used=1, available=2),
        line._replace(share_before=0.1),
        line,
    ]
    svg = share_plot(lines, 0.7)
    assert svg == share_plot(lines, 0.7)
    ElementTree.fromstring(svg)
    assert "α = 0.5)" in share_plot(lines, 0.5).decode() and "α = 0.7)" in svg.decode()
    assert svg.count(b"<!-- aa -->") == 1 and svg.count(b"<!-- xx -->") == 2


def test_folders_that_do_not_belong_together(prepared: Path, sentences: list[str], vocab: Path, tmp_path: Path) -> None:
    (tmp_path / "mono").mkdir()
    (tmp_path / "mono" / "en.txt").write_text("\n".join(sentences), encoding="utf-8")
    encode.run(encode.EncodeConfig(vocab=vocab, out=tmp_path / "encoded", mono=tmp_path / "mono"))
    with pytest.raises(ValueError, match="was not mixed from"):
        run(StatsConfig(tmp_path / "encoded", prepared / "data", tmp_path / "out"))
    with pytest.raises(ValueError, match="name the folder that `xlme prep mix` wrote"):
        run(StatsConfig(tmp_path / "encoded", tmp_path, tmp_path / "out"))


@pytest.mark.parametrize("task", ["mono", "para"])
def test_lengths_are_those_of_every_record(prepared: Path, task: str) -> None:
    folder = prepared / "encoded" / task
    manifest = read_manifest(folder)
    expected = {name: np.zeros(len(EDGES), dtype=int) for name in manifest.counts["by_language"]}
    for shard in manifest.shards:
        for record in pa.ipc.open_file(folder / shard.name).read_all().to_pylist():
            length = sum(map(len, record.values()))
            expected[shard.name.split("/")[0]][max(i for i, edge in enumerate(EDGES) if edge <= length)] += 1
    for processes in (1, 2):
        found = length_histograms(folder, manifest, processes)
        assert {name: counts.tolist() for name, counts in found.items()} == {k: v.tolist() for k, v in expected.items()}
    assert sum(map(sum, expected.values())) == manifest.rows > 0
    ElementTree.fromstring(length_plot(expected))


def test_median_is_the_bin_of_the_middle_record() -> None:
    histogram = np.zeros(len(EDGES), dtype=int)
    assert median(histogram) == 0
    histogram[[EDGES.index(4), EDGES.index(32), EDGES.index(1024)]] = 3, 3, 1
    assert median(histogram) == 32
    histogram[EDGES.index(1024)] = 0  # as many below as above: the lower of the two
    assert median(histogram) == 4


def test_losses_are_the_manifests_with_any_reason(prepared: Path) -> None:
    encoded = read_manifest(prepared / "encoded" / "para")
    assert dropped_text_tables(encoded) == [
        dropped_text_table("pairs", {"en-de": 25}, {"en-de": Counter(empty_side=1)})
    ]
    counts = {
        "aa-bb": {"pairs_in": 10, "dropped": {"new_filter": 2, "empty_side": 3}},
        "aa-cc": {"pairs_in": 1000, "dropped": {"new_filter": 30}},
        "aa-dd": {"pairs_in": 7, "dropped": {}},
    }
    (table,) = dropped_text_tables(replace(encoded, counts={"by_language": counts}))
    assert table.title == "Pairs dropped"
    assert table.names == ["aa-bb", "aa-cc"], "the largest share first, without aa-dd"
    assert list(table.rows[0]) == ["pair", "pairs", "dropped", "new_filter", "empty_side"]
    assert list(table.rows[1].values()) == ["aa-cc", "1,000", "3.00%", "30 (3.00%)", ""]
    assert list(table.rows[2].values()) == ["all of these", "1,010", "3.47%", "32 (3.17%)", "3 (0.30%)"]
    assert table.percents == {"new_filter": [20.0, 3.0], "empty_side": [30.0, 0.0]}
    assert dropped_text_plot(table).count(b"<!-- new_filter -->") == 1


def test_removed_paragraphs_have_a_table_of_their_own(prepared: Path) -> None:
    counts = {"documents_in": 4, "dropped": {"no_token": 1}, "paragraphs_in": 9, "removed": {"exact_duplicates": 5}}
    encoded = read_manifest(prepared / "encoded" / "mono")
    documents, paragraphs = dropped_text_tables(replace(encoded, counts={"by_language": {"sw": counts}}))
    assert (documents.title, paragraphs.title) == ("Documents dropped", "Paragraphs removed")
    assert (documents.names, documents.percents) == (["sw"], {"no_token": [25.0]})
    assert paragraphs.percents == {"exact_duplicates": [500 / 9]}


def test_no_figure_is_cut_on_a_narrow_terminal(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "60")
    run(config(prepared, tmp_path))
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)  # without colours
    assert "…" not in printed
    for task in ("mono", "para"):
        lines = stats_lines(prepared / "encoded", prepared / "data", task)
        for line in (*lines, total(lines)):
            assert {f"{line.tokens:,}", f"{line.share_after:.3%}", f"{line.used:,}"} <= set(printed.split()), line

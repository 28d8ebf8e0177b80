"""`stats` shows the counts of the manifests."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from data_prep import encode, mix
from data_prep.stats import StatsConfig, run
from data_prep.stats_page import plot
from data_prep.stats_table import Line, lines_of, size_text, total
from xlme_ds.data.schema import read_manifest


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, sentences: list[str], vocab: Path) -> Path:
    """encoded/ and data/; Swahili's only document is empty, Greek has characters that the vocabulary lacks."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "mono").mkdir()
    for code, text in (("en", sentences * 5), ("de", sentences), ("el", ["Όλοι"]), ("sw", [])):
        (folder / "mono" / f"{code}.txt").write_text("\n\n".join(text), encoding="utf-8")
    (folder / "para").mkdir()
    for code in ("de", "en"):
        (folder / "para" / f"X.de-en.{code}").write_text("\n".join(sentences * 4) + "\n", encoding="utf-8")
    encode.run(encode.EncodeConfig(vocab, folder / "encoded", folder / "mono", folder / "para"))
    mix.run(mix.MixConfig(folder / "encoded", vocab, folder / "data", 40, 6, row_tokens=128))
    return folder


def config(folder: Path, out: Path) -> StatsConfig:
    return StatsConfig(folder / "encoded", folder / "data", out)


def test_lines_are_the_manifests_counts(prepared: Path, tmp_path: Path) -> None:
    lines = {line.name: line for line in lines_of(prepared / "encoded", prepared / "data", "mono")}
    encoded, mixed = read_manifest(prepared / "encoded" / "mono"), read_manifest(prepared / "data" / "mono")
    assert lines.keys() == encoded.counts["by_language"].keys() == {"en", "de", "el", "sw"}
    for name, line in lines.items():
        counts = encoded.counts["by_language"][name]
        assert (line.bytes, line.units, line.tokens) == (counts["bytes"], counts["documents"], counts["tokens"])
        assert line.used == mixed.counts["by_language"].get(name, {"used": 0})["used"]
    assert lines["el"].unknown_rate > 0.3 > lines["en"].unknown_rate
    assert lines["sw"].tokens == lines["sw"].used == 0
    assert lines["en"].tokens_per_character == pytest.approx(lines["de"].tokens_per_character, rel=0.1)
    everything = total(list(lines.values()))
    assert everything.used == 40 and everything.share_after == pytest.approx(1)
    assert everything.repeat == pytest.approx(40 / sum(c["available"] for c in mixed.counts["by_language"].values()))


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
    printed = capsys.readouterr().out
    page = Page()
    page.feed((tmp_path / "stats.html").read_text(encoding="utf-8"))
    for task in ("mono", "para"):
        lines = lines_of(prepared / "encoded", prepared / "data", task)
        cells = [cell for line in (*lines, total(lines)) for cell in line.cells()]
        start = page.cells.index(cells[0])
        assert page.cells[start : start + len(cells)] == cells
        assert all(cell in printed for cell in cells)
    assert len(page.sources) == 2 and all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)


def test_plot_shows_every_language_and_the_same_each_time() -> None:
    line = Line("xx", 10, 1, 0, 5, 0.0, 0.5, 0.0, 0.0, 0, 0.0)
    lines = [
        replace(line, name="aa", share_before=0.9, share_after=0.6, repeat=0.5),
        replace(line, share_before=0.1),
        line,
    ]
    svg = plot(lines, 0.7)
    assert svg == plot(lines, 0.7)
    ElementTree.fromstring(svg)
    assert svg.count(b"<!-- aa -->") == 1 and svg.count(b"<!-- xx -->") == 2


def test_folders_that_do_not_belong_together(prepared: Path, sentences: list[str], vocab: Path, tmp_path: Path) -> None:
    (tmp_path / "mono").mkdir()
    (tmp_path / "mono" / "en.txt").write_text("\n".join(sentences), encoding="utf-8")
    encode.run(encode.EncodeConfig(vocab, tmp_path / "encoded", tmp_path / "mono"))
    with pytest.raises(ValueError, match="was not mixed from"):
        run(StatsConfig(tmp_path / "encoded", prepared / "data", tmp_path / "out"))
    with pytest.raises(ValueError, match="run mix to its end first"):
        run(StatsConfig(tmp_path / "encoded", tmp_path, tmp_path / "out"))


def test_sizes_are_readable() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 1_500_000, 2_300_000_000_000, 5 * 10**15)] == [
        "0 B", "999 B", "1.0 kB", "1.5 MB", "2.3 TB", "5000.0 TB",
    ]  # fmt: skip

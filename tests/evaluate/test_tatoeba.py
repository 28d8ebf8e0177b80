"""The Tatoeba files and the languages that papers average over."""

from pathlib import Path

import pytest

from tests.evaluate.folders import write_tatoeba
from xlme_ds.evaluate.retrieval import LANGUAGE_SETS, XTREME_CODES, read_tatoeba

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared/data/eval/tatoeba"


def test_files_are_read_by_language_with_the_papers_codes(tmp_path: Path) -> None:
    write_tatoeba(tmp_path, "swh", ["one", "two"], ["moja", "mbili"])
    write_tatoeba(tmp_path, "nob", ["three"], ["tre"])
    (tmp_path / "LICENSE").write_text("words")
    assert read_tatoeba(tmp_path) == {"sw": (["one", "two"], ["moja", "mbili"]), "nob": (["three"], ["tre"])}


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    write_tatoeba(tmp_path, "deu", ["\ufeffone\u2028still", "two\r"], ["eins", "zwei\x0bzwo"])
    assert read_tatoeba(tmp_path) == {"de": (["one\u2028still", "two"], ["eins", "zwei\x0bzwo"])}


def test_language_sets_have_their_size_and_only_known_codes() -> None:
    for name, codes in LANGUAGE_SETS.items():
        assert len(codes) == len(set(codes)) == int(name) and set(codes) <= set(XTREME_CODES.values())


ISO_639_3 = {  # SIL's table, by name; Tatoeba has Iranian Persian (fa) and Mandarin (zh) under codes of their own
    "Afrikaans": "afr af", "Arabic": "ara ar", "Bulgarian": "bul bg", "Bengali": "ben bn", "German": "deu de",
    "Greek": "ell el",
    "Spanish": "spa es", "Estonian": "est et", "Basque": "eus eu", "Persian": "pes fa", "Finnish": "fin fi",
    "French": "fra fr",
    "Hebrew": "heb he", "Hindi": "hin hi", "Hungarian": "hun hu", "Indonesian": "ind id", "Italian": "ita it",
    "Japanese": "jpn ja", "Javanese": "jav jv", "Georgian": "kat ka", "Kazakh": "kaz kk", "Korean": "kor ko",
    "Malayalam": "mal ml", "Marathi": "mar mr", "Dutch": "nld nl", "Portuguese": "por pt", "Russian": "rus ru",
    "Swahili": "swh sw", "Tamil": "tam ta", "Telugu": "tel te", "Thai": "tha th", "Tagalog": "tgl tl",
    "Turkish": "tur tr",
    "Urdu": "urd ur", "Vietnamese": "vie vi", "Chinese": "cmn zh",
}  # fmt: skip


def test_codes_are_those_of_the_languages() -> None:
    assert [f"{three} {two}" for three, two in sorted(XTREME_CODES.items())] == sorted(ISO_639_3.values())


def test_faults_are_named(tmp_path: Path) -> None:
    def fault() -> str:
        with pytest.raises(ValueError) as caught:
            read_tatoeba(tmp_path / "t")
        return str(caught.value)

    assert "t does not exist: name the folder of LASER's Tatoeba v1 files" in fault()
    (tmp_path / "t").mkdir()
    assert "holds no file named tatoeba.xxx-eng.xxx" in fault()
    write_tatoeba(tmp_path / "t", "deu", ["one", "two"], ["eins"])
    assert "deu-eng.eng has 2 lines but" in fault()
    write_tatoeba(tmp_path / "t", "deu", ["one", " "], ["eins", "zwei"])
    assert "deu-eng.eng line 2 is empty" in fault()
    write_tatoeba(tmp_path / "t", "deu", [], [])
    assert "deu-eng.eng is empty" in fault()
    (tmp_path / "t/tatoeba.deu-eng.eng").write_bytes(b"kalo.\rmiter.\r")
    assert "deu-eng.eng ends its lines by carriage returns alone" in fault()
    write_tatoeba(tmp_path / "t", "deu", ["one", "two"], ["eins", "zwei"])
    (tmp_path / "t/tatoeba.deu-eng.deu").write_bytes("eins\nfünf\n".encode("latin-1"))
    assert "deu-eng.deu line 2 is not UTF-8" in fault()
    (tmp_path / "t/tatoeba.deu-eng.eng").unlink()
    assert "deu-eng.eng cannot be read (No such file" in fault()
    write_tatoeba(tmp_path / "t", "deu", ["one"], ["eins"])
    (tmp_path / "t/tatoeba.deu-eng.deu").unlink()
    write_tatoeba(
        tmp_path / "t", "fra", ["one"], ["un"]
    )  # a language without its file would be left out without a word
    assert "deu-eng.deu cannot be read (No such file" in fault()


@pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} is absent: the real files are not part of the repository")
def test_real_files() -> None:
    sizes = {language: len(ours) for language, (ours, _) in read_tatoeba(REAL).items()}
    assert sizes == dict.fromkeys(("de", "es", "fr", "hi", "ru", "tr", "zh"), 1000) | {"sw": 390}

"""The Tatoeba test set (LASER's v1 files) and the two sets of languages that papers average over."""

import re
from pathlib import Path

from .text import read_sentences, same_lines

# The files' ISO 639-3 codes -> the codes of the papers: XTREME's 36 languages. Other languages keep the code of their
# file.
XTREME = {
    "afr": "af", "ara": "ar", "bul": "bg", "ben": "bn", "deu": "de", "ell": "el", "spa": "es", "est": "et", "eus": "eu",
    "pes": "fa", "fin": "fi", "fra": "fr", "heb": "he", "hin": "hi", "hun": "hu", "ind": "id", "ita": "it", "jpn": "ja",
    "jav": "jv", "kat": "ka", "kaz": "kk", "kor": "ko", "mal": "ml", "mar": "mr", "nld": "nl", "por": "pt", "rus": "ru",
    "swh": "sw", "tam": "ta", "tel": "te", "tha": "th", "tgl": "tl", "tur": "tr", "urd": "ur", "vie": "vi", "cmn": "zh",
}  # fmt: skip
SETS = {
    "14": ("ar", "bg", "de", "el", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh"),  # XNLI's languages
    "36": tuple(XTREME.values()),
}
_FILE = re.compile(r"tatoeba\.(?P<code>[a-z]{3})-eng\.(eng|(?P=code))")


def read_tatoeba(folder: Path) -> dict[str, tuple[list[str], list[str]]]:
    """(English sentences, their translations) by language, from files tatoeba.xxx-eng.eng and tatoeba.xxx-eng.xxx.

    Raises ValueError, naming file and line, on damaged files, and on a folder that has none.
    """
    found = {}
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    for code in sorted({match["code"] for name in names if (match := _FILE.fullmatch(name))}):
        english, path = (folder / f"tatoeba.{code}-eng.{end}" for end in ("eng", code))
        ours, theirs = read_sentences(english), read_sentences(path)
        same_lines(ours, english, theirs, path)
        found[XTREME.get(code, code)] = (ours, theirs)
    if not found:
        raise ValueError(
            f"{folder} holds no file named tatoeba.xxx-eng.xxx: name the folder of LASER's Tatoeba v1 files"
        )
    return dict(sorted(found.items()))

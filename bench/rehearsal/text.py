"""Synthetic text of any size in 100 languages, in the proportions and layouts of CC-100, OPUS and CCAligned.

    python -m bench.rehearsal.text --gigabytes 50 --source ../shared/data/corpus --out FOLDER --processes 2

Lines are recombined from real ones, so scripts, lengths and frequencies of words stay real: a third of a real line's
words are replaced by other words of the language, drawn by their frequency, and a sixth by new forms, the first half of
one word and the last half of another. The number of a new form is drawn from a power law of exponent 1/0.6, so that the
number of different forms grows as the number of words to the power of 0.6 (Heaps' law). In scripts without spaces, runs
of two to five characters are the words. Exact duplicates and damaged lines are planted for the filters of the ready
corpus descriptions, and counted in planted/FILE.json; planted/FILE.npy has hashes of the lines that stay, because
duplicates are sought in all files of a pair.
"""

import lzma
import random
import re
import zipfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path

import numpy as np
import tyro

from data_prep.languages import letters, scripts_of
from data_prep.parallel import on_root, run_tasks
from data_prep.progress import say
from xlme_ds.io.files import replacing, write_json

# GiB of text by language: Conneau et al. (2020), Table 6; 2,394 in all.
_TABLE = """
af:1.3 am:0.8 ar:28.0 as:0.1 az:6.5 be:4.3 bg:57.5 bn:8.4 bn_rom:0.5 br:0.1 bs:0.1 ca:10.1 cs:16.3 cy:0.8 da:45.6
de:66.6 el:46.9 en:300.8 eo:0.9 es:53.3 et:6.1 eu:2.0 fa:111.6 fi:54.3 fr:56.8 fy:0.2 ga:0.5 gd:0.1 gl:2.9 gu:1.9
ha:0.3 he:31.6 hi:20.2 hi_rom:0.5 hr:20.5 hu:58.4 hy:5.5 id:148.3 is:3.2 it:30.2 ja:69.3 jv:0.2 ka:9.1 kk:6.4 km:1.5
kn:3.3 ko:54.2 ku:0.4 ky:1.2 la:2.5 lo:0.6 lt:13.7 lv:8.8 mg:0.2 mk:4.8 ml:7.6 mn:3.0 mr:2.8 ms:8.5 my:0.4 my_zaw:1.6
ne:3.8 nl:29.3 no:49.0 om:0.1 or:0.6 pa:0.8 pl:44.6 ps:0.7 pt:49.1 ro:61.4 ru:278.0 sa:0.3 sd:0.4 si:3.6 sk:23.2
sl:10.3 so:0.4 sq:5.4 sr:9.1 su:0.1 sv:12.1 sw:1.6 ta:12.2 ta_rom:0.3 te:4.7 te_rom:0.3 th:71.7 tl:3.1 tr:20.9 ug:0.4
uk:84.6 ur:5.7 ur_rom:0.5 uz:0.7 vi:137.3 xh:0.1 yi:0.3 zh-Hans:46.9 zh-Hant:16.6
"""
CC100 = {language: float(size) for language, size in (entry.split(":") for entry in _TABLE.split())}
# GB of pairs with English: Ouyang et al. (2021), Table 9; the others share the rest of 150 GB by the roots of the sizes
# above.
_PAIRS = dict(ar=9.8, bg=2.2, de=10.7, el=4.0, es=8.8, fr=13.7, hi=0.3, ru=8.3, sw=0.1, th=3.3, tr=1.1, ur=0.7, vi=0.8)
_PAIRS["zh-Hans"] = 5.0
_ALL_PAIRS = 150.0
_GIB = 1.073741824
# Languages without text of their own take that of a related script: Latin script for romanised languages.
_RELATED = {"bn_rom": "id", "hi_rom": "ms", "ta_rom": "sw", "te_rom": "so", "ur_rom": "tl", "my_zaw": "my"}
_RELATED |= {"zh-Hans": "zh", "zh-Hant": "zh_hant"}
_SPACELESS = {"zh", "zh_hant", "ja", "th", "lo", "km", "my"}
_SHORTEST = 24  # bytes of a line of a document
_DUPLICATES, _DAMAGED = 0.02, 0.001  # of the lines
_OTHER, _NEW = 1 / 3, 1 / 6  # of the words
_HEAPS = 0.6
_REMEMBERED = 10_000  # lines that a duplicate may repeat

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ufeff\ufffd]")
_SPACES = re.compile(r"\s")  # lines are cut at those that are read as such
_BLOCK = 4_000_000  # bytes of text that are compressed at once
_FAST = [{"id": lzma.FILTER_LZMA2, "preset": 0, "mf": lzma.MF_HC4, "nice_len": 32, "depth": 1, "dict_size": 1 << 18}]
_MONO_DAMAGE = ("boilerplate_length", "script", "invalid_utf8", "control_character")
_PARA_DAMAGE = ("empty_side", "identical_sides", "invalid_utf8", "control_character")


@dataclass(frozen=True)
class TextFile:
    """A file to write: its languages by CC-100's codes, its path below the output folder, and bytes of text."""

    corpus: str
    name: str
    languages: tuple[str, ...]
    path: str
    text_bytes: int


def note_of(file: TextFile, out: Path) -> Path:
    """The file that counts what is planted in a file."""
    return out / "planted" / f"{file.path}.json"


def files(gigabytes: float) -> list[TextFile]:
    """All files of a corpus of a size in GB (10⁹ bytes), largest first."""
    others = {
        language: size**0.5
        for language, size in CC100.items()
        if language not in _PAIRS and language != "en" and "_" not in language  # romanised text has no pairs
    }
    rest = (_ALL_PAIRS - sum(_PAIRS.values())) / sum(others.values())
    pairs = _PAIRS | {language: root * rest for language, root in others.items()}
    sizes = {("cc100", (language,), f"{language}.txt.xz"): size * _GIB for language, size in CC100.items()}
    for code, size in pairs.items():
        sizes["opus", ("en", code), f"en-{code}.txt.zip"] = size * 0.4
        sizes["ccaligned", ("en", code), f"en-{code}.tsv.xz"] = size * 0.6
    unit = gigabytes * 1e9 / sum(sizes.values())
    corpus = [
        TextFile(name, "-".join(languages), languages, f"{name}/{path}", max(round(size * unit), 2_000))
        for (name, languages, path), size in sizes.items()
    ]
    return sorted(corpus, key=lambda file: (-file.text_bytes, file.path))


@dataclass(frozen=True)
class Language:
    """Different words with the space after them, real lines of words, and all words of all lines."""

    words: list[str]
    lines: list[list[str]]  # a word in another script is empty
    occurrences: list[str]

    @classmethod
    def of(cls, lines: Sequence[str], language: str) -> "Language":
        """Cut real lines into words, of 64 characters at most: longer ones, such as lists of names, would fill rows."""
        if _RELATED.get(language, language) in _SPACELESS:
            cut = re.compile(r"[ -~]{1,64}|[^ -~]{2,5}")
        else:
            cut = re.compile(r"\S{1,64}\s?")
        split = [cut.findall(_SPACES.sub(" ", _CONTROL.sub("", line))) for line in lines]
        distinct = list(dict.fromkeys(chain.from_iterable(split)))
        right, of_any = letters(distinct, scripts_of(language))
        words = dict.fromkeys(word for word, good in zip(distinct, right == of_any, strict=True) if good)
        in_script = [[word if word in words else "" for word in line] for line in split]
        return cls(list(words), in_script, [word for line in in_script for word in line if word])

    def line(self, rng: random.Random, number: int, least: int) -> str:
        """A line like real line `number`, of `least` bytes or more."""
        parts = []
        for word in self.lines[number]:
            kind = rng.random()
            if not word or kind < _OTHER:
                parts.append(rng.choice(self.occurrences))
            else:
                parts.append(self._new_form(rng) if kind < _OTHER + _NEW else word)
        text = "".join(parts).strip()
        while len(text.encode()) < least:
            text = f"{text} {rng.choice(self.occurrences)}".strip()
        return text

    def _new_form(self, rng: random.Random) -> str:
        form = int(min(1e15, 100.0 * (rng.random() + 1e-12) ** (-_HEAPS / (1 - _HEAPS)) - 100.0))
        mixed = (form + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)
        first, between, last = (self.words[(mixed >> shift) % len(self.words)] for shift in (96, 64, 32))
        middle = between[: len(between) // 2] if form > 1_000_000 else ""
        return first[: len(first) // 2] + middle + last[len(last) // 2 :]


class Planter:
    """Makes lines or pairs, plants duplicates and damage in them, and counts it."""

    def __init__(self, rng: random.Random, languages: Sequence[Language], damage: Sequence[str], foreign: str):
        self.rng, self.languages, self.damage, self.foreign = rng, languages, damage, foreign
        self.lines, self.damaged, self.hashes = 0, Counter[str](dict.fromkeys(damage, 0)), array("Q")
        self._earlier: list[list[str]] = []

    def record(self) -> tuple[list[bytes], bool]:
        """The sides of the next line or pair, and whether its score is low."""
        self.lines += 1
        kind, damage = self.rng.random(), ""
        if kind < _DUPLICATES and self._earlier:
            sides = self.rng.choice(self._earlier)
        else:
            sides = self._fresh()
            if kind < _DUPLICATES + _DAMAGED:
                damage = self.rng.choice(self.damage)
                self.damaged[damage] += 1
            elif len(self._earlier) < _REMEMBERED:
                self._earlier.append(sides)
            else:
                self._earlier[self.rng.randrange(_REMEMBERED)] = sides
        if damage == "boilerplate_length":
            sides = ["".join(self.rng.choices("abcdefghijklmnopqrstuvwxyz", k=8))]
        elif damage == "script":
            sides = [self.foreign]
        elif damage in ("empty_side", "identical_sides"):
            sides = [sides[0], "" if damage == "empty_side" else sides[0]]
        if damage in ("", "invalid_utf8", "control_character"):  # lines that stay, the last two repaired
            text = "\t".join(sides) + "\ufffd" * (damage == "invalid_utf8")
            self.hashes.append(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little"))
        encoded = [side.encode() for side in sides]
        encoded[-1] += {"invalid_utf8": b"\xff", "control_character": b"\x01"}.get(damage, b"")
        return encoded, damage == "score"

    def _fresh(self) -> list[str]:
        number = self.rng.randrange(len(self.languages[0].lines))
        least = _SHORTEST if len(self.languages) == 1 else 3
        sides = [language.line(self.rng, number, least) for language in self.languages]
        if len(sides) == 2 and sides[0].lower() == sides[1].lower():
            sides[1] += "x"  # equal sides are planted, and no others
        return sides

    def blocks(self, size: int, documents: Sequence[int] = ()) -> Iterator[list[tuple[list[bytes], bool]]]:
        """Blocks of records, of `size` bytes together; an empty line after documents of the lengths of `documents`."""
        written, left = 0, 0
        while written < size:
            block, end = [], min(written + _BLOCK, size)
            while written < end:
                if documents and left == 0:
                    left = self.rng.choice(documents)
                    block += [([b""], False)] * (written > 0)
                left -= 1
                block.append(self.record())
                written += sum(len(side) + 1 for side in block[-1][0])
            yield block


def _read_mono(source: Path, language: str, most: int) -> tuple[Language, list[int]]:
    """A language by the first `most` lines of its text, and the lengths of its documents in lines."""
    with lzma.open(source / "mono" / f"{_RELATED.get(language, language)}.txt.xz", "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in islice(file, most)]
    breaks = np.flatnonzero([not line for line in [*lines, ""]])
    documents = np.diff(breaks, prepend=-1) - 1
    long = [line for line in lines if len(line.encode()) > _SHORTEST]
    return Language.of(long, language), documents[documents > 0].tolist()


def _read_pairs(source: Path, language: str, most: int) -> list[Language]:
    """English and a language by the first `most` pairs; lines of one number are translations."""
    code = _RELATED.get(language, language)
    with zipfile.ZipFile(source / "para" / f"en-{code}.txt.zip") as archive:
        names = [next(n for n in archive.namelist() if n.endswith(f".{end}")) for end in ("en", code)]
        sides = [archive.read(name).decode().split("\n")[:most] for name in names]
    pairs = [(a.strip(), b.strip()) for a, b in zip(*sides, strict=False) if 2 < len(a) < 400 and 2 < len(b) < 400]
    ratios = np.array([len(b) / len(a) for a, b in pairs])
    usual = np.median(ratios)  # the others could fail `length_ratio`, which counts tokens
    pairs = [pair for pair, ratio in zip(pairs, ratios, strict=True) if usual / 1.5 < ratio < usual * 1.5]
    return [Language.of(lines, code) for lines, code in zip(zip(*pairs, strict=True), ("en", language), strict=True)]


def write_text(file: TextFile, source: Path, out: Path, seed: int) -> None:
    """Write a file and its note; the bytes depend on the file, the source and the seed alone."""
    path, note = out / file.path, note_of(file, out)
    if note.exists():
        return
    for folder in (path.parent, note.parent):
        folder.mkdir(parents=True, exist_ok=True)
    rng, documents, foreign = random.Random(f"{seed} {file.path}"), [], ""
    most = 2_000 + file.text_bytes // 100  # lines to read: more than a small file repeats
    if file.corpus == "cc100":
        language, documents = _read_mono(source, file.name, most)
        foreign = "Это строка на другом языке" if file.name == "th" else "บรรทัดนี้เป็นภาษาอื่น"
        planter = Planter(rng, [language], _MONO_DAMAGE, foreign)
    else:
        damage = (*_PARA_DAMAGE, "score") if file.corpus == "ccaligned" else _PARA_DAMAGE
        planter = Planter(rng, _read_pairs(source, file.languages[1], most), damage, foreign)
    blocks = planter.blocks(file.text_bytes, documents)
    if file.corpus == "opus":
        _write_archive(file.name, path, blocks)
    else:
        with replacing(path) as stream:
            for block in blocks:
                scores = ([] if documents else [b"1.01" if low else b"1.17"] for _, low in block)
                rows = (b"\t".join([*sides, *score]) for (sides, _), score in zip(block, scores, strict=True))
                stream.write(lzma.compress(b"\n".join([*rows, b""]), filters=_FAST))
    hashes = np.array(planter.hashes)
    np.save(note.with_suffix(".npy"), hashes)
    write_json(note, {"lines": planter.lines, "exact_duplicates": repeated(hashes), "damaged": dict(planter.damaged)})


def repeated(hashes: np.ndarray) -> int:
    """Number of lines with these hashes that repeat an earlier one."""
    return len(hashes) - len(np.unique(hashes))


def _write_archive(name: str, path: Path, blocks: Iterator[list[tuple[list[bytes], bool]]]) -> None:
    """Write a zip archive of two line-aligned files."""
    paths = [path.with_suffix(f".{end}") for end in name.split("-", 1)]
    with replacing(paths[0]) as one, replacing(paths[1]) as two:
        for block in blocks:
            for number, stream in enumerate((one, two)):
                stream.write(b"".join(sides[number] + b"\n" for sides, _ in block))
    with replacing(path) as archive, zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as members:
        for side in paths:
            members.write(side, f"Text.{name}{side.suffix}")
            side.unlink()


def write_corpus(gigabytes: float, source: Path, out: Path, seed: int = 0, processes: int = 1) -> None:
    """Write the corpus; finished files are not written again.

    Args:
        gigabytes: text in 10⁹ bytes, all files together
        source: folder with mono/ and para/ of real text
        out: a folder
        seed: of the text
        processes: on this machine; under MPI the ranks work instead
    """
    corpus = files(gigabytes)
    write = partial(write_text, source=source, out=out, seed=seed)
    run_tasks(write, corpus, [file.text_bytes for file in corpus], processes, "text")
    on_root(lambda: say(f"{out}: {len(corpus)} files, {gigabytes} GB of text"))


if __name__ == "__main__":
    tyro.cli(write_corpus, prog="python -m bench.rehearsal.text", description=__doc__)

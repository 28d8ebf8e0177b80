"""Synthetic text of any size in 100 languages, in the proportions and the layouts of CC-100 and five parallel corpora.

    python -m bench.rehearsal_text --gigabytes 50 --source ../shared/data/corpus --out FOLDER --processes 2

Lines are recombined from real ones, so scripts, lengths and frequencies of words stay real: of a real line's words a
third are other words of the language, drawn by their frequency, and a sixth are new forms, the first half of one word
and the last half of another. The number of a new form is drawn from a power law of exponent 1/0.6, so that the number
of different ones grows as that of all words to the power of 0.6 (Heaps' law). In scripts without spaces, runs of two to
five characters take the place of words. What the filters of the ready corpus descriptions must find is planted, and
counted in planted/FILE.json: exact duplicates (by hashes of all lines that are written), and damaged lines. Of pairs
planted/FILE.npy has the hashes, for duplicates are sought in all files of a pair.
"""

import argparse
import gzip
import json
import lzma
import re
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path

import numpy as np

from bench.rehearsal_lines import SHORTEST, mono_block, pair_block
from data_prep.languages import letters, scripts_of
from data_prep.parallel import on_root, run_tasks
from data_prep.progress import say
from data_prep.sampling import key_of
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
# Text of a related script where there is none: Latin script for romanised languages.
_RELATED = {"bn_rom": "id", "hi_rom": "ms", "ta_rom": "sw", "te_rom": "so", "ur_rom": "tl", "my_zaw": "my"}
_RELATED |= {"zh-Hans": "zh", "zh-Hant": "zh_hant"}
_LONGEST = 64  # characters of a word: whole rows of a longer one, such as a list of names, would come again and again
_SPACELESS = {"zh", "zh_hant", "ja", "th", "lo", "km", "my"}
_UN = {"ar", "es", "fr", "ru", "zh-Hans"}

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ufeff\ufffd]")
_SPACES = re.compile(r"\s")  # lines are cut at those that are read as such
_BLOCK = 4_000_000  # bytes of text that are made at once
_FAST = [{"id": lzma.FILTER_LZMA2, "preset": 0, "mf": lzma.MF_HC4, "nice_len": 32, "depth": 1, "dict_size": 1 << 18}]
_MONO_DAMAGE = ("boilerplate_length", "script", "invalid_utf8", "control_character")
_PARA_DAMAGE = ("empty_side", "identical_sides", "invalid_utf8", "control_character", "score")


@dataclass(frozen=True)
class TextFile:
    """A file to write: its languages by CC-100's codes, its path below the output folder, and bytes of text."""

    corpus: str
    name: str
    languages: tuple[str, ...]
    path: str
    text_bytes: int


@dataclass(frozen=True)
class Planted:
    """What is in a file: lines (or pairs), and of these those that a filter must remove, or a repair mend, by its name.

    `exact_duplicates` are those within the file; token counts decide of a few pairs before (`length_ratio`).
    """

    lines: int
    text_bytes: int
    exact_duplicates: int
    damaged: dict[str, int]


def note_of(file: TextFile, out: Path) -> Path:
    """Where it is noted what is planted in a file."""
    return out / "planted" / f"{file.path}.json"


def files(gigabytes: float) -> list[TextFile]:
    """Every file of a corpus of so many GB (10⁹ bytes), largest first."""
    mono = {f"cc100/{language}": (size * _GIB, (language,)) for language, size in CC100.items()}
    others = {lang: CC100[lang] ** 0.5 for lang in CC100 if lang not in _PAIRS and _pairable(lang)}
    rest = (_ALL_PAIRS - sum(_PAIRS.values())) / sum(others.values())
    pairs = _PAIRS | {lang: root * rest for lang, root in others.items()}
    para = {}
    for language, size in pairs.items():
        main = "iitb" if language == "hi" else "multiun" if language in _UN else "opus"
        for corpus, share in ((main, 0.4), ("wikimatrix", 0.2), ("ccaligned", 0.4)):
            para[f"{corpus}/en-{language}"] = (size * share, ("en", language))
    unit = gigabytes * 1e9 / sum(size for size, _ in chain(mono.values(), para.values()))
    found = []
    for key, (size, languages) in (mono | para).items():
        corpus, name = key.split("/")
        path = _LAYOUTS[corpus].format(name)
        found.append(TextFile(corpus, name, languages, f"{corpus}/{path}", max(round(size * unit), 2_000)))
    return sorted(found, key=lambda file: (-file.text_bytes, file.path))


_LAYOUTS = {
    "cc100": "{}.txt.xz",
    "opus": "{}.txt.zip",
    "multiun": "{}.txt.zip",
    "iitb": "IITB.{}.en.gz",  # and the other side next to it
    "wikimatrix": "WikiMatrix.{}.tsv.gz",
    "ccaligned": "{}.tsv.xz",
}


def _pairable(language: str) -> bool:
    """Whether the real data have pairs of it."""
    return language != "en" and "_" not in language


def _file_code(language: str) -> str:
    return _RELATED.get(language, language)


# Words


@dataclass(frozen=True)
class Words:
    """The words of a language, and real lines as their numbers.

    `data[starts[w] : starts[w + 1]]` are the bytes of word w with the space after it, `middles[w]` is where its last
    half begins. Line n is `tokens[lines[n] : lines[n + 1]]`. `documents` are numbers of lines.
    """

    data: np.ndarray
    starts: np.ndarray
    middles: np.ndarray
    tokens: np.ndarray
    lines: np.ndarray
    documents: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What the loops take."""
        return self.data, self.starts, self.middles, self.tokens, self.lines


def _read_mono(source: Path, language: str) -> Words:
    with lzma.open(source / "mono" / f"{_file_code(language)}.txt.xz", "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    breaks = np.flatnonzero([not line for line in [*lines, ""]])
    documents = np.diff(breaks, prepend=-1) - 1
    return _words([line for line in lines if len(line.encode()) > SHORTEST], documents[documents > 0], language)


@cache
def _read_pairs(source: Path, language: str) -> tuple[Words, Words]:
    code = _file_code(language)
    with zipfile.ZipFile(source / "para" / f"en-{code}.txt.zip") as archive:
        names = [next(n for n in archive.namelist() if n.endswith(f".{end}")) for end in ("en", code)]
        sides = [archive.read(name).decode().split("\n") for name in names]
    pairs = [(a.strip(), b.strip()) for a, b in zip(*sides, strict=False) if 2 < len(a) < 400 and 2 < len(b) < 400]
    ratios = np.array([len(b) / len(a) for a, b in pairs])
    usual = np.median(ratios)  # the others could fail `length_ratio`, which counts tokens
    pairs = [pair for pair, ratio in zip(pairs, ratios, strict=True) if usual / 1.5 < ratio < usual * 1.5]
    one = np.ones(1, np.int64)
    return _words([a for a, _ in pairs], one, "en"), _words([b for _, b in pairs], one, language)


def _words(lines: list[str], documents: np.ndarray, language: str) -> Words:
    """Number the words; -1 is one in another script, in whose place comes another word of the language."""
    lines = [_SPACES.sub(" ", _CONTROL.sub("", line)) for line in lines]
    if _file_code(language) in _SPACELESS:
        cut = re.compile(rf"[ -~]{{1,{_LONGEST}}}|[^ -~]{{2,5}}")
    else:
        cut = re.compile(rf"\S{{1,{_LONGEST}}}\s?")
    split = [cut.findall(line) for line in lines]
    numbers: dict[str, int] = {}
    found = [[numbers.setdefault(word, len(numbers)) for word in words] for words in split]
    right, of_any = letters(list(numbers), scripts_of(language))
    kept = np.cumsum(right == of_any) - 1
    words = [word for word, good in zip(numbers, right == of_any, strict=True) if good]
    renumbered = np.append(np.where(right == of_any, kept, -1), -1)
    tokens = renumbered[np.fromiter(chain.from_iterable(found), np.int64)].astype(np.int32)
    encoded = [word.encode() for word in words]
    starts = np.append(0, np.cumsum([len(word) for word in encoded]))
    middles = starts[:-1] + [len(word[: len(word) // 2].encode()) for word in words]
    ends = np.append(0, np.cumsum([len(words) for words in found]))
    data = np.frombuffer(b"".join(encoded), np.uint8)
    return Words(data, starts, middles, tokens, ends, documents.astype(np.int64))


# Files


def write_text(file: TextFile, source: Path, out: Path, seed: int) -> Planted:
    """Write one file, and next to it what is planted in it; a pure function of the file, the source and the seed."""
    path, note = out / file.path, note_of(file, out)
    if note.exists():
        return Planted(**json.loads(note.read_text()))
    for folder in (path.parent, note.parent):
        folder.mkdir(parents=True, exist_ok=True)
    state = np.array([key_of(seed, "rehearsal", file.path)], np.uint64)
    mono = file.corpus == "cc100"
    planted, hashes = (_write_mono if mono else _write_pairs)(file, source, path, state)
    if not mono:
        np.save(note.with_suffix(".npy"), hashes)
    write_json(note, asdict(planted))
    return planted


def _write_mono(file: TextFile, source: Path, path: Path, state: np.ndarray) -> tuple[Planted, np.ndarray]:
    (language,) = file.languages
    words = _read_mono(source, language)
    foreign = "Это строка на другом языке" if language == "th" else "บรรทัดนี้เป็นภาษาอื่น"
    alien = np.frombuffer(foreign.encode(), np.uint8)
    out = np.empty(_BLOCK + 1_000_000, np.uint8)
    first, first_lines = np.zeros(0, np.uint8), np.zeros((0, 2), np.int64)
    planted, hashes, written = np.zeros(5, np.int64), [], 0
    with replacing(path) as stream:
        while written < file.text_bytes:
            size = min(_BLOCK, file.text_bytes - written)
            block = alien, first, first_lines, state, size, planted
            filled, kept, lines = mono_block(out, words.arrays, words.documents, *block)
            if not len(first_lines):
                first, first_lines = out[:filled].copy(), lines
            stream.write(lzma.compress(out[:filled].data, filters=_FAST))
            hashes.append(kept)
            written += filled
    damaged = dict(zip(_MONO_DAMAGE, planted[1:].tolist(), strict=True))
    every = np.concatenate(hashes)
    return Planted(int(planted[0]), written, repeated(every), damaged), every


def _write_pairs(file: TextFile, source: Path, path: Path, state: np.ndarray) -> tuple[Planted, np.ndarray]:
    one, two = _read_pairs(source, file.languages[1])
    tables = file.corpus in ("wikimatrix", "ccaligned")
    out, other = (np.empty(_BLOCK + 1_000_000, np.uint8) for _ in range(2))
    planted, hashes = np.zeros(6, np.int64), []

    def blocks() -> Iterator[tuple[bytes, bytes, np.ndarray]]:
        written = 0
        while written < file.text_bytes:
            size = min(_BLOCK, file.text_bytes - written)
            low = np.zeros(size if tables else 0, bool)
            sides = one.arrays, two.arrays
            a, b, pairs, kept = pair_block(out, other, *sides, state, size, planted, low)
            hashes.append(kept)
            written += a + b
            yield out[:a].tobytes(), other[:b].tobytes(), low[:pairs]

    written = (_write_tables if tables else _write_sides)(file, path, blocks())
    damaged = dict(zip(_PARA_DAMAGE, planted[1:].tolist(), strict=True))
    every = np.concatenate(hashes)
    return Planted(int(planted[0]), written, repeated(every), damaged), every


def repeated(hashes: np.ndarray) -> int:
    """How many of the lines with these hashes repeat an earlier one."""
    every = np.sort(hashes)
    return int((every[1:] == every[:-1]).sum())


def _write_tables(file: TextFile, path: Path, blocks: Iterator[tuple[bytes, bytes, np.ndarray]]) -> int:
    written = 0
    with replacing(path) as stream:
        for a, b, low in blocks:
            scores = np.where(low, b"1.01", b"1.17").tolist()
            rows = zip(scores, a[:-1].split(b"\n"), b[:-1].split(b"\n"), strict=True)
            if file.corpus == "wikimatrix":
                text = b"".join(b"%b\t%b\t%b\n" % row for row in rows)
                stream.write(gzip.compress(text, 1, mtime=0))
            else:
                text = b"".join(b"%b\t%b\t%b\n" % (a, b, score) for score, a, b in rows)
                stream.write(lzma.compress(text, filters=_FAST))
            written += len(a) + len(b)
    return written


def _write_sides(file: TextFile, path: Path, blocks: Iterator[tuple[bytes, bytes, np.ndarray]]) -> int:
    """Two line-aligned files, or a zip file of them."""
    ends = file.name.split("-", 1)
    suffix = ".gz" if file.corpus == "iitb" else ""
    paths = [path.with_name(f"IITB.{file.name}.{end}{suffix}") for end in ends]
    written = 0
    with replacing(paths[0]) as one, replacing(paths[1]) as two:
        for texts in blocks:
            for stream, text in zip((one, two), texts[:2], strict=True):
                stream.write(gzip.compress(text, 1, mtime=0) if suffix else text)
                written += len(text)
    if not suffix:
        with replacing(path) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for side, end in zip(paths, ends, strict=True):
                archive.write(side, f"Text.{file.name}.{end}")
                side.unlink()
    return written


def main() -> None:
    """Write what `--gigabytes` asks for; files that are there already stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, required=True, help="text in 10⁹ bytes, all files together")
    parser.add_argument("--source", type=Path, required=True, help="folder with mono/ and para/ of real text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="corpora to write; the others keep their share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="on this machine; under MPI the ranks work instead")
    options = parser.parse_args()
    wanted = [file for file in files(options.gigabytes) if not options.only or file.corpus in options.only]
    write = partial(write_text, source=options.source, out=options.out, seed=options.seed)
    sizes = [file.text_bytes for file in wanted]
    planted = run_tasks(write, wanted, sizes, options.processes, "text")
    total = sum(each.text_bytes for each in planted)
    on_root(lambda: say(f"{options.out}: {len(wanted)} files, {total / 1e9:.2f} GB of text"))


if __name__ == "__main__":
    main()

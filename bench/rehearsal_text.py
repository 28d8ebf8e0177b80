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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path

import numpy as np
from numba import njit

from data_prep.languages import letters, scripts_of
from data_prep.sampling import key_of
from xlme_ds.data.schema import replacing, write_json

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
_SPACELESS = {"zh", "zh_hant", "ja", "th", "lo", "km", "my"}
_UN = {"ar", "es", "fr", "ru", "zh-Hans"}

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ufeff\ufffd]")
_BLOCK = 4_000_000  # bytes of text that are made at once
_FAST = [{"id": lzma.FILTER_LZMA2, "preset": 0, "mf": lzma.MF_HC4, "nice_len": 32, "depth": 1, "dict_size": 1 << 18}]
_DUPLICATES, _DAMAGED = 0.02, 0.001  # of the lines
_KNOWN, _NEW = 1 / 3, 1 / 6  # of the words
_HEAPS = 0.6
_SHORTEST, _LONGEST = 24, 3_000  # bytes of a line
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


def _read_mono(source: Path, language: str) -> Words:
    with lzma.open(source / "mono" / f"{_file_code(language)}.txt.xz", "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    breaks = np.flatnonzero([not line for line in [*lines, ""]])
    documents = np.diff(breaks, prepend=-1) - 1
    return _words([line for line in lines if len(line.encode()) > _SHORTEST], documents[documents > 0], language)


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
    lines = [_CONTROL.sub("", line) for line in lines]
    if _file_code(language) in _SPACELESS:
        cut = re.compile(r"[ -~]+|[^ -~]{2,5}")
        split = [cut.findall(line) for line in lines]
    else:
        split = [re.findall(r"\S+\s?", line) for line in lines]
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


# Lines, as machine code


@njit(inline="always")
def _random(state):
    """The next 64 bits of splitmix64."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    x = state[0]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(inline="always")
def _share(state):
    return (_random(state) >> np.uint64(11)) * (1.0 / (1 << 53))


@njit(inline="always")
def _below(state, n):
    return np.int64(_random(state) % np.uint64(n))


@njit
def _copy(out, at, data, begin, end):
    for i in range(begin, end):
        out[at] = data[i]
        at += 1
    return at


@njit
def _word(out, at, data, starts, middles, tokens, state, number):
    """Write word `number`, or another one in its place."""
    kind = _share(state)
    if number < 0 or kind < _KNOWN:
        number = np.int32(-1)
        while number < 0:
            number = tokens[_below(state, len(tokens))]
    elif kind < _KNOWN + _NEW:
        form = np.uint64(min(1e15, 100.0 * (_share(state) + 1e-12) ** (-_HEAPS / (1 - _HEAPS)) - 100.0))
        own = np.array([form * np.uint64(0xD1342543DE82EF95) + np.uint64(1)])
        count = len(middles)
        first, last = _below(own, count), _below(own, count)
        at = _copy(out, at, data, starts[first], middles[first])
        if form > 1_000_000:
            between = _below(own, count)
            at = _copy(out, at, data, starts[between], middles[between])
        return _copy(out, at, data, middles[last], starts[last + 1])
    return _copy(out, at, data, starts[number], starts[number + 1])


@njit
def _line(out, at, data, starts, middles, tokens, lines, number, least, state):
    """Write a line like real line `number`, of `least` bytes or more, without a space at its end."""
    begin = at
    for i in range(lines[number], lines[number + 1]):
        at = _word(out, at, data, starts, middles, tokens, state, tokens[i])
        if at - begin > _LONGEST:
            break
    while at > begin and out[at - 1] == 32:
        at -= 1
    while at - begin < least:
        out[at] = 32
        at = _word(out, at + 1, data, starts, middles, tokens, state, np.int32(-1))
        while at > begin and out[at - 1] == 32:
            at -= 1
    return at


@njit
def _hash(out, begin, end, value):
    for i in range(begin, end):
        value = (value ^ np.uint64(out[i])) * np.uint64(0x100000001B3)
    return value ^ (value >> np.uint64(29))


@njit(cache=True)
def _mono_block(
    out, data, starts, middles, tokens, lines, documents, foreign, first, first_lines, state, size, planted
):
    """Fill `out` with documents up to about `size` bytes. Returns (bytes, hashes of the lines that stay, where good
    lines begin and end). `planted`: all lines, then damaged ones by kind."""
    hashes, places = np.empty(size // 8 + 64, np.uint64), np.empty((size // 8 + 64, 2), np.int64)
    at = kept = good = left = 0
    basis = np.uint64(0xCBF29CE484222325)
    while at < size:
        if left == 0:
            left = documents[_below(state, len(documents))]
            if at:
                out[at] = 10
                at += 1
        left -= 1
        planted[0] += 1
        begin, kind = at, _share(state)
        if kind < _DUPLICATES and good:
            if len(first_lines) and kind < _DUPLICATES / 2:
                row = _below(state, len(first_lines))
                at = _copy(out, at, first, first_lines[row, 0], first_lines[row, 1])
            else:
                row = _below(state, good)
                at = _copy(out, at, out, places[row, 0], places[row, 1])
            hashes[kept] = _hash(out, begin, at, basis)
            kept += 1
        elif kind < _DUPLICATES + _DAMAGED:
            damage = _below(state, 4)
            planted[1 + damage] += 1
            if damage == 0:
                for _ in range(8):
                    out[at] = 97 + _below(state, 26)
                    at += 1
            elif damage == 1:
                at = _copy(out, at, foreign, 0, len(foreign))
            else:
                at = _line(
                    out, at, data, starts, middles, tokens, lines, _below(state, len(lines) - 1), _SHORTEST, state
                )
                hashes[kept] = _hash(out, begin, at, basis)
                kept += 1
                out[at] = 0xFF if damage == 2 else 1
                at += 1
                if damage == 2:
                    hashes[kept - 1] = _hash(out, begin, at, basis)
        else:
            at = _line(out, at, data, starts, middles, tokens, lines, _below(state, len(lines) - 1), _SHORTEST, state)
            hashes[kept] = _hash(out, begin, at, basis)
            kept += 1
            places[good, 0], places[good, 1] = begin, at
            good += 1
        out[at] = 10
        at += 1
    return at, hashes[:kept].copy(), places[:good].copy()


@njit(cache=True)
def _pair_block(
    out,
    other,
    data,
    starts,
    middles,
    tokens,
    lines,
    data2,
    starts2,
    middles2,
    tokens2,
    lines2,
    state,
    size,
    planted,
    low,
):
    """The same for pairs: sides in `out` and `other`. `low` [n] is whether a pair gets a low score; empty: no scores.
    Returns the bytes of both sides, pairs, and hashes of those that stay."""
    hashes, places = np.empty(size // 4 + 64, np.uint64), np.empty((size // 4 + 64, 4), np.int64)
    at = at2 = kept = good = n = 0
    basis = np.uint64(0xCBF29CE484222325)
    while at + at2 < size:
        planted[0] += 1
        begin, begin2, kind = at, at2, _share(state)
        if kind < _DUPLICATES and good:
            row = _below(state, good)
            at = _copy(out, at, out, places[row, 0], places[row, 1])
            at2 = _copy(other, at2, other, places[row, 2], places[row, 3])
            damage = -1
        else:
            damage = _below(state, 5 if len(low) else 4) if kind < _DUPLICATES + _DAMAGED else -1
            row = _below(state, len(lines) - 1)
            at = _line(out, at, data, starts, middles, tokens, lines, row, 3, state)
            if damage == 1:
                at2 = _copy(other, at2, out, begin, at)
            elif damage != 0:
                at2 = _line(other, at2, data2, starts2, middles2, tokens2, lines2, row, 3, state)
        if damage >= 0:
            planted[1 + damage] += 1
        if damage == -1 or damage == 2 or damage == 3:
            hashes[kept] = _hash(other, begin2, at2, _hash(out, begin, at, basis) + np.uint64(1))
            kept += 1
        if damage == -1 and kind >= _DUPLICATES + _DAMAGED:
            places[good, 0], places[good, 1], places[good, 2], places[good, 3] = begin, at, begin2, at2
            good += 1
        if damage == 2 or damage == 3:
            other[at2] = 0xFF if damage == 2 else 1
            at2 += 1
        out[at] = other[at2] = 10
        at, at2 = at + 1, at2 + 1
        if len(low):
            low[n] = damage == 4
        n += 1
    return at, at2, n, hashes[:kept].copy()


# Files


def write_text(file: TextFile, source: Path, out: Path, seed: int) -> Planted:
    """Write one file, and next to it what is planted in it; a pure function of the file, the source and the seed."""
    path, note = out / file.path, out / "planted" / f"{file.path}.json"
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
            fields = words.data, words.starts, words.middles, words.tokens, words.lines, words.documents
            filled, kept, lines = _mono_block(out, *fields, alien, first, first_lines, state, size, planted)
            if not len(first_lines):
                first, first_lines = out[:filled].copy(), lines
            stream.write(lzma.compress(out[:filled].data, filters=_FAST))
            hashes.append(kept)
            written += filled
    damaged = dict(zip(_MONO_DAMAGE, planted[1:].tolist(), strict=True))
    every = np.concatenate(hashes)
    return Planted(int(planted[0]), written, repeated(every), damaged), every


def _write_pairs(file: TextFile, source: Path, path: Path, state: np.ndarray) -> tuple[Planted, np.ndarray]:
    sides = _read_pairs(source, file.languages[1])
    tables = file.corpus in ("wikimatrix", "ccaligned")
    out, other = (np.empty(_BLOCK + 1_000_000, np.uint8) for _ in range(2))
    planted, hashes = np.zeros(6, np.int64), []

    def blocks() -> Iterator[tuple[bytes, bytes, np.ndarray]]:
        written = 0
        while written < file.text_bytes:
            size = min(_BLOCK, file.text_bytes - written)
            low = np.zeros(size if tables else 0, bool)
            fields = [
                getattr(side, name) for side in sides for name in ("data", "starts", "middles", "tokens", "lines")
            ]
            a, b, pairs, kept = _pair_block(out, other, *fields, state, size, planted, low)
            hashes.append(kept)
            written += a + b
            yield out[:a].tobytes(), other[:b].tobytes(), low[:pairs]

    written = (_write_tables if tables else _write_sides)(file, path, blocks())
    # an empty last column is taken for a missing one
    reasons = ("malformed" if file.corpus == "wikimatrix" else "empty_side", *_PARA_DAMAGE[1:])
    damaged = dict(zip(reasons, planted[1:].tolist(), strict=True))
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
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    wanted = [file for file in files(options.gigabytes) if not options.only or file.corpus in options.only]
    write = partial(write_text, source=options.source, out=options.out, seed=options.seed)
    with ProcessPoolExecutor(options.processes) as pool:
        total = sum(planted.text_bytes for planted in pool.map(write, wanted))
    print(f"{options.out}: {len(wanted)} files, {total / 1e9:.2f} GB of text")


if __name__ == "__main__":
    main()

"""Writes synthetic text of any size that resembles a small real corpus, in the layouts of CC-100 and CCAligned.

    python -m bench.rehearsal.text --gigabytes 50 --source ../shared/data/corpus --out FOLDER --processes 2

The source is a folder with mono/<lang>.txt.xz and para/en-<lang>.txt.zip. The synthetic text has its languages and
pairs, in the same proportions. A synthetic line is a real line in which a third of the words are replaced by other
words of the language, drawn by their frequency, and a sixth by new forms: the first half of one word and the last half
of another. So scripts, lengths and frequencies of words stay real. New forms are numbered, and a form's number is drawn
from a power law of exponent 1/0.6, so that the number of different forms grows as the number of words to the power of
0.6 (Heaps' law). In scripts without spaces, runs of two to five characters serve as words.

Some lines are exact duplicates or damaged, so that the filters of the ready corpus descriptions drop or repair them.
planted/FILE.json counts these lines.
"""

import json
import lzma
import random
import re
import zipfile
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, islice
from pathlib import Path
from string import ascii_lowercase

import numpy as np

from data_prep.languages import cc100_code, count_letters, scripts_of
from data_prep.parallel import on_root, run_tasks
from data_prep.progress import print_stdout
from xlme_ds.data.schema import read_manifest
from xlme_ds.io.files import atomic_write, write_json
from xlme_ds.io.help import call_from_command_line

_SPACELESS = {"zh-Hans", "zh-Hant", "ja", "th", "lo", "km", "my"}
_MIN_LINE_BYTES = 24  # the fewest bytes of a monolingual line
_DOCUMENT_ENDS = 0.1  # fraction of the lines that end a document
_DUPLICATES, _DAMAGED = 0.02, 0.001  # fractions of the lines: duplicates, damaged lines
_OTHER_WORDS, _NEW_FORMS = 1 / 3, 1 / 6  # fractions of the words: replaced by another word, by a new form
_HEAPS_EXPONENT = 0.6
_REMEMBERED_LINES = 10_000  # a duplicate repeats one of the last 10,000 lines

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ufeff\ufffd]")
_SPACES = re.compile(r"\s")  # each white-space character becomes a plain space
_BLOCK = 4_000_000  # bytes of text that are compressed at once
_REPAIRED = {"invalid_utf8": b"\xff", "control_character": b"\x01"}  # damage -> its bytes; encode repairs the line
_DAMAGE = {
    "cc100": ("boilerplate_length", "script", *_REPAIRED),
    "ccaligned": ("empty_side", "identical_sides", "score", *_REPAIRED),
}

# Reasons for which encode drops a line by its number of tokens. Such lines are not planted, because the number depends
# on the vocabulary.
BY_TOKENS = ("length_ratio", "length", "too_long", "no_token")
# corpus -> (task, the manifest's key of the number of lines, the manifest's key of the dropped lines by reason)
TASKS = {"cc100": ("mono", "paragraphs_in", "removed"), "ccaligned": ("para", "pairs_in", "dropped")}


@dataclass(frozen=True)
class TextFile:
    """A synthetic file to write."""

    source: Path  # the real text that it resembles
    corpus: str
    name: str  # language or pair, in CC-100's codes
    text_bytes: int

    @property
    def path(self) -> str:
        """The path below the output folder. The counts of the file's planted lines are in planted/PATH.json."""
        return f"{self.corpus}/{self.name}.{'txt' if self.corpus == 'cc100' else 'tsv'}.xz"


def files(gigabytes: float, source: Path) -> list[TextFile]:
    """All files of a corpus of `gigabytes` (10⁹ bytes), largest first. Their sizes are proportional to the sizes of the
    files in `source`."""
    real = [("cc100", path) for path in source.glob("mono/*.txt.xz")]
    real += [("ccaligned", path) for path in source.glob("para/en-*.txt.zip")]
    if not real:
        raise ValueError(f"{source} has no mono/<lang>.txt.xz and no para/en-<lang>.txt.zip: name another --source")
    growth = gigabytes * 1e9 / sum(path.stat().st_size for _, path in real)
    corpus = [
        TextFile(path, name, path.name.split(".")[0], max(round(path.stat().st_size * growth), 2_000))
        for name, path in real
    ]
    return sorted(corpus, key=lambda file: (-file.text_bytes, file.path))


class Language:
    """The words and real lines of a language, from which `line` makes synthetic lines. A word includes the space after
    it, and a real line is a list of words."""

    def __init__(self, lines: Sequence[str], language: str):
        """Cut `lines` into words, and leave out words with letters of another script. A longer text without spaces is
        cut every 64 characters, because as one word it could fill a training row."""
        language = cc100_code(language)
        word_pattern = re.compile(r"[ -~]{1,64}|[^ -~]{2,5}" if language in _SPACELESS else r"\S{1,64}\s?")
        split = [word_pattern.findall(_SPACES.sub(" ", _CONTROL.sub("", line))) for line in lines]
        distinct = list(dict.fromkeys(chain.from_iterable(split)))
        letters_in_script, all_letters = count_letters(distinct, scripts_of(language))
        self.words = list(compress(distinct, letters_in_script == all_letters))
        kept_words = set(self.words)
        self.lines = [[word for word in line if word in kept_words] for line in split]
        self.occurrences = list(chain.from_iterable(self.lines))

    def line(self, rng: random.Random, index: int, min_bytes: int) -> str:
        """Make a line like the real line at `index`, with at least `min_bytes` bytes."""
        text = "".join(self._word(rng, word) for word in self.lines[index]).strip()
        while len(text.encode()) < min_bytes:
            text = f"{text} {rng.choice(self.occurrences)}".strip()
        return text

    def _word(self, rng: random.Random, word: str) -> str:
        """`word` itself, another word, or a new form."""
        draw = rng.random()
        if draw < _OTHER_WORDS:
            return rng.choice(self.occurrences)
        if draw > _OTHER_WORDS + _NEW_FORMS:
            return word
        form = int(min(1e15, 100 * (1 - rng.random()) ** (-_HEAPS_EXPONENT / (1 - _HEAPS_EXPONENT))))
        hashed = form * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)  # picks the form's two words
        first, last = (self.words[(hashed >> shift) % len(self.words)] for shift in (96, 64))
        return first[: len(first) // 2] + last[len(last) // 2 :]


class Planter:
    """Makes lines or pairs, plants duplicates and damage among them, and counts what it plants."""

    def __init__(self, rng: random.Random, languages: Sequence[Language], damage: Sequence[str], foreign: str = ""):
        """`foreign` is the line that replaces a line whose damage is "script"."""
        self.rng, self.languages, self.damage, self.foreign = rng, languages, damage, foreign
        self.counts, self.hashes = Counter[str](), array("q")
        self._earlier = deque[list[str]](maxlen=_REMEMBERED_LINES)

    def planted(self) -> dict[str, int]:
        """The number of lines, of exact duplicates, and of damaged lines of each kind."""
        duplicates = len(self.hashes) - len(np.unique(np.array(self.hashes)))
        return {**self.counts, "exact_duplicates": duplicates}

    def record(self) -> bytes:
        """Make the next line, or the next pair: its two sides and its score, separated by tabs."""
        draw, damage = self.rng.random(), ""
        if draw < _DUPLICATES and self._earlier:
            sides = self.rng.choice(self._earlier)
        else:
            index, least = self.rng.randrange(len(self.languages[0].lines)), (_MIN_LINE_BYTES, 3)
            sides = [language.line(self.rng, index, least[len(self.languages) - 1]) for language in self.languages]
            if len(sides) == 2 and sides[0].lower() == sides[1].lower():
                sides[1] += "x"  # only planted pairs have equal sides
            if draw < _DUPLICATES + _DAMAGED:
                damage = self.rng.choice(self.damage)
            else:
                self._earlier.append(sides)
        self.counts.update(["lines", damage] if damage else ["lines"])
        if damage == "boilerplate_length":
            sides = ["".join(self.rng.choices(ascii_lowercase, k=8))]
        elif damage == "script":
            sides = [self.foreign]
        elif damage in ("empty_side", "identical_sides"):
            sides = [sides[0], sides[0] if damage == "identical_sides" else ""]
        text = "\t".join(sides)
        if damage == "" or damage in _REPAIRED:
            self.hashes.append(hash(text + "\ufffd" * (damage == "invalid_utf8")))  # the text after the repair
        score = b"" if len(sides) == 1 else b"\t1.01" if damage == "score" else b"\t1.17"
        return text.encode() + _REPAIRED.get(damage, b"") + score

    def blocks(self, size: int) -> Iterator[list[bytes]]:
        """Yield blocks of records, at least `size` bytes in all. In monolingual text, an empty line ends a document."""
        written = 0
        while written < size:
            block, end = [], min(written + _BLOCK, size)
            while written < end:
                block.append(self.record())
                written += len(block[-1]) + 1
                if len(self.languages) == 1 and self.rng.random() < _DOCUMENT_ENDS:
                    block.append(b"")
            yield block


def read_languages(file: TextFile, lines: int) -> list[Language]:
    """Read at most the first `lines` lines or pairs of a source; returns its language, or both. In pairs, lines at the
    same index translate each other."""
    codes = file.name.split("-")
    if file.corpus == "cc100":
        with lzma.open(file.source, "rt", encoding="utf-8") as stream:
            texts = [line.strip() for line in islice(stream, lines)]
        return [Language([line for line in texts if len(line.encode()) > _MIN_LINE_BYTES], file.name)]
    with zipfile.ZipFile(file.source) as archive:
        names = [next(name for name in archive.namelist() if name.endswith(f".{code}")) for code in codes]
        sides = [archive.read(name).decode().split("\n")[:lines] for name in names]
    pairs = [(a.strip(), b.strip()) for a, b in zip(*sides, strict=False) if 2 < len(a) < 400 and 2 < len(b) < 400]
    return [Language(side, code) for side, code in zip(zip(*pairs, strict=True), codes, strict=True)]


def write_text(file: TextFile, out: Path) -> None:
    """Write a file and its note. Their bytes depend only on `file` and its source."""
    path, note = out / file.path, out / "planted" / f"{file.path}.json"
    if note.exists():
        return
    for folder in (path.parent, note.parent):
        folder.mkdir(parents=True, exist_ok=True)
    languages = read_languages(file, 2_000 + file.text_bytes // 100)  # enough that a small file repeats few of them
    foreign = "Это строка на другом языке" if file.name == "th" else "บรรทัดนี้เป็นภาษาอื่น"
    planter = Planter(random.Random(file.path), languages, _DAMAGE[file.corpus], foreign)
    with atomic_write(path) as stream:
        for block in planter.blocks(file.text_bytes):
            stream.write(lzma.compress(b"\n".join([*block, b""]), preset=0))
    write_json(note, planter.planted())


def check_planted(text: Path, files: Sequence[TextFile], encoded: Path) -> dict[str, int]:
    """Check that stage encode counted the planted duplicates and damaged lines of each language and pair, and no others
    except lines that it dropped for their tokens. Returns the number of planted lines of each kind and of lines dropped
    for their tokens, over all files. Raises ValueError at the first difference."""
    total = Counter[str]()
    for file in files:
        task, lines_key, dropped_key = TASKS[file.corpus]
        name = "-".join(map(cc100_code, file.name.split("-")))
        counts = read_manifest(encoded / task).counts["by_language"][name]
        counted = Counter({"lines": counts[lines_key]}) + Counter(counts[dropped_key]) + Counter(counts["repaired"])
        expected = Counter[str](json.loads((text / "planted" / f"{file.path}.json").read_text()))
        dropped_by_tokens = sum(counted.pop(reason, 0) for reason in BY_TOKENS)
        total["dropped for their tokens"] += dropped_by_tokens
        missing = expected["exact_duplicates"] - counted["exact_duplicates"]
        if 0 < missing <= dropped_by_tokens:  # planted duplicates may be among the lines dropped for their tokens
            expected["exact_duplicates"] -= missing
        if counted != +expected:
            raise ValueError(f"{encoded / task}: {name} has {dict(counted)}, {dict(expected)} were planted")
        total.update(expected)
    return dict(total)


def write_corpus(gigabytes: float, source: Path, out: Path, processes: int = 1) -> None:
    """Write the corpus; finished files are not written again.

    Args:
        gigabytes: text in 10⁹ bytes, all files together
        source: folder with mono/<lang>.txt.xz and para/en-<lang>.txt.zip of real text
        out: a folder
        processes: number of processes on this machine; under MPI, the ranks do the work instead
    """

    def write() -> None:
        corpus = files(gigabytes, source)
        run_tasks(partial(write_text, out=out), corpus, [file.text_bytes for file in corpus], processes, "text")
        print_stdout(f"{out}: {len(corpus)} files, {gigabytes} GB of text")

    on_root(write)


if __name__ == "__main__":
    call_from_command_line(write_corpus, "python -m bench.rehearsal.text", None, __doc__)

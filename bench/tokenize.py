"""From text files to arrays of ids, side by side in one run: SentencePiece alone, our whole stage, `datasets.map`.

    python -m bench.tokenize [--quick] [--json] [--corpus DIR] [--vocab DIR]

* SentencePiece: lines that are in memory already, a call a line, each into an int32 array: the limit.
* joined: the same with 50 lines in a call.
* encode: the whole of `data_prep encode`, from compressed files to shards with their checksums, on one MPI rank and on
  two; neither imports nor the loading of the model are counted.
* datasets.map: Hugging Face's fast tokenizer with the same model, one process; reading the files is not counted.
* mix: `data_prep mix` of what was encoded, against a copy (with fsync) of the files that it wrote.

The sides run in turns, several times; a ratio is the median of the turns' ratios. MB are 10^6 bytes of cleaned UTF-8.
"""

import os
import sys

if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # run as a file: it would hide the library's `tokenize`
    sys.path[0] = os.path.dirname(sys.path[0])

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from bench.tokenize_sides import Spent, copy_files, encode_stage, hugging_face, mismatches, mix_stage, tokenize
from bench.tokenize_text import corpus_files, documents_of, trained
from xlme_ds.data.vocabulary import Vocabulary

JOINED = 50
QUICK = ("ar", "de", "en", "fi", "hi", "ja", "ko", "ru", "ta", "th", "tr", "vi", "zh-Hans")


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    corpus: Path | None = None
    """Folder with mono/<lang>.txt.xz; without it ../shared/data/corpus, or else the sample corpus (fetched)."""
    vocab: Path | None = None
    """Folder of stage vocab; without it one of --size ids is trained on --sentences lines of the text."""
    size: int = 32_000
    sentences: int = 100_000
    languages: tuple[str, ...] = ()
    """These only."""
    megabytes: float = 0.0
    """Of text, at most, of every language; 0: all."""
    hugging_face_kilobytes: int = 500
    """Of text, of every language, for the slow side."""
    mix_rows: int = 300_000
    """Of 2 KB: few of them are gone before the disk has begun."""
    rounds: int = 5
    quick: bool = False
    """Within a minute: one round over 4 MB of each of some languages, with a small vocabulary."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Round:
    """What one turn took: by language where a dictionary (`encode` in seconds on the clock, of one rank)."""

    lines: dict[str, Spent]
    joined: dict[str, Spent]
    encode: dict[str, float]
    one_rank: Spent
    two_ranks: Spent
    datasets_map: Spent
    mix: Spent
    copy: Spent


class Bench:
    """One corpus, one vocabulary, a scratch folder, and what was measured so far."""

    def __init__(self, settings: Settings, scratch: Path):
        self.scratch = scratch
        self.mono, self.files = corpus_files(settings.corpus, settings.languages, settings.megabytes, scratch)
        self.vocab = settings.vocab or trained(self.mono, scratch / "vocab", settings.size, settings.sentences)
        self.vocabulary = Vocabulary(self.vocab)
        self.bytes: dict[str, int] = {}
        self.lines: dict[str, int] = {}
        self.mismatches: dict[str, int] = {}
        self.part: dict[str, int] = {}  # bytes of each language for Hugging Face
        (scratch / "part").mkdir()
        self._part_bytes = settings.hugging_face_kilobytes * 1000
        self.mix_rows = settings.mix_rows

    def round(self, first: bool) -> Round:
        """Every side once."""
        out, mixed = self.scratch / "encoded", self.scratch / "mixed"
        one_rank, by_language = encode_stage(self.vocab, self.mono, out, ranks=1)
        lines, joined = {}, {}
        for language in self.files:
            lines[language], joined[language] = self._sentencepiece(language, out / "mono", first)
        mix = mix_stage(self.vocab, out, mixed, self.mix_rows)
        copy = copy_files(mixed / "mono", self.scratch / "copied")
        datasets_map = hugging_face(self.vocab, self.scratch / "part", self.scratch / "hugging_face")
        two_ranks, _ = encode_stage(self.vocab, self.mono, out, ranks=2)
        return Round(lines, joined, by_language, one_rank, two_ranks, datasets_map, mix, copy)

    def _sentencepiece(self, language: str, encoded: Path, first: bool) -> tuple[Spent, Spent]:
        """Time SentencePiece on one language, and in the first round compare every line's ids with the shards'."""
        documents = [document for path in self.files[language] for document in documents_of(path)]
        lines = [line for document in documents for line in document]
        alone, ids = tokenize(self.vocabulary, lines, 1)
        joined, _ = tokenize(self.vocabulary, lines, JOINED)
        if first:
            each = iter(ids)
            self.mismatches[language] = mismatches([[next(each) for _ in d] for d in documents], encoded / language)
            self.lines[language], self.bytes[language] = len(lines), sum(len(line.encode()) for line in lines)
            part = "\n".join(lines).encode()[: self._part_bytes].decode(errors="ignore").encode()
            self.part[language] = len(part)
            (self.scratch / "part" / f"{language}.txt").write_bytes(part)
        return alone, joined


def summary(bench: Bench, rounds: Sequence[Round]) -> dict[str, Any]:
    """The figures of the run."""
    megabytes, part = sum(bench.bytes.values()) / 1e6, sum(bench.part.values()) / 1e6

    def median(value: Callable[[Round], float]) -> float:
        return round(statistics.median(map(value, rounds)), 3)

    def fraction(language: str) -> float:
        return median(lambda r: r.lines[language].wall / r.encode[language])

    def seconds_for_part(r: Round) -> float:
        """Our stage's seconds for the text that Hugging Face's side had."""
        return sum(r.encode[code] * bench.part[code] / bench.bytes[code] for code in bench.bytes)

    fractions = {code: fraction(code) for code in bench.bytes}
    return {
        "mismatches": sum(bench.mismatches.values()),
        "encode_stage_fraction_of_sentencepiece": median(lambda r: _wall(r.lines) / r.one_rank.wall),
        "two_rank_scaling": median(lambda r: r.one_rank.wall / r.two_ranks.wall),
        "ratio_vs_datasets_map": median(lambda r: r.datasets_map.wall / seconds_for_part(r)),
        "mix_fraction_of_copy": median(lambda r: r.copy.wall / r.mix.wall),
        "encode_stage_fraction_in_cpu_time": median(
            lambda r: sum(spent.cpu for spent in r.lines.values()) / r.one_rank.cpu
        ),
        "languages_below_sentencepiece": sum(value < 1 for value in fractions.values()),
        "megabytes_per_second": {
            "sentencepiece": median(lambda r: megabytes / _wall(r.lines)),
            f"sentencepiece, {JOINED} lines joined": median(lambda r: megabytes / _wall(r.joined)),
            "encode, one rank": median(lambda r: megabytes / r.one_rank.wall),
            "encode, two ranks": median(lambda r: megabytes / r.two_ranks.wall),
            "datasets.map": median(lambda r: part / r.datasets_map.wall),
        },
        "languages": len(bench.bytes),
        "lines": sum(bench.lines.values()),
        "megabytes": round(megabytes, 3),
        "vocabulary": bench.vocabulary.size,
        "rounds": len(rounds),
        "fraction_by_language": fractions,
    }


def _wall(by_language: dict[str, Spent]) -> float:
    return sum(spent.wall for spent in by_language.values())


def main(arguments: list[str] | None = None) -> None:
    """Measure and print the figures, or JSON."""
    settings = tyro.cli(Settings, description=__doc__, args=arguments)
    if settings.quick:
        languages = settings.languages or QUICK
        settings = replace(settings, languages=languages, megabytes=4.0, rounds=1, size=8000, sentences=15_000)
        settings = replace(settings, hugging_face_kilobytes=100, mix_rows=100_000)
    load = round(os.getloadavg()[0], 2)
    try:
        with tempfile.TemporaryDirectory() as scratch, redirect_stdout(sys.stderr):
            bench = Bench(settings, Path(scratch))
            rounds = [bench.round(first=not number) for number in range(settings.rounds)]
            figures = summary(bench, rounds) | {"load_before": load}
    except ValueError as error:
        sys.exit(f"bench.tokenize: error: {error}")
    if settings.json:
        print(json.dumps(figures, indent=1))
    else:
        _print(figures)


def _print(figures: dict[str, Any], indent: str = "") -> None:
    for name, value in figures.items():
        if isinstance(value, dict):
            print(f"{indent}{name}")
            _print(value, indent + "  ")
        else:
            print(f"{indent}{name:<{44 - len(indent)}}{value:>12,}")


if __name__ == "__main__":
    main()

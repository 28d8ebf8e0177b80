"""Compares ways from text files to arrays of ids: SentencePiece alone, our whole stage, `datasets.map`.

    python -m bench.tokenize --vocab DIR [--corpus DIR] [--rounds 5] [--json]

* SentencePiece: lines in memory, a call a line, each into an int32 array: the limit.
* encode: the whole of `xlme prep encode`, from compressed files to shards with their checksums, on one MPI rank and on
  two, without imports and the loading of the model.
* datasets.map: Hugging Face's fast tokenizer with the same model, one process, on the first 0.5 MB of every language,
  without reading the files. It is compared with encode on that part.

The sides run in turns; a ratio is the median of the turns' ratios. MB are 10^6 bytes of cleaned UTF-8.
"""

import lzma
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tyro

from bench.measure import ROOT, Figures, show
from data_prep.encode.encode import EncodeConfig
from data_prep.encode.encode import run as encode
from data_prep.filters.clean import clean_line
from data_prep.languages import canonical
from data_prep.parallel import barrier, is_root
from xlme_ds.cli import fail
from xlme_ds.data.schema import EOS
from xlme_ds.data.vocabulary import Vocabulary

PART = 500_000  # bytes of text of every language for `datasets.map`
_WARM_LANGUAGES = "de en es fr it nl pt ru"  # a task for every rank, so that each loads its model
_ENDING = ".txt.xz"
Seconds = tuple[float, ...]
"""Time by the clock, and of this process's CPU, which other work on the machine disturbs less."""


@dataclass(frozen=True)
class TokenizeSettings:
    """Arguments of the command."""

    vocab: Path  # folder of `xlme prep vocab`
    corpus: Path = ROOT.parent / "shared/data/corpus"  # folder with mono/<lang>.txt.xz
    rounds: int = 5  # figures are medians of the rounds
    json: bool = False  # print JSON
    side: tuple[str, ...] = ()  # used by the command itself


def timed(work: Callable[[], Any]) -> tuple[Seconds, Any]:
    """The time of `work`, and its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return (time.perf_counter() - wall, time.process_time() - cpu), result


def corpus_files(mono: Path) -> dict[str, list[Path]]:
    """The files of a folder by language. Raises ValueError if it has none."""
    files: dict[str, list[Path]] = {}
    for path in sorted(mono.glob(f"*{_ENDING}")):
        files.setdefault(canonical(path.name.removesuffix(_ENDING)), []).append(path)
    if not files:
        raise ValueError(f"{mono} holds no <lang>{_ENDING} to measure: name a folder with mono/ in it by --corpus")
    return files


def documents_of(path: Path) -> list[list[str]]:
    """The cleaned lines of every document, read without the stage's own reader."""
    documents: list[list[str]] = [[]]
    with lzma.open(path) as file:
        for raw in file:
            line = clean_line(raw.rstrip(b"\n"), Counter())
            if line:
                documents[-1].append(line)
            elif documents[-1]:
                documents.append([])
    return [document for document in documents if document]


def mismatches(documents: Sequence[Sequence[np.ndarray]], folder: Path) -> int:
    """Lines whose ids in the shards of `folder` differ from SentencePiece's ids of each line of each document."""
    shards = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in sorted(folder.glob("*.arrow"))]
    stored = [list_.values.to_numpy() for table in shards for list_ in table.column("tokens")]
    end = np.array([EOS], dtype=np.int32)
    expected = [[Vocabulary.from_pieces(ids) for ids in lines] for lines in documents if any(map(len, lines))]
    wrong = sum(len(lines) for lines in expected[len(stored) :]) + max(len(stored) - len(expected), 0)
    for lines, ids in zip(expected, stored, strict=False):
        if not np.array_equal(np.concatenate([*lines, end]), ids):
            parts = np.split(ids, np.cumsum([len(line) for line in lines]))[: len(lines)]
            wrong += max(sum(not np.array_equal(a, b) for a, b in zip(lines, parts, strict=True)), 1)
    return wrong


class TokenizeBench:
    """A corpus in memory, a vocabulary, and a scratch folder."""

    def __init__(self, settings: TokenizeSettings, scratch: Path):
        self.vocab, self.mono, self.scratch = settings.vocab, settings.corpus / "mono", scratch
        self.vocabulary = Vocabulary(settings.vocab)
        self.documents = {
            language: [document for path in paths for document in documents_of(path)]
            for language, paths in corpus_files(self.mono).items()
        }
        self.lines = [line for documents in self.documents.values() for document in documents for line in document]
        self.bytes, self.part_bytes, self.mismatches = sum(len(line.encode()) for line in self.lines), 0, 0
        (scratch / "part").mkdir()
        (scratch / "warm").mkdir()
        for language, documents in self.documents.items():
            text = "\n".join(line for document in documents for line in document).encode()[:PART]
            self.part_bytes += (scratch / "part" / f"{language}.txt").write_bytes(text.decode(errors="ignore").encode())
        for code in _WARM_LANGUAGES.split():
            text = "All human beings are born free and equal in dignity and rights.\n"
            (scratch / "warm" / f"{code}.txt").write_text(text)

    def round(self, compare: bool) -> dict[str, Seconds]:
        """Run every side once; with `compare` every line's ids are compared with the shards'."""
        encode_one = self.vocabulary.processor.encode
        alone, ids = timed(lambda: [np.array(encode_one(line), dtype=np.int32) for line in self.lines])
        seconds = {"sentencepiece": alone, "encode, one rank": self._encode(self.mono, ranks=1)}
        if compare:
            next_ids = iter(ids)
            for language, documents in self.documents.items():
                by_document = [[next(next_ids) for _ in document] for document in documents]
                self.mismatches += mismatches(by_document, self.scratch / "encoded/mono" / language)
        seconds["encode, two ranks"] = self._encode(self.mono, ranks=2)
        seconds["encode, part"] = self._encode(self.scratch / "part", ranks=1)
        seconds["datasets.map"] = self._child([], "map", self.scratch / "part", self.scratch / "hugging_face")
        return seconds

    def _encode(self, mono: Path, ranks: int) -> Seconds:
        """Run the stage on MPI ranks, with the launcher of this environment first."""
        mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if mpiexec is None:
            raise ValueError("there is no mpiexec: install the extra mpi, or load the cluster's MPI")
        shutil.rmtree(self.scratch / "warmed", ignore_errors=True)
        return self._child([mpiexec, "-n", str(ranks)], "encode", mono, self.scratch / "encoded")

    def _child(self, launcher: list[str], side: str, source: Path, out: Path) -> Seconds:
        """Run one side in its own process, into a new folder; the last line of its output has its times."""
        shutil.rmtree(out, ignore_errors=True)
        command = [*launcher, sys.executable, "-m", "bench.tokenize", "--vocab", str(self.vocab), "--side"]
        one_thread = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        done = subprocess.run(
            [*command, side, str(source), str(out)], cwd=ROOT, env=os.environ | one_thread | offline,
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise ValueError(f"{side} {source} {out} ended with code {done.returncode}: {done.stderr.strip()}")
        return tuple(map(float, done.stdout.splitlines()[-1].split()))


def encode_side(vocab: Path, mono: Path, out: Path) -> Seconds:
    """Stage encode on the MPI ranks of this launch."""
    encode(EncodeConfig(vocab=vocab, out=out.parent / "warmed", mono=out.parent / "warm"))  # loads the model
    barrier()
    return timed(lambda: (encode(EncodeConfig(vocab=vocab, out=out, mono=mono)), barrier()))[0]


def map_side(vocab: Path, text: Path, folder: Path) -> Seconds:
    """`datasets.map` with the fast tokenizer over the plain files of `text`, in one process and thread."""
    from datasets import load_dataset
    from transformers import XLMRobertaTokenizer

    folder.mkdir()
    shutil.copy(Vocabulary(vocab).path, folder / "sentencepiece.bpe.model")
    tokenizer = XLMRobertaTokenizer.from_pretrained(str(folder))
    assert tokenizer.is_fast
    files = sorted(map(str, text.iterdir()))
    lines = load_dataset("text", data_files=files, split="train", cache_dir=str(folder / "cache"))

    def ids(batch: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]}

    ids({"text": ["warm"]})
    return timed(lambda: lines.map(ids, batched=True, remove_columns=["text"]))[0]


def summary(bench: TokenizeBench, rounds: Sequence[dict[str, Seconds]]) -> Figures:
    """Ratios and rates over the rounds, and the size of the corpus."""

    def ratio(slower: str, faster: str, clock: int = 0) -> float:
        return round(statistics.median(seconds[slower][clock] / seconds[faster][clock] for seconds in rounds), 3)

    def speed(side: str) -> float:
        size = bench.part_bytes if side in ("encode, part", "datasets.map") else bench.bytes
        return round(statistics.median(size / 1e6 / seconds[side][0] for seconds in rounds), 3)

    return {
        "mismatches": bench.mismatches,
        "encode_stage_fraction_of_sentencepiece": ratio("sentencepiece", "encode, one rank"),
        "encode_stage_fraction_in_cpu_time": ratio("sentencepiece", "encode, one rank", clock=1),
        "two_rank_scaling": ratio("encode, one rank", "encode, two ranks"),
        "ratio_vs_datasets_map": ratio("datasets.map", "encode, part"),
        "megabytes_per_second": {side: speed(side) for side in rounds[0]},
        "languages": len(bench.documents),
        "lines": len(bench.lines),
        "megabytes": round(bench.bytes / 1e6, 3),
        "vocabulary": bench.vocabulary.size,
        "rounds": len(rounds),
    }


def main() -> None:
    """Measure and print the figures, or JSON."""
    settings = tyro.cli(TokenizeSettings, description=__doc__)
    if settings.side:
        side, source, out = settings.side
        seconds = (encode_side if side == "encode" else map_side)(settings.vocab, Path(source), Path(out))
        if is_root():
            print(*seconds, flush=True)
        return
    load = round(os.getloadavg()[0], 2)
    try:
        with tempfile.TemporaryDirectory() as scratch, redirect_stdout(sys.stderr):
            bench = TokenizeBench(settings, Path(scratch))
            rounds = [bench.round(compare=not number) for number in range(settings.rounds)]
            figures = summary(bench, rounds) | {"load_before": load}
    except ValueError as error:
        fail("bench.tokenize", error)
    show(figures, settings.json)


if __name__ == "__main__":
    main()

"""Compare the speed of our whole stage encode with that of SentencePiece alone.

    xlme bench tokenize --vocab DIR --corpus DIR [--rounds 5] [--json]

* SentencePiece encodes lines that are in memory, with one call per line, into int32 arrays: no stage can be faster.
* encode is the whole of `xlme prep encode`, from compressed files to shards with their checksums, on one MPI rank and
  on two. The time of imports and of loading the model does not count.

These contenders take turns. A ratio is the median over the rounds of each round's ratio. MB are 10^6 bytes of cleaned
UTF-8.
"""

import lzma
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from json import dumps, loads
from pathlib import Path

import numpy as np

from bench.measure import ROOT, Figures, by_turns, printed, ratio, run_bench, timed
from data_prep.encode.encode import EncodeConfig
from data_prep.encode.encode import run as encode
from data_prep.filters.clean import clean_line
from data_prep.languages import cc100_code
from data_prep.parallel import on_root
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.run_commands import child_environment

_WARM_LANGUAGES = "de en es fr it nl pt ru"  # enough tasks for every rank to get one and load the model
_ENCODE = "import sys; from bench.tokenize import encode_stage; encode_stage(*sys.argv[1:])"
_ENDING = ".txt.xz"


def read_lines(mono: Path) -> dict[str, list[str]]:
    """The cleaned lines, none of them empty, of a folder's files <lang>.txt.xz, by language. The reader of stage encode
    is not used. Raises ValueError if there are no such files."""
    lines: dict[str, list[str]] = {}
    for path in sorted(mono.glob(f"*{_ENDING}")):
        with lzma.open(path) as file:
            cleaned = (clean_line(raw.rstrip(b"\n"), Counter()) for raw in file)
            lines.setdefault(cc100_code(path.name.removesuffix(_ENDING)), []).extend(filter(None, cleaned))
    if not lines:
        raise ValueError(f"{mono} holds no <lang>{_ENDING} to measure: name a folder with mono/ in it by --corpus")
    return lines


def encode_stage(vocab: str, mono: str, scratch: str) -> None:
    """Run stage encode on the MPI ranks of this launch; rank 0 prints its wall and CPU seconds."""
    on_root(partial(_encode_on_root, Path(vocab), Path(mono), Path(scratch)))


def _encode_on_root(vocab: Path, mono: Path, scratch: Path) -> None:
    warm_text, warm_out, encoded = (scratch / name for name in ("warm", "warmed", "encoded"))
    warm_text.mkdir()
    for code in _WARM_LANGUAGES.split():
        (warm_text / f"{code}.txt").write_text("All human beings are born free and equal in dignity and rights.\n")
    encode(EncodeConfig(vocab=vocab, out=warm_out, mono=warm_text))  # loads the model
    seconds = timed(lambda: encode(EncodeConfig(vocab=vocab, out=encoded, mono=mono)))
    print(dumps(seconds), flush=True)


def encode_seconds(vocab: Path, mono: Path, ranks: int) -> Figures:
    """Run the stage on `ranks` MPI ranks; returns the times that it prints as its last line."""
    env = child_environment() | {"OMP_NUM_THREADS": "1"}
    mpiexec = shutil.which("mpiexec", path=env["PATH"])  # this environment's launcher is preferred to others
    if mpiexec is None:
        raise ValueError("there is no mpiexec: install the extra mpi, or load the cluster's MPI")
    with tempfile.TemporaryDirectory() as scratch:
        python = [sys.executable, "-c", _ENCODE, str(vocab.resolve()), str(mono.resolve()), scratch]
        done = subprocess.run([mpiexec, "-n", str(ranks), *python], cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"encode on {ranks} ranks ended with code {done.returncode}: {done.stderr.strip()}")
    return loads(done.stdout.splitlines()[-1])


def measure(vocab: Path, corpus: Path, rounds: int = 5, json: bool = False) -> str:
    """Run all contenders in turns. Ratios and rates are medians over the rounds.

    Args:
        vocab: Folder that `xlme prep vocab` wrote.
        corpus: Folder with mono/<lang>.txt.xz.
        rounds: Rounds to measure; each figure is the median over the rounds.
        json: Print JSON.
    """
    mono = corpus / "mono"
    by_language, vocabulary = read_lines(mono), Vocabulary(vocab)
    lines = [line for of_language in by_language.values() for line in of_language]
    segment = vocabulary.processor.encode
    one_rank, two_ranks = "encode, one rank", "encode, two ranks"
    contenders: dict[str, Callable[[], Figures]] = {
        "sentencepiece": lambda: timed(lambda: [np.array(segment(line), dtype=np.int32) for line in lines]),
        one_rank: partial(encode_seconds, vocab, mono, 1),
        two_ranks: partial(encode_seconds, vocab, mono, 2),
    }
    turns = by_turns(contenders, rounds, warm_up=0)
    megabytes = sum(len(line.encode()) for line in lines) / 1e6
    figures = {
        "encode_stage_fraction_of_sentencepiece": ratio(turns, "sentencepiece", one_rank, "wall"),
        "encode_stage_fraction_in_cpu_time": ratio(turns, "sentencepiece", one_rank, "cpu"),
        "two_rank_scaling": ratio(turns, one_rank, two_ranks, "wall"),
        "megabytes_per_second": {
            name: statistics.median(megabytes / turn[name]["wall"] for turn in turns) for name in contenders
        },
        "languages": len(by_language),
        "lines": len(lines),
        "megabytes": round(megabytes, 3),
        "vocabulary": vocabulary.size,
        "rounds": rounds,
    }
    return printed(figures, json)


if __name__ == "__main__":
    run_bench("xlme bench tokenize", measure, __doc__)

"""Compare the speed of our whole stage encode with that of SentencePiece alone.

    xlme bench tokenize --vocab DIR --corpus DIR [--rounds 5] [--json]

* SentencePiece encodes lines that are in memory, with one call per line, into int32 arrays: no stage can be faster.
* encode is the whole of `xlme prep encode`, from compressed files to shards with their checksums, on one MPI rank and
  on two. The time of imports and of loading the model does not count.

These contenders take turns. A ratio is the median over the rounds of each round's ratio. MB are 10^6 bytes of cleaned
UTF-8.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.measure import ROOT, Figures, by_turns, measured, show
from data_prep.encode.encode import EncodeConfig
from data_prep.encode.encode import run as encode
from data_prep.filters.clean import clean_line
from data_prep.languages import cc100_code
from data_prep.parallel import barrier, is_root
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.io.help import call_from_command_line

_WARM_LANGUAGES = "de en es fr it nl pt ru"  # enough tasks for every rank to get one and load the model
_ENCODE = "import sys; from bench.tokenize import encode_stage; encode_stage(*sys.argv[1:])"
_ENDING = ".txt.xz"


class Seconds(NamedTuple):
    """The wall time and the CPU time of one piece of work."""

    wall: float
    cpu: float  # CPU time of one process (rank 0 under MPI), which other work on the machine disturbs less


@dataclass(frozen=True)
class TokenizeSettings:
    """Arguments of the command."""

    vocab: Path  # folder that `xlme prep vocab` wrote
    corpus: Path  # folder with mono/<lang>.txt.xz
    rounds: int = 5  # rounds to measure; each figure is the median over the rounds
    json: bool = False  # print JSON


def timed(work: Callable[[], Any]) -> Seconds:
    """Run `work`, and return its times."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


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
    warm_text, warm_out, encoded = (Path(scratch, name) for name in ("warm", "warmed", "encoded"))
    for code in _WARM_LANGUAGES.split() if is_root() else ():
        warm_text.mkdir(exist_ok=True)
        (warm_text / f"{code}.txt").write_text("All human beings are born free and equal in dignity and rights.\n")
    barrier()
    encode(EncodeConfig(vocab=Path(vocab), out=warm_out, mono=warm_text))  # loads the model
    barrier()
    seconds = timed(lambda: (encode(EncodeConfig(vocab=Path(vocab), out=encoded, mono=Path(mono))), barrier()))
    if is_root():
        print(*seconds, flush=True)


def ratio(turns: Sequence[Mapping[str, Seconds]], slower: str, faster: str, clock: str = "wall") -> float:
    """Median over the rounds of (time of contender `slower` / time of contender `faster`). `clock` says which time:
    "wall" or "cpu"."""
    return round(statistics.median(getattr(turn[slower], clock) / getattr(turn[faster], clock) for turn in turns), 3)


def measure(settings: TokenizeSettings) -> Figures:
    """Run all contenders in turns. Returns ratios and rates, which are medians over the rounds, and the size of the
    corpus."""
    # This environment's launcher is preferred to others on the path.
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpiexec is None:
        raise ValueError("there is no mpiexec: install the extra mpi, or load the cluster's MPI")
    mono = settings.corpus / "mono"
    by_language, vocabulary = read_lines(mono), Vocabulary(settings.vocab)
    lines = [line for of_language in by_language.values() for line in of_language]

    def encode_seconds(ranks: int) -> Seconds:
        """Run the stage on `ranks` MPI ranks, and return the times that it prints as its last line."""
        with tempfile.TemporaryDirectory() as scratch:
            arguments = [str(settings.vocab.resolve()), str(mono.resolve()), scratch]
            command = [mpiexec, "-n", str(ranks), sys.executable, "-c", _ENCODE, *arguments]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"encode on {ranks} ranks ended with code {done.returncode}: {done.stderr.strip()}")
        return Seconds(*map(float, done.stdout.splitlines()[-1].split()))

    encode_one = vocabulary.processor.encode
    contenders: dict[str, Callable[[], Seconds]] = {
        "sentencepiece": lambda: timed(lambda: [np.array(encode_one(line), dtype=np.int32) for line in lines]),
        "encode, one rank": lambda: encode_seconds(1),
        "encode, two ranks": lambda: encode_seconds(2),
    }
    turns = by_turns(contenders, settings.rounds, warm_up=0)

    megabytes = sum(len(line.encode()) for line in lines) / 1e6
    return {
        "encode_stage_fraction_of_sentencepiece": ratio(turns, "sentencepiece", "encode, one rank"),
        "encode_stage_fraction_in_cpu_time": ratio(turns, "sentencepiece", "encode, one rank", clock="cpu"),
        "two_rank_scaling": ratio(turns, "encode, one rank", "encode, two ranks"),
        "megabytes_per_second": {
            name: round(statistics.median(megabytes / turn[name].wall for turn in turns), 3) for name in contenders
        },
        "languages": len(by_language),
        "lines": len(lines),
        "megabytes": round(megabytes, 3),
        "vocabulary": vocabulary.size,
        "rounds": settings.rounds,
    }


def main() -> None:
    """Measure, and print the figures as text or JSON."""
    settings = call_from_command_line(TokenizeSettings, "xlme bench tokenize", None, __doc__)
    show(measured("bench.tokenize", partial(measure, settings)), settings.json)


if __name__ == "__main__":
    main()

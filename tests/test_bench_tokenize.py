"""bench.tokenize: every side runs and has its figures."""

import json
import lzma
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece as spm

from bench.measure import ratio
from bench.tokenize import read_lines
from tests.data_prep.conftest import TEXT

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "mono").mkdir()
    for code, lines in (("en", TEXT * 40), ("zh_hant", TEXT[4:5] * 100)):
        with lzma.open(tmp_path / "mono" / f"{code}.txt.xz", "wt", encoding="utf-8") as file:
            file.write("\n\n".join("\n".join(lines[i : i + 3]) for i in range(0, len(lines), 3)) + "\n")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_prefix=str(tmp_path / "sentencepiece"), vocab_size=250,
        hard_vocab_limit=False, unk_id=0, bos_id=1, eos_id=2, minloglevel=2,
    )  # fmt: skip
    return tmp_path


def test_every_side_runs(corpus: Path) -> None:
    if not (Path(sys.executable).parent / "mpiexec").exists() and not shutil.which("mpiexec"):
        pytest.skip("there is no mpiexec: install the mpich wheel")
    flags = f"--json --corpus {corpus} --vocab {corpus} --rounds 1".split()
    command = [sys.executable, "-m", "bench.tokenize", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["languages"], figures["lines"]) == (2, 340)
    for name in ("encode_stage_fraction_of_sentencepiece", "two_rank_scaling"):
        assert figures[name] > 0, name
    speeds = figures["megabytes_per_second"]
    assert speeds.keys() == {"sentencepiece", "encode, one rank", "encode, two ranks"} and min(speeds.values()) > 0
    lines = [line for of_language in read_lines(corpus / "mono").values() for line in of_language]
    assert figures["megabytes"] == round(sum(len(line.encode()) for line in lines) / 1e6, 3) and figures["rounds"] == 1


def test_lines_of_a_corpus(corpus: Path, tmp_path: Path) -> None:
    lines = read_lines(corpus / "mono")
    assert lines == {"en": TEXT * 40, "zh-Hant": TEXT[4:5] * 100}
    with pytest.raises(ValueError, match="to measure: name a folder"):
        read_lines(tmp_path / "none")


def test_ratios_are_medians_by_either_clock() -> None:
    turns = [
        {"ours": {"wall": 1.0, "cpu": 2.0}, "theirs": {"wall": wall, "cpu": cpu}}
        for wall, cpu in ((3, 2), (2, 8), (9, 4))
    ]
    assert (ratio(turns, "theirs", "ours", "wall"), ratio(turns, "theirs", "ours", "cpu")) == (3.0, 2.0)

"""bench.tokenize: every side runs and has its figures; the comparison of ids sees a single wrong one."""

import json
import lzma
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece as spm

from bench.tokenize import corpus_files, documents_of, mismatches
from data_prep.store import write_arrow
from tests.data_prep.conftest import TEXT
from xlme_ds.data.schema import DOCUMENTS, EOS

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
    pytest.importorskip("datasets", reason="the extra bench is not installed")
    if not (Path(sys.executable).parent / "mpiexec").exists() and not shutil.which("mpiexec"):
        pytest.skip("there is no mpiexec: install the mpich wheel")
    flags = f"--json --corpus {corpus} --vocab {corpus} --rounds 1".split()
    command = [sys.executable, "-m", "bench.tokenize", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["mismatches"], figures["languages"], figures["lines"]) == (0, 2, 340)
    for name in ("encode_stage_fraction_of_sentencepiece", "two_rank_scaling", "ratio_vs_datasets_map"):
        assert figures[name] > 0, name
    assert all(speed > 0 for speed in figures["megabytes_per_second"].values())


def test_wrong_ids_are_counted(tmp_path: Path) -> None:
    # SentencePiece's own ids, one below ours; 0 is its unknown
    documents = [[[5, 6], [7]], [[8, 9, 10]], [[0]], [[]]]
    right = [[6, 7, 8, EOS], [9, 10, 11, EOS], [3, EOS]]
    lines = [[np.array(ids, dtype=np.int32) for ids in document] for document in documents]

    def wrong(shards: list[list[list[int]]]) -> int:
        shutil.rmtree(tmp_path / "en", ignore_errors=True)
        for number, records in enumerate(shards):
            batch = pa.record_batch([pa.array(records, DOCUMENTS.field(0).type)], schema=DOCUMENTS)
            write_arrow(tmp_path / "en" / f"{number}.arrow", DOCUMENTS, [batch], tmp_path)
        return mismatches(lines, tmp_path / "en")

    assert wrong([right]) == wrong([right[:1], right[1:]]) == 0
    assert wrong([[[6, 99, 8, EOS], *right[1:]]]) == 1
    assert wrong([[[6, 99, 98, EOS], *right[1:]]]) == 2
    assert wrong([[[6, 7, 8, 8, EOS], *right[1:]]]) == 1  # one id too many
    assert wrong([right[:2]]) == 1 and wrong([[*right, [5, EOS]]]) == 1
    assert wrong([[right[0], [11, 10, 9, EOS], right[2]]]) == 1


def test_files_of_a_corpus(corpus: Path, tmp_path: Path) -> None:
    mono = corpus / "mono"
    assert corpus_files(mono) == {"en": [mono / "en.txt.xz"], "zh-Hant": [mono / "zh_hant.txt.xz"]}
    documents = documents_of(mono / "zh_hant.txt.xz")
    assert [line for document in documents for line in document] == TEXT[4:5] * 100
    assert {len(document) for document in documents} == {1, 3}
    with pytest.raises(ValueError, match="to measure: name a folder"):
        corpus_files(tmp_path / "none")

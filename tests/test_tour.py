"""The path of a row: the files that docs/architecture.md lists are the ones that a row meets from text to loss."""

import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from data_prep.__main__ import main as data_prep
from tests.launch import ROOT
from xlme_ds.data import segment, shards  # noqa: F401  compiled when they are loaded, which is not a row's way
from xlme_ds.pretrain import main as pretrain

TOUR = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# Only the two packages: an environment may lie in the tree too.
OURS = (str(ROOT / "data_prep"), str(ROOT / "xlme_ds"))
# Functions that are given a row, and, below them, those that work after its loss is known, share out work, count
# progress, or write and read files.
GIVEN = {
    ("data_prep/encode/encode_input.py", "_read_input"),
    ("data_prep/encode/encode_input.py", "encode_block"),
    ("data_prep/mix/mixed_rows.py", "write_shard"),
    ("xlme_ds/data/loader.py", "step"),
    ("xlme_ds/engine/engine.py", "train_batch"),
}
AFTER = {
    *(("data_prep/encode/shared_work.py", name) for name in ("claim", "failed", "finish", "offer", "report", "drain")),
    *(
        ("xlme_ds/io/files.py", name)
        for name in ("file_sha256", "errors_naming", "read_json", "read_checksummed", "atomic_write", "fsync")
    ),
    *(("xlme_ds/io/files.py", name) for name in ("write_json", "write_checksummed")),
    ("xlme_ds/io/folders.py", "make_folder"),
    ("xlme_ds/engine/engine.py", "_backward"),
    ("xlme_ds/engine/engine.py", "_update"),
    ("xlme_ds/engine/optimizer.py", "set_learning_rate"),
    ("xlme_ds/engine/engine.py", "_stats"),
}


@contextmanager
def files_met() -> Iterator[set[str]]:
    """The files of the tree whose functions run for a row, in any thread."""
    met: set[str] = set()
    inside: dict[int, list[int]] = defaultdict(lambda: [0, 0])

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(OURS):
            return
        path = str(Path(frame.f_code.co_filename).relative_to(ROOT))
        place, depth = (path, frame.f_code.co_name), inside[threading.get_ident()]
        if event == "call" and depth[0] and not depth[1] and place not in AFTER and place[1] != "<module>":
            met.add(path)
        for kind, places in enumerate((GIVEN, AFTER)):
            if place in places:
                depth[kind] += 1 if event == "call" else -1

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield met
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def run(command: Callable[[list[str]], Any], words: str) -> None:
    assert not command(words.split())


def test_the_tour_lists_the_files_that_a_row_meets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mono").mkdir()
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    lines = [" ".join(words[i * k % 8] for k in (1, 3, 5)) for i in range(400)]
    (tmp_path / "mono/en.txt").write_text("\n\n".join("\n".join(lines[i : i + 4]) for i in range(0, 400, 4)))
    monkeypatch.chdir(tmp_path)
    run(data_prep, "vocab --mono mono --out vocab --size 29 --processes 1")
    with files_met() as met:
        run(data_prep, "encode --mono mono --vocab vocab --out encoded --processes 1")
        run(data_prep, "mix --encoded encoded --vocab vocab --out mixed --row-tokens 64 --mono-rows 8 --processes 1")
        run(
            pretrain,
            "--recipe quickstart --data mixed --out run --engine.kind plain --engine.precision fp32 "
            "--model.vocabulary 29 "
            "--data.mono-rows 4 --data.para-rows 0 --data.micro-batch 4 --train.steps 1 --optimizer.warmup-steps 1 "
            "--model.width 16 --model.heads 2 --model.feed-forward 32 --model.discriminator-layers 2 "
            "--model.generator-layers 1 --model.max-positions 64",
        )
    told = re.findall(r"^\| `(\w+/[\w/]+\.py)` \|", TOUR, re.M)
    assert len(told) == len(set(told)) <= 28
    assert met - {"xlme_ds/models/attention_cpu.py"} == set(told)


def test_every_file_that_the_tour_names_exists() -> None:
    named = re.findall(r"`((?:xlme_ds|data_prep|slurm|tests|docs)/[\w/.]*)`", TOUR)
    assert len(named) > 40 and not [name for name in named if not (ROOT / name).exists()]

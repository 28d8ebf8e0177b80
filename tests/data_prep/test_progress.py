"""What `encode` tells while it works: a line that changes on a terminal, plain lines elsewhere."""

import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from data_prep.encode_input import SharedWork

ROOT = Path(__file__).resolve().parents[2]


def test_a_terminal_shows_text_and_inputs(vocab: Path, tmp_path: Path, sentences: list[str]) -> None:
    (tmp_path / "mono").mkdir()
    for code in ("en", "de", "fr"):
        (tmp_path / "mono" / f"{code}.txt").write_text(f"{sentences[0]}\n\n" * 60_000)
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 1 << 16):
                shown.extend(data)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    command = [sys.executable, "-m", "data_prep", "encode", "--mono", tmp_path / "mono", "--vocab", vocab]
    flags = ["--block-bytes", "1000000", "--out", tmp_path / "out"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run([*command, *flags], stderr=theirs, stdout=subprocess.PIPE, cwd=ROOT, env=environment)
    os.close(theirs)
    reader.join()
    assert done.returncode == 0, shown.decode()
    lines = re.findall(r"encode mono: 0\.\d\d GB of text, \d of 3 inputs finished", shown.decode())
    assert lines[-1] == "encode mono: 0.01 GB of text, 3 of 3 inputs finished"
    assert len(set(lines)) > 1


def test_elsewhere_the_first_member_tells_the_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.progress._PLAIN_SECONDS", 0)
    folder = SharedWork.begin(tmp_path)
    first, second = SharedWork(folder, 0), SharedWork(folder, 1)
    second.finish("en-000")
    second.report(30_000_000, 2, "mono")
    second.report(20_000_000, 2, "mono")
    assert capsys.readouterr().err == ""
    first.report(950_000_000, 2, "mono")
    assert capsys.readouterr().err == "encode mono: 1.00 GB of text, 1 of 2 inputs finished\n"

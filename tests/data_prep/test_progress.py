"""What `encode` tells while it works: a line that changes on a terminal, plain lines elsewhere."""

import io
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.encode.encode import EncodeConfig, run
from data_prep.encode.shared_work import SharedWork
from data_prep.parallel import run_tasks
from data_prep.progress import StatusLine, print_stderr

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
    lines = re.findall(r"encode mono: \d+ MB of text, \d of 3 inputs finished", shown.decode())
    assert lines[-1] == "encode mono: 12 MB of text, 3 of 3 inputs finished"
    assert len(set(lines)) > 1


def test_elsewhere_the_first_worker_tells_the_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.progress._SECONDS_BETWEEN_LINES", 0)
    folder = SharedWork.begin(tmp_path)
    first, second = SharedWork(folder, 0), SharedWork(folder, 1)
    second.finish("en-000")
    second.report(30_000_000, 2, "mono")
    second.report(20_000_000, 2, "mono")
    assert capsys.readouterr().err == ""
    first.report(950_000_000, 2, "mono")
    assert capsys.readouterr().err == "encode mono: 1.00 GB of text, 1 of 2 inputs finished\n"


def test_both_sides_of_pairs_are_text_that_is_encoded(
    vocab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.4 MB, most of it on the second side."""
    monkeypatch.setattr("data_prep.progress._SECONDS_BETWEEN_LINES", 0)
    for code, words in (("en", "a" * 29), ("de", "b" * 109)):
        (tmp_path / f"X.de-en.{code}").write_text(f"{words}\n" * 10_000)
    run(EncodeConfig(vocab, tmp_path / "out", para=tmp_path, block_bytes=700_000))
    lines = [line for line in capsys.readouterr().err.splitlines() if "of text" in line]
    assert lines == [f"encode para: {size} MB of text, 0 of 1 inputs finished" for size in (1, 1)]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_no_terminal_ends_a_stage(
    encoding: str, vocab: Path, tmp_path: Path, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stdout has no sign for is written as Python would; the folder's name has some too."""
    for code in ("ru", "ja"):
        (tmp_path / "мир").mkdir(exist_ok=True)
        (tmp_path / "мир" / f"{code}.txt").write_text("\n\n".join(sentences * 20), encoding="utf-8")
    encoded, mixed = tmp_path / "мир" / "encoded", tmp_path / "мир" / "mixed"
    written = {}
    for stage, flags in (
        ("encode", f"--vocab {vocab} --mono {tmp_path}/мир --out {encoded}"),
        ("mix", f"--vocab {vocab} --encoded {encoded} --out {mixed} --mono-rows 8 --row-tokens 64"),
        ("show", f"--data {mixed} --rows 8"),
        ("stats", f"--encoded {encoded} --data {mixed} --out {mixed}"),
        ("verify", f"--data {mixed}"),
    ):
        terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", terminal)
        assert main([stage, *flags.split()]) == 0
        terminal.flush()
        assert isinstance(terminal.buffer, io.BytesIO)
        written[stage] = terminal.buffer.getvalue()
    for stage, word in (("encode", "мир"), ("show", "рождаются"), ("stats", "мир")):
        assert word.encode(encoding, "backslashreplace") in written[stage].replace(b" ", b"").replace(b"\n", b""), stage


def test_a_reader_that_has_ended_is_no_error_of_the_disk() -> None:
    """As in `xlme prep verify DIR | head`."""
    imports = (
        "from data_prep.progress import print_stdout\nfrom xlme_ds.io.stdout import guard_stdout\nguard_stdout()\n"
    )
    program = f"{imports}for number in range(20_000): print_stdout(f'line {{number}}')"
    writer = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None and writer.stderr is not None
    assert writer.stdout.readline() == "line 0\n"
    writer.stdout.close()
    assert (writer.wait(60), writer.stderr.read()) == (128 + signal.SIGPIPE, "")
    writer.stderr.close()


@pytest.mark.parametrize("visible", [True, False])
def test_a_terminal_shows_the_progress_of_tasks_that_are_visible(
    visible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run_tasks(abs, [1, -2], [1, 3], 1, "tasks", visible) == [1, 2]
    assert ("100%" in terminal.getvalue()) == ("tasks" in terminal.getvalue()) == visible


def test_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own, where stderr is no terminal."""
    times = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: times[-1])
    status = StatusLine()
    for seconds in (5, 10, 11, 19, 20, 21):
        times.append(seconds)
        status.show(lambda: f"at {times[-1]}")
    monkeypatch.undo()
    assert capsys.readouterr().err.splitlines() == ["at 10", "at 20"]


def test_a_line_on_stderr_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Python does not buffer: a socket keeps each write apart."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(theirs.fileno(), "wb", buffering=0, closefd=False) as raw:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, write_through=True))
        print_stderr("a line")
        assert ours.recv(100) == b"a line\n"

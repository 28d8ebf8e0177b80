"""Commands whose output cannot be written, and commands that find the variables of another job's launcher."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch import ROOT, distributed, environment, free_port
from tests.rows import train_vocabulary, write_data
from xlme_ds import run_commands
from xlme_ds.run_commands import run

COMMANDS = (
    "--help", "--version", "prep --help", "prep mix --help", "pretrain --help", "pretrain --help-all",
    "finetune --help", "launch --help", "evaluate --help", "config --recipe quickstart", "plan --recipe base_zero1",
)  # fmt: skip


def sh(line: str, **variables: object) -> tuple[int, str]:
    """The exit code of a line of bash, and its stderr."""
    done = subprocess.run(
        ["bash", "-c", line.replace("xlme ", f"{sys.executable} -W ignore -m xlme_ds ")],
        cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_output_that_cannot_be_written(command: str) -> None:
    code, errors = sh(f"xlme {command} > /dev/full")
    assert (code, errors) == (1, "error: stdout cannot be written: No space left on device\n")
    code, errors = sh(f"xlme {command} | true; exit ${{PIPESTATUS[0]}}")
    assert (code, errors) == (128 + signal.SIGPIPE, "")
    assert sh(f"xlme {command} >&-") == (0, "")


def test_a_step_that_a_signal_ends_has_the_shells_exit_code() -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        kill = f"kill -{int(number)} $$"
        with pytest.raises(SystemExit) as left:
            run(["bash", "-c", kill], os.environ, quiet=True)
        assert left.value.code == sh(f"bash -c '{kill}'; exit $?")[0] == 128 + number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_to_stop_reaches_the_command(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may end well; where it is ignored, as under nohup, it reaches nobody."""
    ours, theirs = list[int](), list[int]()

    def wait() -> int:
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        os.kill(os.getpid(), number)
        return 0

    process = SimpleNamespace(wait=wait, send_signal=theirs.append)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: process)
    interrupt, before = signal.getsignal(signal.SIGINT), signal.getsignal(number)
    try:
        signal.signal(number, handler := lambda number, _: ours.append(number))
        with pytest.raises(SystemExit) as left:
            run(["true"], os.environ)
        assert left.value.code == 128 + number and (ours, theirs) == ([], [number])
        assert signal.getsignal(number) == handler and signal.getsignal(signal.SIGINT) == interrupt
        signal.signal(number, signal.SIG_IGN)
        run(["true"], os.environ)
        assert (ours, theirs) == ([], [number]) and signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_signal_while_the_command_starts_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    popen, processes = subprocess.Popen, list[int]()

    def interrupted(*arguments: Any, **settings: Any) -> "subprocess.Popen[bytes]":
        os.kill(os.getpid(), signal.SIGTERM)
        process = popen(*arguments, **settings)
        processes.append(process.pid)
        os.kill(os.getpid(), signal.SIGUSR1)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(SystemExit) as left:
        run(["sleep", "100"], os.environ)
    assert left.value.code == 128 + signal.SIGTERM and not Path(f"/proc/{processes[0]}").exists()


def test_a_steps_output_goes_to_its_log_or_is_dropped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its errors are in the log too, and are not dropped; the command itself comes first."""
    words = ["bash", "-c", "echo out; echo err >&2"]
    said = "$ bash -c 'echo out; echo err >&2'\n"
    with open(tmp_path / "log", "wb") as log:
        run(words, os.environ, log=log)
    assert (tmp_path / "log").read_text() == f"{said}out\nerr\n" and tuple(capfd.readouterr()) == ("", "")
    run(words, os.environ, quiet=True)
    assert tuple(capfd.readouterr()) == (said, "err\n")


def test_a_command_that_cannot_start_leaves_the_handlers() -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(FileNotFoundError):
        run(["/nowhere/command"], os.environ)
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_command_has_none_of_a_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*run_commands.LAUNCHER_VARIABLES, "LOCAL_SIZE", "TORCHELASTIC_USE_AGENT_STORE"]
    for name in (*names, "MINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PATH", "/a:/b")
    monkeypatch.setenv("PYTHONPATH", ":/first")
    theirs = run_commands.child_environment()
    assert not theirs.keys() & set(names) and theirs["MINE"] == "1" and theirs["PYTHONSAFEPATH"] == "1"
    assert theirs["PATH"] == f"{Path(sys.executable).parent}:/a:/b"
    assert theirs["PYTHONPATH"] == f"/first:{ROOT}", "and no empty place, which is the current folder"
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:/other")
    assert run_commands.child_environment()["PYTHONPATH"] == f"{ROOT}:/other", "nor a place twice"
    with monkeypatch.context() as patch:
        patch.delenv("PATH")  # as under `srun --export=NONE`
        assert run_commands.child_environment()["PATH"] == f"{Path(sys.executable).parent}:{os.defpath}"
    with pytest.raises(SystemExit) as left:
        run(["bash", "-c", "exit 3"], theirs | {"PATH": os.environ["PATH"] + ":/bin:/usr/bin"}, quiet=True)
    assert left.value.code == 3


def test_a_closed_stdout_is_no_file_of_ours(tmp_path: Path) -> None:
    """The first file that a program opens would have its number."""
    code = (
        "from xlme_ds.io.stdout import guard_stdout; guard_stdout(); import os\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w'); print('for nobody'); os.write(1, b'nor this')"
    )
    assert sh(f'{sys.executable} -c "{code}" >&-') == (0, "")
    assert (tmp_path / "file").read_text() == ""


def test_a_closed_stderr_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "mono").mkdir()
    (tmp_path / "mono/de.txt").write_text("ein Satz, noch ein Satz und ein Absatz\n")
    command = f"{sys.executable} -m data_prep vocab --mono {tmp_path}/mono --size 24 --out {tmp_path}/vocab"
    assert sh(f"{command} 2>&-")[0] == 0
    assert (tmp_path / "vocab/manifest.json").exists()


def test_a_program_that_a_command_starts_can_print_to_a_closed_stdout() -> None:
    code = (
        "from xlme_ds.io.stdout import guard_stdout; guard_stdout(); import subprocess\n"
        "raise SystemExit(subprocess.run(['bash', '-c', 'echo for nobody']).returncode)"
    )
    assert sh(f'{sys.executable} -c "{code}" >&-') == (0, "")


def test_deepspeed_warns_of_no_cpu() -> None:
    variables = {name: value for name, value in environment().items() if name != "DS_ACCELERATOR"}
    code = (
        "import logging\nfrom xlme_ds.config import EngineConfig\n"
        "from xlme_ds.engine.ranks import start_process_group\n"
        "start_process_group(EngineConfig()); logging.getLogger('DeepSpeed').warning('another')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert [line.rpartition("] ")[2] for line in done.stdout.splitlines()] == ["another"], done.stdout


def test_variables_of_another_launcher_do_not_silence_a_command() -> None:
    code, errors = sh("xlme plan --recipe none", **distributed(1, 2, free_port()))
    assert code == 2 and "there is no recipe 'none': choose one of" in errors


def test_a_run_that_waits_for_processes_that_nobody_started(tmp_path: Path) -> None:
    """Under the variables of a job that has ended; train.watchdog_minutes bounds the wait."""
    vocabulary = train_vocabulary(tmp_path / "vocab")
    write_data(tmp_path / "mixed", rows=8, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    words = f"--recipe quickstart --data {tmp_path}/mixed --out {tmp_path}/run --model.vocabulary {vocabulary.size}"
    process = subprocess.Popen(
        [sys.executable, "-m", "xlme_ds.pretrain", *words.split()], cwd=ROOT,
        env=environment(**distributed(0, 2, free_port())), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = next(line for line in process.stderr if "waits for the others of 2 at 127.0.0.1:" in line)
    process.kill()
    process.communicate()
    assert said.endswith("unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT\n")

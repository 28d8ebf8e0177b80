"""DeepSpeed's extensions have a folder of ours: what a killed process left there holds nobody up, two processes do not
meet in it."""

import fcntl
import io
import os
import signal
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from tests.launch import Python
from xlme_ds.engine.deepspeed_compat import _take_lock

# As DeepSpeed does it: torch's own `load`, looked up where it is called.
LOAD = """
import sys
from xlme_ds.engine.deepspeed_compat import loading_extensions
print("started", file=sys.stderr, flush=True)
with loading_extensions():
    print("news of building")
    from torch.utils.cpp_extension import load
    module = load(name="answer", sources=[sys.argv[1]], verbose=False)
print("answer", module.answer())
"""
SOURCE = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "answer", "", -1, methods};
PyMODINIT_FUNC PyInit_answer() { return PyModule_Create(&module); }
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def load(source: Path) -> Python:
    return Python(["-c", LOAD, str(source)], TORCH_EXTENSIONS_DIR=source.parent / "extensions")


def end(process: Python) -> str:
    out, err = process.communicate(timeout=120)  # a lock that is waited for is waited for without end
    assert (process.returncode, out) == (0, "answer 42\n"), err
    return err


def wait_for(folder: Path, pattern: str) -> Path:
    deadline = time.monotonic() + 120
    while not (found := list(folder.glob(pattern))):
        assert time.monotonic() < deadline, f"no {pattern} in {folder}"
        time.sleep(0.005)
    return found[0]


def test_a_process_that_is_killed_while_it_compiles_holds_nobody_up(source: Path) -> None:
    first = load(source)
    lock = wait_for(source.parent, "extensions/**/lock")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert lock.exists(), "torch leaves it"
    both = [load(source), load(source)]  # at the same time: one compiles
    said = "".join(map(end, both))
    assert said.count(f"compiling answer in {lock.parent}") == 1 and not lock.exists()
    assert "compiling" not in end(load(source))


def test_compilers_of_a_killed_process_are_waited_for(source: Path) -> None:
    """They outlive it and the lock that it held, and two must not write the same files."""
    compiler, log = source.parent / "bin" / "slow", source.parent / "log"
    compiler.parent.mkdir()
    compiles = f'echo begins >>{log}\nsleep 2\nc++ "$@"\ncode=$?\necho ends >>{log}\nexit $code'
    compiler.write_text(f'#!/bin/bash\ncase " $* " in *" -c "*) ;; *) exec c++ "$@" ;; esac\n{compiles}\n')
    compiler.chmod(0o755)
    slowly = dict(TORCH_EXTENSIONS_DIR=source.parent / "extensions", CXX=compiler)
    first = Python(["-c", LOAD, str(source)], **slowly)
    wait_for(source.parent, "log")
    first.send_signal(signal.SIGKILL)
    first.wait()
    end(Python(["-c", LOAD, str(source)], **slowly))
    words = log.read_text().split()
    assert words == ["begins", "ends"] * (len(words) // 2), words


def test_who_waits_for_another_process_says_so(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def release() -> None:
        """After the first line, and time for a second one."""
        deadline = time.monotonic() + 60
        while not errors.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)
        fcntl.flock(theirs, fcntl.LOCK_UN)

    with open(path, "w") as theirs, open(path, "w") as ours, redirect_stderr(io.StringIO()) as errors:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        releasing = threading.Thread(target=release)
        releasing.start()
        _take_lock(ours, patience=0.3)
        releasing.join()
    said = errors.getvalue()
    assert (
        said.startswith("waiting for a process of this or another run") and str(path) in said and said.count("\n") == 1
    )


def test_another_ninja_in_front_does_not_compile_anew(source: Path) -> None:
    """As where an environment's commands are called without activating it."""
    end(load(source))
    other = source.parent / "bin" / "ninja"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho called >&2\nexit 1\n")
    other.chmod(0o755)
    path = f"{other.parent}{os.pathsep}{os.environ['PATH']}"
    again = Python(["-c", LOAD, str(source)], TORCH_EXTENSIONS_DIR=source.parent / "extensions", PATH=path)
    assert "called" not in end(again)


def test_the_folder_is_ours_alone(source: Path) -> None:
    """Whoever else uses the folder that TORCH_EXTENSIONS_DIR names, for an extension of the same name: nothing there is
    touched."""
    theirs = source.parent / "extensions" / "answer" / "lock"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    end(load(source))
    assert theirs.exists()

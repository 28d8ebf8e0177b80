"""Tasks for test_parallel, importable by worker processes; run as a script it is one rank of an MPI run."""

import os
import signal
import sys
import time

from data_prep.parallel import TaskError, UserError, on_root, run_tasks


def square(number: int) -> int:
    return number * number


def fail_on(number: int) -> int:
    if number == 3:
        raise ValueError("task three does not like its input")
    if number == 5:
        raise KeyError("a mistake of ours")
    return number


def handler_of_interrupts(number: int) -> object:
    return signal.getsignal(signal.SIGINT)


def killed(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail_or_sleep(number: int) -> int:
    if number == 0:
        raise ValueError("the short one failed")
    time.sleep(600)
    return number


def work_for_long(number: int) -> None:
    os.write(1, b"works\n")
    time.sleep(600)
    os.write(1, b"lives\n")
    os._exit(1)


def process_of(number: int) -> int:
    return os.getpid()


def rank(numbers: list[int]) -> None:
    """One rank: prints what it got, in one write, so that the test sees every rank's view."""
    root = on_root(os.getpid)
    assert on_root(os.getpid) == root
    processes = on_root(lambda: run_tasks(process_of, numbers, numbers, 1, "test"))
    assert len(set(processes)) == 1 + len(set(processes) - {root}), "the root has a share of its own"
    try:
        got = on_root(lambda: run_tasks(fail_on, numbers, numbers, 1, "test"))
        first = f"got {got} {'root' if os.getpid() == root else 'other'}"
    except UserError as error:
        first = f"shared: {error}"
    except TaskError as error:
        first = f"ours: {str(error).splitlines()[-1]}"
    again = on_root(lambda: run_tasks(square, [1, 2], [1, 1], 1, "test"))  # nothing of a failure is left over
    try:
        on_root(lambda: fail_on(3))
    except UserError as error:
        os.write(1, f"{first}\nagain {again}\non root: {error}\n".encode())


if __name__ == "__main__":
    rank([int(number) for number in sys.argv[1:]])

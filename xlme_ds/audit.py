"""`xlme audit --run DIR --data DIR`, for a run that was trained with `--train.audit`.

Proves from the run's own records that every row up to its newest checkpoint was read by exactly one micro-batch of one
step that counts, with the tokens that the data hold. A step counts as it was done last: what a kill or a resume had
done again is left out.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import tyro

from .checkpoint.checkpoints import Checkpoints
from .checkpoint.state_files import read_state
from .cli import fail, program
from .data.order import StepPlan, phase_of, phases, plans_of
from .data.schema import TASKS
from .data.shards import RowStore
from .train.records import ATTEMPTS, AUDIT_FOLDER, audit_lines, row_checksums
from .train.run_folder import first_step
from .trained.settings import read_run_config

_SHOWN = 10


def main(arguments: list[str] | None = None) -> None:
    """Run the command; exit code 1 when a row is missing, was read twice or with other tokens."""
    try:
        faults, summary = tyro.cli(examine, prog=program("audit"), args=arguments)
    except (ValueError, OSError) as error:
        fail("xlme audit", error)
    for fault in faults[:_SHOWN]:
        print(fault)
    print(f"{len(faults)} faults in {summary}" if faults else f"{summary}: each once, with the tokens of the data")
    sys.exit(1 if faults else 0)


def examine(run: Path, data: tuple[Path, ...]) -> tuple[list[str], str]:
    """Check that a run read every row of its data exactly once: a sentence for every fault, and a summary.

    Args:
        run: Run folder.
        data: The mixed folder that it was trained on, or those of its phases.
    """
    newest, _ = Checkpoints(run, 1, 0).newest()
    if newest is None:
        raise ValueError(f"{run} has no usable checkpoint: name a run folder")
    if not (run / AUDIT_FOLDER / ATTEMPTS).exists():
        raise ValueError(f"{run / AUDIT_FOLDER} does not exist: only a run with --train.audit can be examined")
    steps = int(read_state(newest)["step"])
    config = read_run_config(run)
    settings, of_run = config.data, phases(config.data, 0.0)
    if len(of_run) != len(data):
        raise ValueError(f"{run} read {len(of_run)} folders, --data names {len(data)}: name them all")
    first = first_step(config)
    rows = settings.mono_rows, settings.para_rows
    read = _read_rows(run / AUDIT_FOLDER, steps)
    faults, seen = [], []
    for number, task in enumerate(TASKS):
        if rows[number]:
            stores = [RowStore(folder / task) for folder in data]
            whole = StepPlan(rows, rows, 1, 1, settings.alternate)
            plans = plans_of(of_run, whole, [store.row_tokens for store in stores])
            of_steps = {
                step: numbers
                for step in range(first, steps)
                if (numbers := plans[phase_of(of_run, step)].step_rows(step, number))
            }
            faults += _compare(task, of_steps, read[task], {step: stores[phase_of(of_run, step)] for step in of_steps})
            seen.append(f"{sum(map(len, of_steps.values())):,} {task} rows")
    return faults, f"{' and '.join(seen)} of {steps - first} steps"


def _read_rows(folder: Path, steps: int) -> dict[str, dict[int, list[tuple[int, int]]]]:
    """By task and row: (step, checksum) of every reading that counts."""
    counting = np.zeros(steps, dtype=np.int64)  # by step the attempt
    for attempt, line in enumerate(audit_lines(folder / ATTEMPTS)):
        counting[line["start"] :] = attempt
    read: dict[str, dict[int, list[tuple[int, int]]]] = {task: defaultdict(list) for task in TASKS}
    for path in sorted(folder.glob("rank_*.jsonl")):
        for line in audit_lines(path):
            step = line["step"]
            if step < steps and line["attempt"] == counting[step]:
                for task, pieces in line["rows"].items():
                    for first, *sums in pieces:
                        for row, checksum in enumerate(sums, start=first):
                            read[task][row].append((step, checksum))
    return read


def _compare(
    task: str, of_steps: dict[int, range], read: dict[int, list[tuple[int, int]]], stores: dict[int, RowStore]
) -> list[str]:
    """`of_steps`: the rows of every step that reads some, in order; `stores`: where they are."""
    rows = {row for numbers in of_steps.values() for row in numbers}
    faults = [f"{task} row {row} was read though no step asks for it" for row in read if row not in rows]
    for step, numbers in of_steps.items():
        store = stores[step]
        expected = row_checksums(store.read(np.arange(numbers.start, numbers.stop) % store.rows).tokens)
        for row, checksum in zip(numbers, expected, strict=True):
            readings = read.get(row, [])
            if [read_in for read_in, _ in readings] != [step]:
                faults.append(f"{task} row {row} belongs to step {step}, was read in {[s for s, _ in readings]}")
            elif readings[0][1] != checksum:
                faults.append(f"{task} row {row} was read with other tokens than the data hold")
    return faults


if __name__ == "__main__":
    main()

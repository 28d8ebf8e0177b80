"""`xlme audit --run DIR --data DIR`, for a run that was trained with `--train.audit`.

Proves from the run's own records that its steps up to the newest checkpoint read each of their rows exactly once, in
the step that the row belongs to, with the tokens that the data hold. If a step was repeated, because the run was killed
and resumed, only its last attempt counts. Steps whose last attempt was made without `--train.audit` are left out.
"""

import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np

from .checkpoint.state_files import checkpoint_fault, read_state
from .checkpoint_names import checkpoints_of, require_run_folder
from .cli import call_command, program
from .data.loader import fingerprint_name
from .data.order import StepPlan, phase_index, phase_plans, phases
from .data.schema import TASKS
from .data.shards import RowStore
from .train.read_audit import ATTEMPTS, AUDIT_FOLDER, audit_lines, rank_file, row_checksums
from .train.run_folder import first_step
from .trained.config_json import read_run_config

_MAX_PRINTED = 10  # largest number of faults that are printed


def main(arguments: list[str] | None = None) -> None:
    """Run the command. The exit code is 1 if a row was not read, was read twice or was read with other tokens."""
    faults, summary = call_command(examine, program("audit"), arguments)
    for fault in faults[:_MAX_PRINTED]:
        print(fault)
    print(f"{len(faults)} faults in {summary}" if faults else f"{summary}: each was read once, with the data's tokens")
    sys.exit(1 if faults else 0)


def examine(run: Path, data: tuple[Path, ...]) -> tuple[list[str], str]:
    """Check that a run with --train.audit read every row that its steps ask for exactly once. If a run reads its data
    more than once, row numbers continue across passes.

    Args:
        run: Run folder.
        data: The data folder on which the run was trained; one folder for each phase, if it has several.

    Returns:
        A sentence for every fault, and a summary.
    """
    require_run_folder(run)
    newest = next((folder for folder in reversed(checkpoints_of(run)) if checkpoint_fault(folder) is None), None)
    if newest is None:
        raise ValueError(f"{run} has no usable checkpoint: name a run that has saved one")
    if not (run / AUDIT_FOLDER / ATTEMPTS).exists():
        raise ValueError(f"{run / AUDIT_FOLDER} does not exist: only a run with --train.audit can be examined")
    saved = read_state(newest)
    steps = int(saved["step"])
    config = read_run_config(run)
    run_phases = phases(config.data, mask_fraction=0.0)  # any fraction will do: it does not change the rows of a step
    if len(run_phases) != len(data):
        raise ValueError(f"{run} read {len(run_phases)} folders, but --data names {len(data)}: name all folders")
    start = first_step(asdict(config))
    rows_per_step = config.data.mono_rows, config.data.para_rows
    audited, readings = _last_readings(run / AUDIT_FOLDER, steps)
    audited_steps = [step for step in range(start, steps) if audited[step]]
    if not audited_steps:
        raise ValueError(f"{run} has {steps} steps, all without --train.audit: only steps with it can be examined")
    faults, row_counts = [], []
    for task_index, task in enumerate(TASKS):
        if rows_per_step[task_index]:
            stores = [RowStore(folder / task) for folder in data]
            for folder, phase, store in zip(data, run_phases, stores, strict=True):
                name, fingerprint = fingerprint_name(task, phase), store.manifest.fingerprint()
                if saved["fingerprints"].get(name, fingerprint) != fingerprint:  # it has only the phases that began
                    raise ValueError(
                        f"{folder} is not the data that {run} was trained on from step {phase.first_step} on: name the "
                        "folders of its --data in their order"
                    )
            # The plan is that of a single rank, because the rows of a step do not depend on the number of ranks.
            plan = StepPlan(rows_per_step, rows_per_step, 1, 1, config.data.alternate)
            plans = phase_plans(run_phases, plan, [store.row_tokens for store in stores])
            step_rows = {
                step: row_range
                for step in audited_steps
                if (row_range := plans[phase_index(run_phases, step)].step_rows(step, task_index))
            }
            step_stores = {step: stores[phase_index(run_phases, step)] for step in step_rows}
            faults += _compare(task, step_rows, step_stores, readings[task])
            row_counts.append(f"{sum(map(len, step_rows.values())):,} {task} rows")
    left_out = steps - start - len(audited_steps)
    note = f" (--train.audit was off in {left_out} more)" if left_out else ""
    return faults, f"{' and '.join(row_counts)} of {len(audited_steps)} steps{note}"


def _last_readings(folder: Path, steps: int) -> tuple[np.ndarray, dict[str, dict[int, list[tuple[int, int]]]]]:
    """Returns (bool [steps], whether a step's last attempt was recorded; readings). The readings are, by task and row
    number, a (step, checksum) for each time that the row was read. If a step was attempted several times, only its last
    attempt counts."""
    last_attempts = np.full(steps, -1)  # by step, the index of the last attempt; -1 if that attempt was not recorded
    attempts = dict(enumerate(audit_lines(folder / ATTEMPTS, ("start", "world", "audit"))))
    for attempt, line in attempts.items():
        if line:
            # An attempt is one start of the run, which takes or repeats the steps from `start` on.
            last_attempts[line["start"] :] = attempt if line["audit"] else -1
    ranks = max((attempts[attempt]["world"] for attempt in set(last_attempts.tolist()) - {-1}), default=0)
    for path in (rank_file(folder, rank) for rank in range(ranks)):
        if not path.exists():
            raise ValueError(f"{path} does not exist, which has the rows that a process read: restore it")
    readings: dict[str, dict[int, list[tuple[int, int]]]] = {task: defaultdict(list) for task in TASKS}
    for path in sorted(folder.glob("rank_*.jsonl")):
        for line in filter(None, audit_lines(path, ("attempt", "step", "rows"))):
            step = line["step"]
            if not attempts.get(line["attempt"]):  # it was whole: a start that writes only half of it does no step
                raise ValueError(
                    f"the line of start {line['attempt'] + 1} in {folder / ATTEMPTS} is damaged, so it is not known "
                    "which steps were done again: restore the file"
                )
            if step < steps and line["attempt"] == last_attempts[step]:
                for task, row_ranges in line["rows"].items():
                    for first_row, *checksums in row_ranges:
                        for row, checksum in enumerate(checksums, start=first_row):
                            readings[task][row].append((step, checksum))
    return last_attempts >= 0, readings


def _compare(
    task: str,
    step_rows: dict[int, range],
    step_stores: dict[int, RowStore],
    readings: dict[int, list[tuple[int, int]]],
) -> list[str]:
    """A sentence for every row of a task that was not read exactly once, in its step, with the tokens of the data.

    For each step that reads rows of the task, `step_rows` has the row numbers and `step_stores` the data that hold the
    rows. `readings` is the task's entry in the readings that `_last_readings` returns.
    """
    expected_rows = {row for row_range in step_rows.values() for row in row_range}
    faults = [f"{task} row {row} was read though no step asks for it" for row in readings if row not in expected_rows]
    for step, row_range in step_rows.items():
        store = step_stores[step]
        checksums = row_checksums(store.read(np.arange(row_range.start, row_range.stop) % store.rows).tokens)
        for row, checksum in zip(row_range, checksums, strict=True):
            row_readings = readings.get(row, [])
            steps_read_in = [step_read_in for step_read_in, _ in row_readings]
            if steps_read_in != [step]:
                faults.append(f"{task} row {row} belongs to step {step}, but was read in steps {steps_read_in}")
            elif row_readings[0][1] != checksum:
                faults.append(f"{task} row {row} was read with other tokens than the data hold")
    return faults


if __name__ == "__main__":
    main()

"""`xlme audit --run DIR --data DIR`, for a run that was trained with `--train.audit`.

Proves from the run's own records that its steps up to the newest checkpoint read each of their rows exactly once, in
the step that the row belongs to, with the tokens that the data hold. If a step was repeated, because the run was killed
and resumed, only its last attempt counts. Steps whose last attempt was made without `--train.audit` are left out.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
    attempts = list(audit_lines(run / AUDIT_FOLDER / ATTEMPTS, ("start", "world", "audit")))
    last_attempts = _last_attempts(attempts, steps)
    audited_steps = [step for step in range(start, steps) if last_attempts[step] >= 0]
    if not audited_steps:
        raise ValueError(f"{run} has {steps} steps, all without --train.audit: only steps with it can be examined")
    expected: dict[str, dict[int, _StepRows]] = {}
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
            expected[task] = {
                step: _StepRows(stores[number], row_range)
                for step in audited_steps
                if (row_range := plans[number := phase_index(run_phases, step)].step_rows(step, task_index))
            }
    faults = _read_in_other_steps(run / AUDIT_FOLDER, attempts, last_attempts, expected)
    for task, by_step in expected.items():
        for step, step_rows in by_step.items():
            faults += step_rows.faults(task, step)
    row_counts = [
        f"{sum(len(rows.rows) for rows in by_step.values()):,} {task} rows" for task, by_step in expected.items()
    ]
    left_out = steps - start - len(audited_steps)
    note = f" (--train.audit was off in {left_out} more)" if left_out else ""
    return faults, f"{' and '.join(row_counts)} of {len(audited_steps)} steps{note}"


class _StepRows:
    """The rows that a step asks for of one task, and how they were read. It holds arrays, because a run may read
    hundreds of millions of rows."""

    def __init__(self, store: RowStore, rows: range):
        self.store = store
        self.rows = rows  # row numbers
        self.times = np.zeros(len(rows), dtype=np.uint8)  # how often each row was read in this step
        self.checksums = np.zeros(len(rows), dtype=np.uint32)  # of the tokens that were read last

    def note_reading(self, row: int, checksum: int) -> None:
        index = row - self.rows.start
        self.times[index] += 1
        self.checksums[index] = checksum

    def faults(self, task: str, step: int) -> Iterator[str]:
        """A sentence for every row that was not read exactly once, with the tokens of the data."""
        tokens = self.store.read(np.arange(self.rows.start, self.rows.stop) % self.store.rows).tokens
        for index in np.flatnonzero((self.times != 1) | (self.checksums != row_checksums(tokens))).tolist():
            if self.times[index] == 1:
                yield f"{task} row {self.rows[index]} was read with other tokens than the data hold"
            else:
                yield f"{task} row {self.rows[index]} of step {step} was read {self.times[index]} times in that step"


def _last_attempts(attempts: list[dict[str, Any]], steps: int) -> np.ndarray:
    """The last attempt at each step, int64 [steps]; -1 if it was made without --train.audit. `attempts`: the lines of
    the file of that name."""
    last_attempts = np.full(steps, -1)
    for attempt, line in enumerate(attempts):
        if line:
            # An attempt is one start of the run, which takes or repeats the steps from `start` on.
            last_attempts[line["start"] :] = attempt if line["audit"] else -1
    return last_attempts


def _read_in_other_steps(
    folder: Path, attempts: list[dict[str, Any]], last_attempts: np.ndarray, expected: dict[str, dict[int, _StepRows]]
) -> list[str]:
    """Note in `expected`, by task and step, which rows the last attempt at each step read. Returns a sentence for every
    row that was read in a step that does not ask for it."""
    ranks = max(attempts[attempt]["world"] for attempt in set(last_attempts.tolist()) - {-1})
    for path in (rank_file(folder, rank) for rank in range(ranks)):
        if not path.exists():
            raise ValueError(f"{path} does not exist, which has the rows that a process read: restore it")
    faults = []
    for path in sorted(folder.glob("rank_*.jsonl")):
        for line in filter(None, audit_lines(path, ("attempt", "step", "rows"))):
            step, attempt = line["step"], line["attempt"]
            if attempt >= len(attempts) or not attempts[attempt]:
                # The line was whole once: a start that writes only half of it does no step.
                raise ValueError(
                    f"the line of start {attempt + 1} in {folder / ATTEMPTS} is damaged, so it is not known which "
                    "steps were done again: restore the file"
                )
            if step < len(last_attempts) and attempt == last_attempts[step]:
                for task, row_ranges in line["rows"].items():
                    step_rows = expected.get(task, {}).get(step)
                    for first_row, *checksums in row_ranges:
                        for row, checksum in enumerate(checksums, start=first_row):
                            if step_rows is not None and row in step_rows.rows:
                                step_rows.note_reading(row, checksum)
                            else:
                                faults.append(f"{task} row {row} was read in step {step}, which does not ask for it")
    return faults


if __name__ == "__main__":
    main()

"""How many examples to sample where rows are packed: enough to fill the requested rows."""

from functools import partial
from typing import Any

import numpy as np

from data_prep.mix.mixed_rows import WINDOW, MixPlan, count_rows, with_total
from data_prep.parallel import run_tasks
from data_prep.store import Stage

_WINDOWS_A_TASK = 64
_ROUNDS = 20  # most refinements of the total


def enough_examples(plan: MixPlan, rows: int) -> MixPlan:
    """Set the plan's total to about as many examples as fill `rows` rows, by their mean length.

    Raises ValueError if --max-repeats makes that impossible.
    """
    order = plan.order
    groups = [group for group in zip(range(len(plan.tokens)), plan.tokens, order.examples, strict=True) if group[2]]
    limits = plan.sampling.limits(order.examples)
    if limits is not None:
        most = sum(limits[j] * tokens // examples for j, tokens, examples in groups) // plan.row_tokens
        if most < rows:
            raise ValueError(
                f"--{order.label}-rows is {rows:,}, but with --max-repeats {plan.sampling.max_repeats:g} the "
                f"{'pairs' if order.label == 'para' else 'texts'} fill {most:,} rows without gaps: raise it, or "
                "ask for fewer rows"
            )
    for _ in range(_ROUNDS):  # the shares under a bound depend on the total, and the total on the shares
        mean_tokens = sum(float(plan.order.shares[j]) * tokens / examples for j, tokens, examples in groups)
        total = int(rows * plan.row_tokens / mean_tokens) + 1  # nearly always enough, because packing leaves gaps
        total = min(total, sum(limits)) if limits is not None else total
        if total == plan.order.total:
            break
        plan = with_total(plan, total)
    return plan


def fill_rows(stage: Stage, plan: MixPlan, rows: int, processes: int) -> tuple[MixPlan, np.ndarray]:
    """Raise the plan's total until its examples pack into at least `rows` rows.

    Returns the plan, and the number of rows before each window [windows + 1].
    """
    while True:
        total = plan.order.total
        windows = -(-total // WINDOW)
        starts = range(0, windows, _WINDOWS_A_TASK)  # the first window of each task
        count = partial(_count_windows, stage, plan, windows)
        results = run_tasks(
            count,
            starts,
            [min(_WINDOWS_A_TASK, windows - start) for start in starts],
            processes,
            f"pack {plan.order.label}",
        )
        first_rows = np.cumsum([0] + [number for result in results for number in result["rows"]])
        if first_rows[-1] >= rows:
            return plan, first_rows
        plan = with_total(plan, int(total * 1.002 * rows / max(int(first_rows[-1]), 1)) + 1)


def _count_windows(stage: Stage, plan: MixPlan, windows: int, start: int) -> dict[str, Any]:
    """Count the rows of one task's windows, or read the counts that an interrupted run stored."""
    name = f"windows-{plan.order.total}-{start}"
    result = stage.task_result(name)
    if result is None:
        result = {"rows": count_rows(plan, start, min(start + _WINDOWS_A_TASK, windows))}
        stage.finish_task(name, result)
    return result

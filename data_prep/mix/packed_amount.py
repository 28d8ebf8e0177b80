"""Number of examples to sample where rows are packed: enough to fill the rows asked for."""

from functools import partial
from typing import Any

import numpy as np

from data_prep.mix.mixed_rows import WINDOW, MixPlan, count_rows, with_total
from data_prep.parallel import run_tasks
from data_prep.store import Stage

_WINDOWS_A_TASK = 64
_ROUNDS = 20


def enough_examples(plan: MixPlan, rows: int) -> MixPlan:
    """Sample about as many pairs as fill `rows` rows. Raises ValueError if --max-repeats makes that impossible."""
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
        mean = sum(float(plan.order.shares[j]) * tokens / examples for j, tokens, examples in groups)
        total = int(rows * plan.row_tokens / mean) + 1  # packing leaves gaps, so these nearly always suffice
        total = min(total, sum(limits)) if limits is not None else total
        if total == plan.order.total:
            break
        plan = with_total(plan, total)
    return plan


def fill_rows(stage: Stage, plan: MixPlan, rows: int, processes: int) -> tuple[MixPlan, np.ndarray]:
    """Sample as many pairs as pack into at least `rows` rows; (plan, rows before each window [windows + 1])."""
    while True:
        total = plan.order.total
        windows = -(-total // WINDOW)
        parts = range(0, windows, _WINDOWS_A_TASK)
        count = partial(_count_windows, stage, plan, windows)
        results = run_tasks(
            count,
            parts,
            [min(_WINDOWS_A_TASK, windows - part) for part in parts],
            processes,
            f"pack {plan.order.label}",
        )
        first_rows = np.cumsum([0] + [number for result in results for number in result["rows"]])
        if first_rows[-1] >= rows:
            return plan, first_rows
        plan = with_total(plan, int(total * 1.002 * rows / max(int(first_rows[-1]), 1)) + 1)


def _count_windows(stage: Stage, plan: MixPlan, windows: int, start: int) -> dict[str, Any]:
    name = f"windows-{plan.order.total}-{start}"
    result = stage.task_result(name)
    if result is None:
        result = {"rows": count_rows(plan, start, min(start + _WINDOWS_A_TASK, windows))}
        stage.finish_task(name, result)
    return result

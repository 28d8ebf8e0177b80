"""Chooses the number of examples to sample, so that they fill the requested number of packed rows."""

from functools import partial
from typing import Any

import numpy as np

from data_prep.mix.mixed_rows import WINDOW_SLOTS, MixPlan, packed_windows, with_total
from data_prep.store import Stage

_WINDOWS_PER_TASK = 64  # a window is `WINDOW_SLOTS` consecutive examples of the sampled order, packed together
_MAX_ROUNDS = 20  # rounds of refining the total


def with_enough_examples(plan: MixPlan, rows: int) -> MixPlan:
    """Returns a copy of the plan whose sampled examples, at their mean length, fill `rows` rows without gaps.

    Raises ValueError if --max-repeats allows too few examples.
    """
    order = plan.order
    # (index, number of tokens, number of examples) of each group with text
    groups = [(j, plan.tokens[j], examples) for j, examples in enumerate(order.examples) if examples]
    limits = plan.sampling.limits(order.examples)  # the most examples that may be sampled from each group
    if limits is not None:
        possible_rows = sum(limits[j] * tokens // examples for j, tokens, examples in groups) // plan.row_tokens
        if possible_rows < rows:
            raise ValueError(
                f"--{order.task}-rows is {rows:,}, but with --max-repeats {plan.sampling.max_repeats:g} the "
                f"{'pairs' if order.task == 'para' else 'texts'} fill {possible_rows:,} rows without gaps: raise "
                "--max-repeats, or ask for fewer rows"
            )
    # With limits, the shares depend on the total, and the total on the shares. Repeat until the total stays the same.
    for _ in range(_MAX_ROUNDS):
        mean_tokens = sum(float(plan.order.shares[j]) * tokens / examples for j, tokens, examples in groups)
        # Nearly always enough: packing leaves gaps, so these examples take more than `rows` rows.
        total = int(rows * plan.row_tokens / mean_tokens) + 1
        total = min(total, sum(limits)) if limits is not None else total
        if total == plan.order.total:
            break
        plan = with_total(plan, total)
    return plan


def raise_total(stage: Stage, plan: MixPlan, rows: int, processes: int) -> tuple[MixPlan, np.ndarray]:
    """Raise the plan's total until its examples pack into at least `rows` rows.

    Returns (plan, rows_before). `rows_before` has the number of rows before each window, int64 [windows + 1]. Raises
    ValueError if --max-repeats allows too few examples.
    """
    while True:
        total = plan.order.total
        windows = -(-total // WINDOW_SLOTS)
        firsts = range(0, windows, _WINDOWS_PER_TASK)
        tasks = {f"windows-{total}-{first}": (first, min(first + _WINDOWS_PER_TASK, windows)) for first in firsts}
        sizes = [end - first for first, end in tasks.values()]
        results = stage.run_unfinished(partial(_count_rows, plan), tasks, sizes, processes, f"pack {plan.order.task}")
        rows_before = np.cumsum([0] + [window_rows for result in results for window_rows in result["rows"]])
        if rows_before[-1] >= rows:
            return plan, rows_before
        # Raise the total by the ratio of the rows wanted to the rows made, and by 0.2% more, so that one more round is
        # nearly always enough.
        try:
            plan = with_total(plan, int(total * 1.002 * rows / max(int(rows_before[-1]), 1)) + 1)
        except ValueError:  # more than --max-repeats allows: the folder must accept other settings
            stage.forget_settings()
            raise


def _count_rows(plan: MixPlan, windows: tuple[int, int]) -> dict[str, Any]:
    """Count the rows of each of the `windows` [first, end)."""
    return {"rows": [len(rows) for _, _, packed in packed_windows(plan, *windows) for rows in packed]}

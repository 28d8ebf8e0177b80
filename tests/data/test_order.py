"""The order as arithmetic: every row of a step once, whatever the cut; and the words for cuts that do not work."""

import re
from itertools import pairwise

import numpy as np
import pytest

from xlme_ds.config import DataConfig
from xlme_ds.data.order import plan_step


def divides(mono: int, para: int, micro_batch: int, world: int) -> bool:
    pieces = -(-max(mono, para) // (micro_batch * world)) * world
    return mono % pieces == para % pieces == 0


CUTS = [
    (*rows, micro_batch, world)
    for rows in ((32, 32), (64, 32), (16, 64), (32, 0), (0, 32))
    for micro_batch in (1, 2, 8, 16, 1000)
    for world in (1, 2, 4, 8)
    if divides(*rows, micro_batch, world)
]


@pytest.mark.parametrize(("mono", "para", "micro_batch", "world"), CUTS)
def test_every_row_of_a_step_is_read_once(mono: int, para: int, micro_batch: int, world: int) -> None:
    plan = plan_step(DataConfig(mono, para, micro_batch), world)
    for task, rows in enumerate((mono, para)):
        for step in (0, 1, 12345):
            numbers = [
                plan.row_numbers(step, rank, micro, task) for rank in range(world) for micro in range(plan.accumulation)
            ]
            assert {len(part) for part in numbers} == {rows // world // plan.accumulation}
            assert max(len(part) for part in numbers) <= micro_batch
            assert sorted(np.concatenate(numbers).tolist()) == list(range(step * rows, (step + 1) * rows))


@pytest.mark.parametrize(("micro_batch", "world"), [(2, 1), (2, 4), (8, 2)])
def test_tasks_in_turns(micro_batch: int, world: int) -> None:
    plan = plan_step(DataConfig(16, 16, micro_batch, alternate=True), world)
    assert plan.micro_batch_size == plan.rows_per_micro_batch[0] == plan.rows_per_micro_batch[1] <= micro_batch
    for step in range(6):
        for task in (0, 1):
            numbers = [
                plan.row_numbers(step, rank, micro, task) for rank in range(world) for micro in range(plan.accumulation)
            ]
            expected = range(step // 2 * 16, step // 2 * 16 + 16) if step % 2 == task else range(0)
            assert sorted(np.concatenate(numbers).tolist()) == list(expected) == list(plan.step_rows(step, task))


def test_micro_batches_hold_the_tasks_in_proportion() -> None:
    plan = plan_step(DataConfig(64, 16, micro_batch=8), 2)
    assert (plan.accumulation, plan.rows_per_micro_batch) == (4, (8, 2))


def test_a_micro_batch_is_one_stretch_of_rows() -> None:
    plan = plan_step(DataConfig(24, 0, micro_batch=4), 2)
    starts = [int(plan.row_numbers(3, rank, micro, 0)[0]) for micro in range(3) for rank in range(2)]
    assert starts[0] == 72 and all(b - a == 4 for a, b in pairwise(starts))


@pytest.mark.parametrize(
    ("data", "world", "words"),
    [
        (
            DataConfig(30, 0, 4),
            4,
            r"data\.mono_rows 30 cannot be divided among 4 processes: choose 32 rows, or",
        ),
        (
            DataConfig(20, 0, 4),
            2,
            r"data\.mono_rows 20 does not divide into 2 processes × 3 micro-batches.*choose 24 rows",
        ),
        (
            DataConfig(32, 12, 4),
            2,
            r"data\.para_rows 12 .*2 processes × 4 .* rows, which data\.mono_rows 32 needs: choose 16 rows",
        ),
        (DataConfig(7, 8, 4), 1, r"data\.mono_rows 7 does not divide into 1 process × 2 .* data\.para_rows 8 needs:"),
        (DataConfig(4, 4, 4), 8, r"data\.mono_rows 4 cannot be divided among 8 processes: .*choose 8 rows"),
    ],
)
def test_rows_that_do_not_divide(data: DataConfig, world: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_step(data, world)


@pytest.mark.parametrize("micro_batch", [1, 8, 16])
def test_the_advised_number_of_rows_divides(micro_batch: int) -> None:
    for world in (3, 7):
        for rows in (rows for rows in range(20, 200, 9) if not divides(rows, rows, micro_batch, world)):
            with pytest.raises(ValueError) as refused:
                plan_step(DataConfig(rows, rows, micro_batch), world)
            advised = int(re.findall(r"choose (\d+) rows", str(refused.value))[0])
            assert advised > rows and divides(advised, advised, micro_batch, world)

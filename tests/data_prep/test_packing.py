"""Best-fit decreasing packing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.mix.mixed_rows import pack, pack_shuffled
from data_prep.sampling import derive_key


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Loads of the bins of the textbook algorithm, quadratic."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(capacity - room for room in rooms)


@settings(deadline=None)
@given(
    st.integers(1, 60).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), min_size=1, max_size=80)))
)
def test_equals_the_textbook(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    bins, count = pack(np.array(lengths), capacity)
    assert sorted(set(bins.tolist())) == list(range(count))
    assert sorted(np.bincount(bins, weights=lengths).tolist()) == best_fit_decreasing(lengths, capacity)


@pytest.mark.parametrize("mean", [12, 25, 50, 100])
def test_rows_are_full_at_lengths_of_real_text(mean: int) -> None:
    rng = np.random.default_rng(mean)
    sides = np.clip(rng.lognormal(np.log(mean), 0.7, (8192, 2)).astype(int), 1, 254)
    lengths = sides.sum(1) + 3
    _, count = pack(lengths, 512)
    assert lengths.sum() / (512 * count) > 0.97


def test_shuffled_rows_hold_every_item_once_in_another_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    rows = pack_shuffled(lengths, 128, derive_key(0, "a"))
    assert sorted(np.concatenate(rows).tolist()) == list(range(2000))
    assert all(0 < lengths[row].sum() <= 128 for row in rows)
    longest = np.array([lengths[row].max() for row in rows])
    assert abs(np.corrcoef(np.arange(len(rows)), longest)[0, 1]) < 0.2, "rows with long items stand together"
    other = pack_shuffled(lengths, 128, derive_key(1, "a"))
    assert {tuple(row) for row in other} == {tuple(row) for row in rows}
    assert [tuple(row) for row in other] != [tuple(row) for row in rows]

"""Corruption: Philox by its published vectors, the number and spread of masks, and purity in (seed, task, row
number)."""

from itertools import pairwise, product

import numpy as np
import pytest
from scipy.stats import chi2

from tests.small import item, rows_of
from xlme_ds.data import masking as module
from xlme_ds.data.masking import draw_masks, masked_count, philox, row_bits
from xlme_ds.data.schema import BOS, EOS, UNK, Rows

KNOWN = [  # Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


# Of the first version, which sorted 64-bit words.
GOLDEN_WHERE = [12, 27, 29, 30, 34, 40, 69, 77]
GOLDEN_UNIFORMS = [2811964, 15899960, 15887023, 16071309, 14776968, 2960717, 13828849, 1296354]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def drawn(seed: int, *counter: int) -> tuple[int, ...]:
    return philox(*(np.uint64(word) for word in (*counter, seed)))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_known_answers(counter: str, key: str, result: str) -> None:
    low, high = words(key)
    assert drawn(low | high << 32, *words(counter)) == tuple(words(result))


def test_bits_of_rows() -> None:
    numbers = np.array([0, 5, 2**32, 2**45 + 7])
    for seed, task, column in ((1, 0, 0), (2**40 + 3, 1, 0xFFFFFFFF), (-1, 1, 3)):
        for number, bits in zip(numbers.tolist(), row_bits(numbers, seed, task, column).tolist(), strict=True):
            low, high, *_ = drawn(seed % 2**64, column, task, number % 2**32, number >> 32)
            assert bits == low | high << 32


def packed_rows(rng: np.random.Generator, count: int, width: int = 64) -> Rows:
    """Rows with several items each, `<unk>` among the tokens."""
    packed = []
    for _ in range(count):
        items = [
            item(rng, *sides)
            for sides in ((int(rng.integers(1, 20)), int(rng.integers(1, 20))), (1,), (int(rng.integers(0, 12)),))
        ]
        items[0][1] = UNK
        packed.append(items)
    return rows_of(packed, width)


def items_of(rows: Rows) -> list[list[range]]:
    """The columns of every item, by row."""
    lengths, found = iter(rows.lengths.tolist()), []
    for count in rows.item_counts.tolist():
        ends = np.cumsum([0, *(next(lengths) for _ in range(count))]).tolist()
        found.append([range(*two) for two in pairwise(ends)])
    return found


def picked(rows: Rows, which: list[int]) -> Rows:
    """Some of the rows, in this order."""
    of = np.split(rows.lengths, np.cumsum(rows.item_counts)[:-1])
    return Rows(rows.tokens[which], rows.item_counts[which], np.concatenate([of[n] for n in which]), rows.languages[:0])


def masked_of(rows: Rows, numbers: np.ndarray, seed: int = 1, task: int = 0) -> list[list[tuple[int, float]]]:
    """(column, uniform) of every masked position, by row."""
    where, uniforms = draw_masks([(task, rows, numbers)], seed, 0.15)
    found: list[list[tuple[int, float]]] = [[] for _ in rows.tokens]
    for flat, uniform in zip(where.tolist(), uniforms.tolist(), strict=True):
        row, column = divmod(flat, rows.tokens.shape[1])
        found[row].append((column, uniform))
    return found


def reference(rows: Rows, numbers: np.ndarray, seed: int, task: int) -> tuple[list[int], list[float]]:
    """The definition (docs/architecture.md), one token at a time."""
    where, uniforms = [], []
    for row, (number, items) in enumerate(zip(numbers.tolist(), items_of(rows), strict=True)):
        tokens = rows.tokens[row]
        words = [drawn(seed, column, task, number & 0xFFFFFFFF, number >> 32) for column in range(len(tokens))]
        chosen = []
        for inside in items:
            ranked = sorted((words[c][:2], c) for c in inside if tokens[c] > UNK)
            chosen += [c for _, c in ranked[: masked_count(len(ranked), 0.15)]]
        where += [row * len(tokens) + c for c in sorted(chosen)]
        uniforms += [(words[c][2] >> 8) / 2**24 for c in sorted(chosen)]
    return where, uniforms


def test_corruption_by_its_definition() -> None:
    rows = packed_rows(np.random.default_rng(4), 40)
    numbers = np.random.default_rng(5).integers(0, 2**45, 40)
    for seed, task in ((1, 0), (2**33 + 17, 1), (2**64 - 1, 1)):
        where, uniforms = draw_masks([(task, rows, numbers)], seed, 0.15)
        assert (where.tolist(), uniforms.tolist()) == reference(rows, numbers, seed, task)


@pytest.mark.parametrize("distinct", [1, 3, 40, 10_000])
@pytest.mark.parametrize("length", [1, 2, 19, 300])
@pytest.mark.parametrize("fraction", [0.01, 0.15, 0.6, 1.0])
def test_the_first_by_key_and_position(length: int, distinct: int, fraction: float) -> None:
    """Keys that are all alike, mostly, seldom and never."""
    rng = np.random.default_rng(length)
    keys = rng.integers(0, 2**64, distinct, dtype=np.uint64)[rng.integers(0, distinct, length)]
    ordinary = rng.random(length) < 0.9
    places = np.where(ordinary, keys >> np.uint64(57), 128).astype(np.uint8)
    chosen, tally = np.empty(length + 3, dtype=np.int64), np.empty(129, dtype=np.int64)
    done = module._choose(keys, places, 0, length, fraction, tally, chosen, 2)
    inside = np.flatnonzero(ordinary).tolist()
    first = sorted(inside, key=lambda c: (int(keys[c]), c))[: masked_count(len(inside), fraction)]
    assert chosen[2:done].tolist() == sorted(first)


def test_golden_corruption() -> None:
    """Runs of every version mask alike."""
    rows = packed_rows(np.random.default_rng(0), 2)
    where, uniforms = draw_masks([(1, rows, np.array([7, 2**32 + 7]))], 1, 0.15)
    assert where.tolist() == GOLDEN_WHERE
    assert (uniforms * 2**24).astype(int).tolist() == GOLDEN_UNIFORMS


def test_parts_of_several_tasks() -> None:
    first, second = (packed_rows(np.random.default_rng(n), 3) for n in (6, 7))
    numbers = np.arange(3) + 2**40
    together = draw_masks([(0, first, numbers), (1, second, numbers + 5)], 3, 0.15)
    alone = draw_masks([(0, first, numbers)], 3, 0.15), draw_masks([(1, second, numbers + 5)], 3, 0.15)
    assert together[0].tolist() == [*alone[0][0].tolist(), *(alone[1][0] + 3 * 64).tolist()]
    assert together[1].tolist() == [*alone[0][1].tolist(), *alone[1][1].tolist()]


def test_no_rows() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    rows = Rows(np.zeros((0, 8), dtype=np.int32), nothing, nothing, nothing)
    where, uniforms = draw_masks([(0, rows, nothing)], 1, 0.15)
    assert (len(where), where.dtype, len(uniforms), uniforms.dtype) == (0, np.int64, 0, np.float32)


def test_items_longer_than_the_row_are_refused() -> None:
    rows = Rows(np.full((1, 8), 50, dtype=np.int32), np.array([2]), np.array([5, 4]), np.array([0, 0]))
    with pytest.raises(ValueError, match="items of a row are empty or longer than the row: mix the data again"):
        draw_masks([(0, rows, np.zeros(1, dtype=np.int64))], 1, 0.15)


def test_exactly_the_fraction_of_ordinary_tokens_of_each_item() -> None:
    rows = packed_rows(np.random.default_rng(0), 200)
    tokens = rows.tokens
    where, uniforms = draw_masks([(0, rows, np.arange(200))], 1, 0.15)
    chosen = np.zeros(tokens.size, dtype=bool)
    chosen[where] = True
    chosen = chosen.reshape(tokens.shape)
    assert len(where) == chosen.sum() and (np.diff(where) > 0).all()
    assert not np.isin(tokens[chosen], [BOS, EOS, UNK, 1]).any()
    sizes = set()
    for row, items in enumerate(items_of(rows)):
        for inside in items:
            ordinary = int((tokens[row][inside] > UNK).sum())
            # Halves round up; an item without ordinary tokens has nothing to mask.
            expected = max(1, int(0.15 * ordinary + 0.5)) if ordinary else 0
            assert chosen[row][inside].sum() == expected
            sizes.add(ordinary)
    assert {0, 1} < sizes and max(sizes) > 30
    assert ((uniforms >= 0) & (uniforms < 1)).all() and uniforms.dtype == np.float32


def test_a_fraction_of_1_is_every_token_after_the_first_of_its_item() -> None:
    """`<unk>` is none to predict; the last of monolingual text is where it was cut. XLM's layout opens with `</s>`."""
    rows, numbers = packed_rows(np.random.default_rng(6), 20), np.arange(20)
    for task, opening in product((0, 1), (BOS, EOS)):
        for row, items in enumerate(items_of(rows)):
            rows.tokens[row, [inside[0] for inside in items]] = opening
        where, uniforms = draw_masks([(task, rows, numbers)], 1, 1.0)
        expected = [
            row * 64 + column
            for row, items in enumerate(items_of(rows))
            for inside in items
            for column in inside[1 : len(inside) - (task == 0)]
            if rows.tokens[row, column] != UNK
        ]
        assert where.tolist() == expected
        assert len(uniforms) == len(where)


def test_masked_count() -> None:
    ordinary = [0, 1, 3, 9, 10, 16, 17, 30, 510]
    assert [masked_count(n, 0.15) for n in ordinary] == [0, 1, 1, 1, 2, 2, 3, 5, 77]
    assert [masked_count(n, 0.99) for n in (1, 2, 3)] == [1, 2, 3]


def test_a_row_is_corrupted_alike_in_every_batch() -> None:
    """Alone, in another order, in another batch, and with other rows beside it."""
    rows = packed_rows(np.random.default_rng(1), 12)
    numbers = np.array([3, 700, 2**33 + 5, 12, 8, 9, 10, 11, 1, 0, 2**40, 4])
    whole = masked_of(rows, numbers)
    order = np.random.default_rng(2).permutation(12).tolist()
    assert masked_of(picked(rows, order), numbers[order]) == [whole[n] for n in order]
    for n in range(12):
        assert masked_of(picked(rows, [n]), numbers[[n]]) == [whole[n]]


@pytest.mark.parametrize("change", [{"seed": 2}, {"task": 1}, {"seed": 1 + 2**32}])
def test_seed_and_task_count(change: dict[str, int]) -> None:
    rows = packed_rows(np.random.default_rng(1), 6)
    assert masked_of(rows, np.arange(6)) != masked_of(rows, np.arange(6), **change)


def test_every_bit_of_the_row_number_counts() -> None:
    rows = picked(packed_rows(np.random.default_rng(1), 1), [0] * 64)
    found = masked_of(rows, np.array([0] + [1 << bit for bit in range(63)]))
    assert len({tuple(row) for row in found}) == 64


def test_positions_are_masked_uniformly() -> None:
    """Chi-square over the positions of an item in 4,000 rows, at 10^-4 either side; also over pairs of neighbours."""
    rows, ordinary = 4000, 40
    tokens = np.full((rows, ordinary + 2), 50, dtype=np.int32)
    tokens[:, 0], tokens[:, -1] = BOS, EOS
    items = Rows(tokens, np.ones(rows, dtype=np.int64), np.full(rows, ordinary + 2), np.zeros(rows, dtype=np.int64))
    where, uniforms = draw_masks([(0, items, np.arange(rows))], 5, 0.15)
    chosen = np.zeros(tokens.shape, dtype=bool)
    chosen.ravel()[where] = True
    counts = chosen.sum(0)[1:-1]
    expected = rows * 6 / ordinary
    # Without replacement the counts vary less than multinomial ones, by the factor (1 − 6/40) · 40/39.
    statistic = ((counts - expected) ** 2 / expected).sum() / ((1 - 6 / ordinary) * ordinary / (ordinary - 1))
    assert chi2.ppf(1e-4, ordinary - 1) < statistic < chi2.ppf(1 - 1e-4, ordinary - 1)
    together = (chosen[:, 1:-2] & chosen[:, 2:-1]).mean()
    assert abs(together - 6 * 5 / (40 * 39)) < 5 * (0.0192 / (rows * 39)) ** 0.5  # five standard errors
    bins = np.bincount((uniforms * 50).astype(int), minlength=50)
    statistic = ((bins - len(uniforms) / 50) ** 2 / (len(uniforms) / 50)).sum()
    assert chi2.ppf(1e-4, 49) < statistic < chi2.ppf(1 - 1e-4, 49)

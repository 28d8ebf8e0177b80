"""Corruption: Philox by its published vectors, the number and spread of masks, and purity in (seed, task, row number)."""

import numpy as np
import pytest
from scipy.stats import chi2

from tests.small import item, rows_of
from xlme_ds.data import corrupt as module
from xlme_ds.data.collate import item_layout
from xlme_ds.data.corrupt import corrupt, masked_count, philox
from xlme_ds.data.schema import BOS, EOS, UNK

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


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_known_answers(counter: str, key: str, result: str) -> None:
    c0, c1, c2, c3 = (np.array(word, dtype=np.uint64) for word in words(counter))
    k0, k1 = words(key)
    assert [int(word) for word in philox((c0, c1, c2, c3), (k0, k1))] == words(result)


def test_philox_broadcasts() -> None:
    many = philox((np.arange(5, dtype=np.uint64), np.uint64(1), np.uint64(2), np.uint64(3)), (4, 5))
    for n in range(5):
        one = philox((np.uint64(n), np.uint64(1), np.uint64(2), np.uint64(3)), (4, 5))
        assert [int(word[n]) for word in many] == [int(word) for word in one]


def packed_rows(rng: np.random.Generator, count: int, width: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segments of rows with several items each, `<unk>` among the tokens."""
    packed = []
    for _ in range(count):
        items = [
            item(rng, *sides)
            for sides in ((int(rng.integers(1, 20)), int(rng.integers(1, 20))), (1,), (int(rng.integers(0, 12)),))
        ]
        items[0][1] = UNK
        packed.append(items)
    rows = rows_of(packed, width)
    return rows.tokens, item_layout(rows, np.zeros(count, dtype=np.int64))[1]


def masked_of(
    tokens: np.ndarray, segments: np.ndarray, numbers: np.ndarray, seed: int = 1, task: int = 0
) -> list[list[tuple[int, float]]]:
    """(column, uniform) of every masked position, by row."""
    where, uniforms = corrupt(tokens, segments, numbers, seed, task, 0.15)
    found: list[list[tuple[int, float]]] = [[] for _ in tokens]
    for flat, uniform in zip(where.tolist(), uniforms.tolist(), strict=True):
        row, column = divmod(flat, tokens.shape[1])
        found[row].append((column, uniform))
    return found


def reference(
    tokens: np.ndarray, segments: np.ndarray, numbers: np.ndarray, seed: int, task: int, bits: int = 32
) -> tuple[list[int], list[float]]:
    """The definition (docs/design.md), one token at a time; `bits` of word 0 are kept."""
    where, uniforms = [], []
    for row, number in enumerate(numbers.tolist()):
        counters = [np.uint64(word) for word in (task, number & 0xFFFFFFFF, number >> 32)]
        key = seed & 0xFFFFFFFF, seed >> 32
        drawn = [[int(word) for word in philox((np.uint64(c), *counters), key)] for c in range(tokens.shape[1])]
        chosen = []
        for item_number in range(1, segments[row].max() + 1):
            inside = np.flatnonzero((segments[row] == item_number) & (tokens[row] > UNK)).tolist()
            ranked = sorted(inside, key=lambda c: (drawn[c][0] >> (32 - bits), drawn[c][1], c))
            chosen += ranked[: int(masked_count(np.array([len(inside)]), 0.15)[0])]
        where += [row * tokens.shape[1] + c for c in sorted(chosen)]
        uniforms += [(drawn[c][2] >> 8) / 2**24 for c in sorted(chosen)]
    return where, uniforms


@pytest.mark.parametrize("bits", [32, 6])  # with 6 most items have ties
def test_corruption_by_its_definition(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    class Coarse(module._Grid):
        def __init__(self, *arguments) -> None:  # type: ignore[no-untyped-def]
            super().__init__(*arguments)
            self.word0 = self.word0 & np.uint64(0xFFFFFFFF << (32 - bits) & 0xFFFFFFFF)

    monkeypatch.setattr(module, "_Grid", Coarse)
    tokens, segments = packed_rows(np.random.default_rng(4), 40)  # more than a block
    numbers = np.random.default_rng(5).integers(0, 2**45, 40)
    for seed, task in ((1, 0), (2**33 + 17, 1)):
        where, uniforms = corrupt(tokens, segments, numbers, seed, task, 0.15)
        assert (where.tolist(), uniforms.tolist()) == reference(tokens, segments, numbers, seed, task, bits)


def test_golden_corruption() -> None:
    """Runs of every version mask alike."""
    tokens, segments = packed_rows(np.random.default_rng(0), 2)
    where, uniforms = corrupt(tokens, segments, np.array([7, 2**32 + 7]), 1, 1, 0.15)
    assert where.tolist() == GOLDEN_WHERE
    assert (uniforms * 2**24).astype(int).tolist() == GOLDEN_UNIFORMS


def test_rows_of_several_tasks() -> None:
    tokens, segments = packed_rows(np.random.default_rng(6), 6)
    tasks, numbers = np.array([0, 1, 1, 0, 1, 0]), np.arange(6)
    together = corrupt(tokens, segments, numbers, 3, tasks, 0.15)
    alone = [
        corrupt(tokens[n : n + 1], segments[n : n + 1], numbers[n : n + 1], 3, int(tasks[n]), 0.15) for n in range(6)
    ]
    assert together[0].tolist() == [at + n * 64 for n, (where, _) in enumerate(alone) for at in where.tolist()]
    assert together[1].tolist() == [u for _, uniforms in alone for u in uniforms.tolist()]


def test_no_rows() -> None:
    nothing = np.zeros((0, 8), dtype=np.int64)
    where, uniforms = corrupt(nothing, nothing, np.zeros(0, dtype=np.int64), 1, 0, 0.15)
    assert (len(where), where.dtype, len(uniforms), uniforms.dtype) == (0, np.int64, 0, np.float32)


def test_exactly_the_fraction_of_ordinary_tokens_of_each_item() -> None:
    tokens, segments = packed_rows(np.random.default_rng(0), 200)
    where, uniforms = corrupt(tokens, segments, np.arange(200), 1, 0, 0.15)
    chosen = np.zeros(tokens.size, dtype=bool)
    chosen[where] = True
    chosen = chosen.reshape(tokens.shape)
    assert len(where) == chosen.sum() and (np.diff(where) > 0).all()
    assert not np.isin(tokens[chosen], [BOS, EOS, UNK, 1]).any()
    sizes = set()
    for row in range(200):
        for segment in range(1, segments[row].max() + 1):
            inside = segments[row] == segment
            ordinary = int((inside & (tokens[row] > UNK)).sum())
            # Halves round up; an item without ordinary tokens has nothing to mask.
            expected = max(1, int(0.15 * ordinary + 0.5)) if ordinary else 0
            assert chosen[row][inside].sum() == expected
            sizes.add(ordinary)
    assert {0, 1} < sizes and max(sizes) > 30
    assert ((uniforms >= 0) & (uniforms < 1)).all() and uniforms.dtype == np.float32


def test_masked_count() -> None:
    ordinary = np.array([0, 1, 3, 9, 10, 16, 17, 30, 510])
    assert masked_count(ordinary, 0.15).tolist() == [0, 1, 1, 1, 2, 2, 3, 5, 77]
    assert masked_count(np.array([1, 2, 3]), 0.99).tolist() == [1, 2, 3]


def test_a_row_is_corrupted_alike_in_every_batch() -> None:
    """Alone, in another order, in another batch, and with other rows beside it."""
    tokens, segments = packed_rows(np.random.default_rng(1), 12)
    numbers = np.array([3, 700, 2**33 + 5, 12, 8, 9, 10, 11, 1, 0, 2**40, 4])
    whole = masked_of(tokens, segments, numbers)
    order = np.random.default_rng(2).permutation(12)
    shuffled = masked_of(tokens[order], segments[order], numbers[order])
    assert shuffled == [whole[n] for n in order]
    for n in range(12):
        assert masked_of(tokens[n : n + 1], segments[n : n + 1], numbers[n : n + 1]) == [whole[n]]


@pytest.mark.parametrize("change", [{"seed": 2}, {"task": 1}, {"seed": 1 + 2**32}])
def test_seed_and_task_count(change: dict[str, int]) -> None:
    tokens, segments = packed_rows(np.random.default_rng(1), 6)
    numbers = np.arange(6)
    assert masked_of(tokens, segments, numbers) != masked_of(tokens, segments, numbers, **change)


def test_every_bit_of_the_row_number_counts() -> None:
    tokens, segments = (np.repeat(part, 64, axis=0) for part in packed_rows(np.random.default_rng(1), 1))
    found = masked_of(tokens, segments, np.array([0] + [1 << bit for bit in range(63)]))
    assert len({tuple(row) for row in found}) == 64


def test_positions_are_masked_uniformly() -> None:
    """Chi-square over the positions of an item in 4,000 rows, at 10^-4 either side; also over pairs of neighbours."""
    rows, ordinary = 4000, 40
    tokens = np.full((rows, ordinary + 2), 50)
    tokens[:, 0], tokens[:, -1] = BOS, EOS
    where, uniforms = corrupt(tokens, np.ones_like(tokens), np.arange(rows), 5, 0, 0.15)
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

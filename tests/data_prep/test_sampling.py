"""Temperature sampling, apportionment, keyed permutations and the sampled order."""

from dataclasses import replace
from fractions import Fraction
from hashlib import blake2b
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.sampling import SampledOrder, SmallestHashes, _mix64, derive_key, keyed_hash, permute
from data_prep.shares import Sampling, apportion, bound_shares, temperature_shares


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 17, 1000, 65537])
def test_permutation_is_a_bijection(size: int) -> None:
    index = np.arange(size)
    image = permute(index, size, derive_key(3, "x"))
    assert sorted(image.tolist()) == index.tolist()


def test_permutations_of_several_sizes_and_keys_at_once_equal_one_by_one() -> None:
    sizes, keys = np.array([7, 1000, 1, 2**40]), keyed_hash(derive_key(0, "k"), np.arange(4))
    index = np.array([6, 999, 0, 2**39 + 1])
    one_by_one = [int(permute(i, n, k)) for i, n, k in zip(index, sizes, keys, strict=True)]
    assert permute(index, sizes, keys).tolist() == one_by_one


def test_hashes_are_splitmix64s_of_keys_by_blake2b() -> None:
    """Its first outputs from 1234567, as Rosetta Code lists them; and a key by its definition."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    state = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert _mix64(state).tolist() == outputs
    assert keyed_hash(0, 1234567).tolist() == _mix64(_mix64(state[:1])).tolist()
    digest = blake2b(b'[7, "mono", "sides"]', digest_size=8).digest()
    assert derive_key(7, "mono", "sides") == int.from_bytes(digest, "little")


def test_orders_are_those_of_the_rows_that_were_written() -> None:
    """Else a mix that was interrupted before would be continued in another order."""
    assert permute(np.arange(10), 10, derive_key(3, "x")).tolist() == [4, 2, 0, 6, 9, 8, 5, 3, 7, 1]
    order = SampledOrder(("a", "b"), (5, 3), (7, 7), 1, "para", block_slots=4, max_stretch=2)
    language, example = order.locate(np.arange(14))
    assert "".join(map("ab".__getitem__, language)) == "baabababaabbab"
    assert example.tolist() == [2, 1, 0, 0, 4, 1, 2, 0, 3, 2, 1, 2, 1, 2]
    assert np.flatnonzero(order.swapped(np.arange(14))).tolist() == [1, 3, 5, 8, 10, 12, 13]


def test_permutations_look_random() -> None:
    """Every image of every index is about equally often met over keys; neighbours are not kept together."""
    size, keys = 6, 12000
    counts = np.zeros((size, size))
    for index in range(size):
        images = permute(index, size, keyed_hash(derive_key(1, "chi"), np.arange(keys)))
        counts[index] = np.bincount(images, minlength=size)
    chi_square = ((counts - keys / size) ** 2 / (keys / size)).sum()
    assert chi_square < 60  # 25 degrees of freedom: exceeded by chance once in 10,000 keys
    image = permute(np.arange(10000), 10000, derive_key(0, "far"))
    assert abs(np.corrcoef(np.arange(10000), image)[0, 1]) < 0.05
    assert (np.abs(np.diff(image)) < 10).mean() < 0.01


def test_shares_follow_the_formula() -> None:
    examples, alpha = [1000, 10, 0, 1], 0.7
    shares = [float(share) for share in temperature_shares(examples, alpha)]
    weights = [1000**0.7, 10**0.7, 0.0, 1.0]
    assert shares == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-12)
    assert temperature_shares([5, 0, 7], 0.0) == [Fraction(1, 2), 0, Fraction(1, 2)]
    with pytest.raises(ValueError, match=r"alpha is 1\.5"):
        temperature_shares(examples, 1.5)


def test_apportion_is_exact_and_within_one() -> None:
    examples = [3, 100, 977, 12345, 1]
    for total in (0, 1, 7, 1000, 10**9 + 7):
        shares = temperature_shares(examples, 0.7)
        quotas = apportion(total, shares)
        assert sum(quotas) == total
        assert all(abs(quota - total * share) < 1 for quota, share in zip(quotas, shares, strict=True))
    assert apportion(sum(examples), temperature_shares(examples, 1.0)) == examples
    assert apportion(2, [Fraction(1, 3)] * 3) == [1, 1, 0]  # equal remainders: the earlier entries


def sampled(examples: tuple[int, ...], alpha: float, total: int, **settings: int) -> SampledOrder:
    """The order of `total` slots, its languages called 0, 1, 2 …"""
    quotas = tuple(apportion(total, temperature_shares(examples, alpha)))
    names = tuple(map(str, range(len(examples))))
    return SampledOrder(names, examples, quotas, **{"seed": 0, "task": "mono", **settings})


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(
    ("total", "block_slots", "max_stretch"), [(977, 64, 1), (3000, 512, 5), (200_000, 1 << 14, 16)]
)
def test_every_example_comes_once_before_any_comes_again(
    total: int, block_slots: int, max_stretch: int, alpha: float
) -> None:
    """Counted along the slots, for languages that are used in part, several times, and of one example or none."""
    examples = (10, 0, 4, 1, 33, 350, 20_000)
    order = sampled(examples, alpha, total, block_slots=block_slots, max_stretch=max_stretch)
    language, example = order.locate(np.arange(total))
    assert np.bincount(language, minlength=len(examples)).tolist() == list(order.quotas)
    passes: list[int] = []
    for j, count in enumerate(examples):
        uses = example[language == j]
        for start in range(0, len(uses), max(count, 1)):
            one = uses[start : start + count]
            assert len(np.unique(one)) == len(one) and one.min() >= 0 and one.max() < count
        passes.append(len(uses) // max(count, 1))
    assert alpha or (min(passes) == 0 and max(passes) > 2)


def test_languages_keep_their_shares_all_along_the_order() -> None:
    """Uses up to a slot against the exact share: at the ends of blocks by rounding alone, inside by chance."""
    order = sampled((1_000_000, 300_000, 70_000, 5_000, 900, 40, 3, 1), 0.7, 100_000, block_slots=1024)
    language, _ = order.locate(np.arange(order.total))
    seen = np.cumsum(language[:, None] == np.arange(8), axis=0)
    share = np.array(order.quotas) / order.total
    off = seen - share * np.arange(1, order.total + 1)[:, None]
    assert np.abs(off[1023::1024]).max() < np.log2(order.total / 1024) + 1
    # k slots drawn from a block without putting back have a standard deviation of at most √(1024/4 · p(1−p))
    assert (np.abs(off) < 5 * np.sqrt(256 * share * (1 - share)) + 8).all()


def test_which_side_comes_first_is_drawn_by_the_seed() -> None:
    """A coin for each slot: half of them, others under another seed, and as often the same as two coins are."""
    order, slots = SampledOrder(("a",), (9,), (10_000,), 0, "para"), np.arange(10_000)
    draws = [replace(order, seed=seed).swapped(slots) for seed in (0, 1, 2)]
    for one, other in combinations([*draws, np.zeros(10_000, bool)], 2):
        assert abs(int((one == other).sum()) - 5000) < 250  # five standard deviations
    assert (order.swapped(slots[::-1]) == draws[0][::-1]).all()


def test_a_rare_language_may_come_anywhere() -> None:
    """The slot of a language's single use, over seeds: not the same, and in no part of the order more often."""
    at = []
    for seed in range(100):
        order = SampledOrder(("a", "b", "c"), (999, 1, 1), (998, 1, 1), seed, "mono", block_slots=256)
        at += np.flatnonzero(order.locate(np.arange(1000))[0] > 0).tolist()
    assert len(at) == 200
    counts = np.bincount(np.array(at) // 100, minlength=10)
    assert ((counts - 20) ** 2 / 20).sum() < 33.7  # 9 degrees of freedom: exceeded once in 10,000


def test_every_pass_and_seed_has_its_own_order() -> None:
    """A pass is 17 blocks of 59, of whose examples one in 17 is expected in the same block of another pass or seed."""
    order = SampledOrder(("a",), (1003,), (3 * 1003,), 0, "mono", block_slots=59, max_stretch=3)
    passes = []
    for each in (order, replace(order, seed=1)):
        for uses in each.locate(np.arange(3 * 1003))[1].reshape(3, 1003):
            assert sorted(uses.tolist()) == list(range(1003))
            passes.append([set(part.tolist()) for part in uses.reshape(17, 59)])
    for one, other in combinations(passes, 2):
        assert sum(len(a & b) for a, b in zip(one, other, strict=True)) < 3 * 1003 / 17
    last = order.examples_of_uses(
        np.zeros(9, np.int64), np.arange(1, 10) * 1003 - 1
    )  # 1003 is no multiple of 3: the rest of a pass
    assert len(set(last.tolist())) > 5


def test_what_a_block_reads_stands_together_and_is_shuffled() -> None:
    """Examples of a block, sorted, are stretches; their order in the block, and that of stretches in a pass, is not
    theirs."""
    order = sampled((50_000, 400_000), 0.0, 80_000, block_slots=8192, max_stretch=32)
    language, example = order.locate(np.arange(order.total))
    for j in (0, 1):
        uses = example[language == j]
        for begin in range(0, len(uses), 4096):
            here = uses[begin : begin + 4096]
            assert (np.diff(np.sort(here)) != 1).sum() <= len(
                here
            ) / 32 + 3  # those cut by the block's ends, or the pass's
            assert abs(np.corrcoef(np.arange(len(here)), here)[0, 1]) < 0.1
        stretches = uses.reshape(-1, 1000).mean(1)
        assert abs(np.corrcoef(np.arange(len(stretches)), stretches)[0, 1]) < 0.5


def test_few_slots_take_examples_from_many_places() -> None:
    """50 uses of each language in less than a block: at least 16 stretches, which are of three examples."""
    order = sampled((100_000, 30_000), 0.0, 100, block_slots=1 << 18, max_stretch=327)
    language, example = order.locate(np.arange(order.total))
    for j in (0, 1):
        assert (np.diff(np.sort(example[language == j])) > 1).sum() >= 15


@pytest.mark.parametrize(("examples", "fewest", "most"), [(100, 1, 1), (101, 5, 17)])
def test_only_a_sample_of_less_than_half_of_the_examples_is_spread(examples: int, fewest: int, most: int) -> None:
    """50 uses in less than a block. Half of the examples: one stretch of 50, as in a whole block. Less than half:
    stretches of 3 (50 // 16), of which neighbours may join."""
    example = sampled((examples,), 1.0, 50, block_slots=1 << 18, max_stretch=50).locate(np.arange(50))[1]
    around = np.sort(example)
    assert fewest <= (np.diff(around, append=around[0] + examples) > 1).sum() <= most


def test_order_of_any_part_is_the_part_of_the_order_and_depends_on_seed_and_label() -> None:
    order = sampled((1000, 50, 7), 0.5, 2400, block_slots=512, max_stretch=4)
    whole = order.locate(np.arange(order.total))
    some = np.random.default_rng(0).permutation(order.total)[:300]
    for slots in (np.arange(700, 900), some, np.array([2399]), np.array([], dtype=np.int64)):
        assert all((p == w[slots]).all() for p, w in zip(order.locate(slots), whole, strict=True))
    for other in (replace(order, seed=1), replace(order, task="para")):
        changed = other.locate(np.arange(order.total))
        assert other.quotas == order.quotas and (changed[1] != whole[1]).mean() > 0.8
        assert (changed[0] != whole[0]).mean() > 0.2
    assert 0.4 < order.swapped(np.arange(order.total)).mean() < 0.6


def shares_of(examples: dict[str, int], total: int, share: tuple[str, ...] = (), repeats: float = 0) -> list[Fraction]:
    return Sampling(0.5, share, repeats).shares(list(examples), list(examples.values()), total)


def test_set_shares_and_the_others_by_the_formula() -> None:
    """alpha 0.5: roots of 4, 9, 16 and 1; `sw` has its share, `xh` and `yo` divide theirs as 3 to 1."""
    examples = {"de": 16, "en": 4, "sw": 100, "xh": 9, "yo": 1}
    shares = shares_of(examples, 1000, ("sw=0.1", "yo+xh=1/4"))
    rest = Fraction(65, 100)
    assert shares == [rest * 4 / 6, rest * 2 / 6, Fraction(1, 10), Fraction(3, 16), Fraction(1, 16)]
    assert sum(shares) == 1
    assert shares_of({"a": 5, "b": 7}, 9, ("a=0.25", "b=0.75")) == [Fraction(1, 4), Fraction(3, 4)]
    assert shares_of({"a": 5, "b": 7, "c": 7}, 9, ("a=0",)) == [0, Fraction(1, 2), Fraction(1, 2)]
    assert shares_of({"a": 0, "b": 7}, 9, ("a=0", "b=1")) == [0, 1], "a language without text may have no share"
    assert shares_of(examples, 1000) == temperature_shares(list(examples.values()), 0.5)


def test_what_a_full_language_leaves_goes_to_the_others() -> None:
    """By hand, of 100 uses with at most two of each example."""
    # a wants 50 and may have 20; of its 30, b (40) gets 24 and c (10) gets 6
    assert bound_shares(100, [Fraction(n, 10) for n in (5, 4, 1)], [20, 90, 90], [0, 0, 0], 2) == [
        Fraction(n, 100) for n in (20, 64, 16)
    ]
    # then b is full with 60: its 4 go to c
    assert bound_shares(100, [Fraction(n, 10) for n in (5, 4, 1)], [20, 60, 90], [0, 0, 0], 2) == [
        Fraction(n, 100) for n in (20, 60, 20)
    ]
    # b and c have a share together: what b leaves is c's, until that is full, and then a's, though d has a set share
    shares, groups = [Fraction(n, 10) for n in (4, 2, 1, 3)], [0, 1, 1, 2]
    for limit, expected in ((90, (40, 5, 25, 30)), (20, (45, 5, 20, 30))):
        found = bound_shares(100, shares, [90, 5, limit, 90], groups, 2)
        assert found == [Fraction(n, 100) for n in expected]
    # where a is full too, d gives up its set share
    assert bound_shares(100, shares, [40, 5, 20, 90], groups, 2)[3] == Fraction(35, 100)


COUNTS = st.lists(st.integers(0, 400), min_size=1, max_size=12).filter(any)


@settings(max_examples=200, deadline=None)
@given(COUNTS, st.integers(1, 3000), st.floats(0, 1), st.sampled_from([0.5, 1.0, 1.7, 8.0]), st.booleans())
def test_no_language_is_used_more_often_than_the_bound(
    counts: list[int], total: int, alpha: float, repeats: float, pinned: bool
) -> None:
    """And all is used; a language below its bound has no less than without one, and those of one line keep their
    proportions."""
    names = [str(number) for number in range(len(counts))]
    share = ("0=0.3",) if pinned and counts[0] and any(counts[1:]) else ()
    sampling = Sampling(alpha, share, repeats)
    free = Sampling(alpha, share).shares(names, counts, total)
    limits = [int(Fraction(str(repeats)) * count) for count in counts]
    if sum(limits) < total:
        with pytest.raises(ValueError, match=r"with --max-repeats .* all languages together give only"):
            sampling.shares(names, counts, total)
        return
    shares = sampling.shares(names, counts, total)
    quotas = apportion(total, shares)
    assert sum(quotas) == total and all(quota <= limit for quota, limit in zip(quotas, limits, strict=True))
    below = [j for j, (part, limit) in enumerate(zip(shares, limits, strict=True)) if part * total < limit]
    assert all(shares[j] >= free[j] for j in below)
    raised = {shares[j] / free[j] for j in below if free[j] and not (share and j == 0)}
    assert len(raised) <= 1
    if len(below) == len([count for count in counts if count]):
        assert shares == free


@pytest.mark.parametrize(
    ("share", "repeats", "words"),
    [
        (("de",), 0, "--share de: write languages or pairs and a share from 0 to 1"),
        (("de=x",), 0, "--share de=x: write"),
        (("de=1/0",), 0, "--share de=1/0: write"),
        (("de=1.2",), 0, "--share de=1.2: write"),
        (("de+=0.2",), 0, r"--share de\+=0.2: write"),
        (("de=0.2", "en+de=0.1"), 0, "--share names de 2 times: name each language or pair once"),
        (("de=0.2", "de=0.1"), 0, "--share names de 2 times: name each language or pair once"),
        (
            ("de=0.6", "en=0.4"),
            0,
            "sum to 1, which leaves nothing for the other languages: lower the shares, or name all",
        ),
        (("de+en+sw=0.6",), 0, "sum to 0.6 and no other language has text: make them sum to 1"),
        (("xx=0.1",), 0, "--share xx=0.1 has no text that fills a row"),
        (("en+sw+de=0.9989",), 0, r"sum to 0\.9989 and no other language has text: make them sum to 1"),
        (("sw=0",), 1.5, "1,000 examples are asked for, but .* all languages together give only 29: raise"),
        (
            (),
            1.5,
            "1,000 examples are asked for, but with --max-repeats 1.5 all languages together give only 42: raise",
        ),
    ],
)
def test_shares_that_cannot_be_had(share: tuple[str, ...], repeats: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shares_of({"de": 9, "en": 11, "sw": 9, "xx": 0}, 1000, share, repeats)


@pytest.mark.parametrize(
    "lines",
    [
        ("a=.3333333", "b=.3333333", "c=.3333333"),
        ("a=.333", "b+c=.667"),
        ("a=.3334", "b=.3333", "c=.3334"),
        ("a=.333", "b=.333", "c=.333"),  # a thousandth less than 1, just what is allowed
        ("a=.334", "b=.3335", "c=.3335"),  # and a thousandth more
    ],
)
def test_shares_that_are_rounded_are_a_whole(lines: tuple[str, ...]) -> None:
    shares = Sampling(0.7, lines).shares(["a", "b", "c"], [5, 50, 50], 30)
    assert sum(shares) == 1 and [float(share) for share in shares] == pytest.approx([1 / 3] * 3, abs=1e-3)
    with pytest.raises(ValueError, match=r"sum to 1\.001, which leaves nothing"):
        Sampling(0.7, ("a=.3333333", "b=.3333333", "c=.3343334")).shares(["a", "b", "c", "d"], [5, 50, 50, 9], 30)


def test_the_least_hashes_are_found_with_all_that_repeat_them() -> None:
    """Of all batches together, however they are cut."""
    hashes = np.random.default_rng(0).integers(0, 40, 1000).astype(np.uint64)
    bound = np.unique(hashes)[9]  # of ten
    for size in (1, 7, 400):
        least = SmallestHashes(10)
        is_small = np.concatenate([least.add(hashes[i : i + size]) for i in range(0, 1000, size)])
        assert is_small[hashes <= bound].all() and least.limit >= bound
        assert least.limit < 39, "and not all are held"

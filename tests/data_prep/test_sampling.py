"""Temperature sampling, apportionment, keyed permutations and the sampled order."""

from fractions import Fraction

import numpy as np
import pytest

from data_prep.permutation import hashed, inverse, key_of, permute
from data_prep.sampling import Order, apportion, temperature_shares


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 17, 1000, 65537])
def test_permutation_is_a_bijection_with_its_inverse(size: int) -> None:
    index = np.arange(size)
    image = permute(index, size, key_of(3, "x"))
    assert sorted(image.tolist()) == index.tolist()
    assert (inverse(image, size, key_of(3, "x")) == index).all()


def test_permutations_of_several_sizes_and_keys_at_once_equal_one_by_one() -> None:
    sizes, keys = np.array([7, 1000, 1, 2**40]), hashed(key_of(0, "k"), np.arange(4))
    index = np.array([6, 999, 0, 2**39 + 1])
    one_by_one = [int(permute(i, n, k)) for i, n, k in zip(index, sizes, keys, strict=True)]
    assert permute(index, sizes, keys).tolist() == one_by_one
    assert (inverse(permute(index, sizes, keys), sizes, keys) == index).all()


def test_permutations_look_random() -> None:
    """Every image of every index is about equally often met over keys; neighbours are not kept together."""
    size, keys = 6, 12000
    counts = np.zeros((size, size))
    for index in range(size):
        images = permute(index, size, hashed(key_of(1, "chi"), np.arange(keys)))
        counts[index] = np.bincount(images, minlength=size)
    chi_square = ((counts - keys / size) ** 2 / (keys / size)).sum()
    assert chi_square < 60  # 25 degrees of freedom: exceeded by chance once in 10,000 keys
    image = permute(np.arange(10000), 10000, key_of(0, "far"))
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


def test_order_uses_every_example_equally_often() -> None:
    examples, quotas = (10, 0, 4, 1), (25, 0, 4, 3)
    order = Order(("a", "b", "c", "d"), examples, temperature_shares(examples, 1.0), quotas, 0, "mono")
    language, example = order.locate(np.arange(order.total))
    assert np.bincount(language, minlength=4).tolist() == list(quotas)
    for j, quota in enumerate(quotas):
        times = np.bincount(example[language == j], minlength=examples[j])
        assert len(times) == examples[j]
        if quota:
            assert times.min() == quota // examples[j] and times.max() == -(-quota // examples[j])


def test_every_pass_has_its_own_order() -> None:
    order = Order(("a",), (100,), (Fraction(1),), (200,), 0, "mono")
    slots = inverse(np.arange(200), 200, key_of(0, "mono", "slots"))
    first, second = order.locate(slots)[1].reshape(2, 100)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(100))
    assert (first == second).mean() < 0.1


def test_order_of_any_part_is_the_part_of_the_order_and_depends_on_seed_and_label() -> None:
    examples, quotas = (1000, 50), (2000, 400)
    shares = temperature_shares(examples, 0.5)
    order = Order(("a", "b"), examples, shares, quotas, 0, "mono")
    whole, part = order.locate(np.arange(order.total)), order.locate(np.arange(700, 900))
    assert all((p == w[700:900]).all() for p, w in zip(part, whole, strict=True))
    for other in (
        Order(("a", "b"), examples, shares, quotas, 1, "mono"),
        Order(("a", "b"), examples, shares, quotas, 0, "para"),
    ):
        assert (other.locate(np.arange(order.total))[1] != whole[1]).mean() > 0.9
    assert abs(np.corrcoef(np.arange(order.total), whole[0])[0, 1]) < 0.1, "languages are not spread over the order"
    assert 0.4 < order.swapped(np.arange(order.total)).mean() < 0.6

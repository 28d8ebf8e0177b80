"""VoCap's allocation: how many pieces each language gets, and how the languages' pieces are merged."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

Pieces = dict[str, float]  # piece -> natural logarithm of its probability
# A point (number of pieces, ALP) for each vocabulary of a language, the smallest vocabulary first. The smallest one has
# only the characters. ALP is the mean log-probability of a sentence.
Curve = Sequence[tuple[int, float]]


def concave_hull(curve: Curve) -> list[tuple[int, float]]:
    """The points of the curve's upper concave hull, up to the highest ALP."""
    hull: list[tuple[int, float]] = []
    for size, alp in sorted(curve):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], (size, alp)):
            hull.pop()
        hull.append((size, alp))
    while len(hull) > 1 and hull[-1][1] <= hull[-2][1]:
        hull.pop()
    return hull


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def hull_steps(curves: Mapping[str, Curve], weights: Mapping[str, float], step_size: int) -> list[tuple[str, int, int]]:
    """The steps along the hulls of all `curves`, by falling gain per piece. Each is (language, size before the step,
    size after the step), and adds at most `step_size` pieces.

    The gain is the language's weight times the slope of its hull. A language's steps stay in order, because the slopes
    of a hull fall; steps of equal gain are sorted by language, then by size.
    """
    ranked = []
    for language in sorted(curves):
        for left, right in pairwise(concave_hull(curves[language])):
            gain = weights[language] * _slope(left, right)
            starts = range(left[0], right[0], step_size)
            ranked += [(-gain, language, start, min(start + step_size, right[0])) for start in starts]
    return [(language, start, stop) for _, language, start, stop in sorted(ranked)]


def allocate(
    orders: Mapping[str, Sequence[str]],
    curves: Mapping[str, Curve],
    weights: Mapping[str, float],
    step_size: int,
    size: int,
) -> dict[str, int]:
    """For each language, the number n of pieces that it gets: the first n in its order. Together the languages get
    `size` different pieces.

    `orders` holds each language's pieces as `piece_order` sorts them. Every language gets all its characters. Raises
    ValueError if the characters alone are more than `size`, or if all pieces together are fewer than `size`.
    """
    sizes = {language: min(curves[language])[0] for language in orders}
    union = {piece for language, order in orders.items() for piece in order[: sizes[language]]}
    if len(union) > size:
        raise ValueError(
            f"--size leaves room for {size} pieces, but the characters of {len(orders)} languages are {len(union)}: "
            "take a larger --size, or lower --character-coverage"
        )
    for language, start, stop in hull_steps(curves, weights, step_size):
        for piece in orders[language][start:stop]:
            if len(union) == size:
                return sizes
            union.add(piece)
            sizes[language] += 1
    if len(union) < size:
        raise ValueError(
            f"--size leaves room for {size} pieces, but the curves end at {len(union)}: take a smaller --size, "
            "a larger --largest, or more text"
        )
    return sizes


def piece_order(nested: Sequence[Pieces]) -> list[str]:
    """The pieces of the largest vocabulary, sorted so that each vocabulary of `nested` (smallest first) is a prefix.

    The pieces that a vocabulary adds to the next smaller one are sorted by falling probability.
    """
    order: dict[str, None] = {}
    for pieces in nested:
        order |= dict.fromkeys(sorted(pieces.keys() - order.keys(), key=lambda piece: (-pieces[piece], piece)))
    return list(order)


def pool_probabilities(vocabularies: Mapping[str, Pieces], weights: Mapping[str, float]) -> Pieces:
    """The pieces of all vocabularies with the logarithms of their pooled probabilities, the likeliest first.

    The probabilities of each language are first scaled to a sum of 1. A piece's pooled probability is the mean of its
    probabilities in all languages, weighted by `weights`; it is 0 in a language without this piece.
    """
    pooled: dict[str, float] = {}
    total = sum(weights[language] for language in vocabularies)
    for language in sorted(vocabularies):
        pieces = vocabularies[language]
        mass = math.fsum(math.exp(score) for score in pieces.values())
        for piece, score in pieces.items():
            pooled[piece] = pooled.get(piece, 0.0) + weights[language] / total * math.exp(score) / mass
    return {piece: math.log(pooled[piece]) for piece in sorted(pooled, key=lambda piece: (-pooled[piece], piece))}

"""The languages' chosen vocabularies as one.

A piece's probability is pooled: p(x) = Σ_i w_i p_i(x), with p_i the probabilities of language i's vocabulary over its
chosen pieces and w_i its weight in the objective, that is the unigram model of a text drawn with those weights.
"""

import math
from collections.abc import Mapping, Sequence

from data_prep.vocap.model import Pieces


def piece_order(nested: Sequence[Pieces]) -> list[str]:
    """All pieces such that every vocabulary of `nested` (by rising size) is a start of the list.

    Between two vocabularies, the pieces of the larger one come by falling probability.
    """
    order: dict[str, None] = {}
    for pieces in nested:
        order |= dict.fromkeys(sorted(pieces.keys() - order.keys(), key=lambda piece: (-pieces[piece], piece)))
    return list(order)


def pool(vocabularies: Mapping[str, Pieces], weights: Mapping[str, float]) -> Pieces:
    """Pieces of all vocabularies by falling pooled probability, with its logarithm."""
    pooled: dict[str, float] = {}
    total = sum(weights[language] for language in vocabularies)
    for language in sorted(vocabularies):
        pieces = vocabularies[language]
        mass = math.fsum(math.exp(score) for score in pieces.values())
        for piece, score in pieces.items():
            pooled[piece] = pooled.get(piece, 0.0) + weights[language] / total * math.exp(score) / mass
    ranked = sorted(pooled.items(), key=lambda item: (-item[1], item[0]))
    return {piece: math.log(probability) for piece, probability in ranked}

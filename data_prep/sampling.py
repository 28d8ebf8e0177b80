"""Temperature sampling over languages, and the order of the sampled examples as a pure function of the seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from data_prep.permutation import hashed, key_of, permute


def temperature_shares(examples: Sequence[int], alpha: float) -> list[Fraction]:
    """p_j = m_j^alpha / sum_k m_k^alpha for m = `examples`; a language without examples has share 0.

    alpha 1 is the natural distribution, 0 the uniform one (Conneau & Lample, 2019, section 3.1). The shares are exact
    fractions of the rounded powers, so that apportioning them has no rounding of its own.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha is {alpha}: it must be between 0 (uniform) and 1 (natural distribution)")
    weights = [Fraction(float(m) ** alpha) if m else Fraction(0) for m in examples]
    total = sum(weights)
    return [weight / total if total else Fraction(0) for weight in weights]


def apportion(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Integers that sum to `total`, each `total * share` rounded down or up: the largest-remainder method.

    Equal remainders go to the earlier entry.
    """
    assert sum(shares) == 1, "there is something to share"
    exact = [total * share for share in shares]
    quotas = [int(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda j: (quotas[j] - exact[j], j))
    for j in by_remainder[: total - sum(quotas)]:
        quotas[j] += 1
    return quotas


@dataclass(frozen=True)
class Order:
    """The sampled examples in training order.

    Slot s of [0, total) is, through a keyed permutation, a use u of one language j; use u is an example of pass
    u // examples[j], and within a pass every example comes once, in a keyed order of its own.
    """

    names: tuple[str, ...]
    examples: tuple[int, ...]
    shares: tuple[Fraction, ...]
    quotas: tuple[int, ...]
    seed: int
    label: str

    @property
    def total(self) -> int:
        """Number of slots."""
        return sum(self.quotas)

    def locate(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(language, example) of each slot, int64; example is in [0, examples[language])."""
        last = np.cumsum(self.quotas)
        uses = permute(slots, self.total, key_of(self.seed, self.label, "slots"))
        language = np.searchsorted(last, uses, side="right")
        uses = uses - (last - self.quotas)[language]
        examples = np.array(self.examples)[language]
        keys = np.array([key_of(self.seed, self.label, name) for name in self.names])[language]
        return language, permute(uses % examples, examples, hashed(keys, uses // examples))

    def swapped(self, slots: np.ndarray) -> np.ndarray:
        """bool: whether the pair in this slot stands target side first."""
        return (hashed(key_of(self.seed, self.label, "sides"), slots) & np.uint64(1)).astype(bool)

"""The shares of languages and pairs in the sampled examples: set by temperature and --share, bounded by
--max-repeats."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_SUM_TOLERANCE = Fraction(1, 1000)  # error allowed in the sum of --share: three times 0.333 counts as 1


def temperature_shares(examples: Sequence[int], alpha: float) -> list[Fraction]:
    """p_j = m_j^alpha / sum_k m_k^alpha for each language j with m_j = `examples[j]`; 0 if m_j is 0.

    alpha 1 is the natural distribution, 0 the uniform one (Conneau & Lample, 2019, section 3.1). The powers are rounded
    floats, but each share is an exact fraction of their sum, so that the shares sum to exactly 1. Raises ValueError if
    alpha is not between 0 and 1.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha is {alpha}: it must be between 0 (uniform) and 1 (natural distribution)")
    weights = [Fraction(float(m) ** alpha) if m else Fraction(0) for m in examples]
    total = sum(weights)
    return [weight / total if total else Fraction(0) for weight in weights]


def apportion(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Divide `total` into one integer per share: `total * share`, rounded down or up so that all sum to `total`.

    The products with the largest remainders are rounded up; of two equal remainders, the earlier product comes first
    (largest-remainder method).
    """
    assert sum(shares) == 1, "the shares do not sum to 1"
    exact = [total * share for share in shares]
    quotas = [int(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda j: (quotas[j] - exact[j], j))
    for j in by_remainder[: total - sum(quotas)]:
        quotas[j] += 1
    return quotas


@dataclass(frozen=True)
class Sampling:
    """The settings that give each language (or pair) its share of the sampled examples.

    An entry of `share` is NAME=SHARE or NAME+NAME=SHARE. Together, the languages that it names get this share of all
    examples, which is divided among them by temperature `alpha`. The languages that no entry names divide the rest by
    `alpha`.

    With `max_repeats` r above 0, a language of m examples gives at most ⌊r · m⌋ examples. The excess of its share over
    this limit goes to languages below their own limits, in proportion to their shares: to those of its entry; else
    to those that no entry names; else to all others.
    """

    alpha: float
    share: tuple[str, ...] = ()
    max_repeats: float = 0.0

    def parse_entries(self) -> dict[tuple[str, ...], Fraction]:
        """The share of each entry, by the names in the entry. Raises ValueError for an entry of a wrong form, and for a
        repeated name."""
        entries = []
        for entry in self.share:
            names, _, number = entry.rpartition("=")
            try:
                share = Fraction(number)
                is_valid = all(names.split("+")) and 0 <= share <= 1
            except (ValueError, ZeroDivisionError):
                is_valid = False
            if not is_valid:
                raise ValueError(f"--share {entry}: write languages or pairs and a share from 0 to 1, as in sw+yo=0.02")
            entries.append((tuple(names.split("+")), share))
        for name, times in Counter(name for names, _ in entries for name in names).items():
            if times > 1:
                raise ValueError(f"--share names {name} {times} times: name each language or pair once")
        return dict(entries)

    def limits(self, examples: Sequence[int]) -> list[int] | None:
        """The largest number of examples that each language may give; None if `max_repeats` is 0. `examples` has the
        number of each language's examples."""
        bound = Fraction(str(self.max_repeats))
        return [int(bound * count) for count in examples] if bound else None

    def shares(self, names: Sequence[str], examples: Sequence[int], total: int | None = None) -> list[Fraction]:
        """The share of each language in `names`; `examples` has the number of each one's examples. `max_repeats` is
        applied only if `total`, the number of sampled examples, is given.

        Raises ValueError if an entry of `share` is malformed or has no text, if the entries leave too little or too
        much for the other languages, or if `total` is larger than the sum of all limits.
        """
        entries = self.parse_entries()
        number_of = {name: number for number, entry_names in enumerate(entries, 1) for name in entry_names}
        entry_numbers = [number_of.get(name, 0) for name in names]  # 0: no entry names the language
        sum_of_entries = sum(entries.values(), Fraction(0))
        has_others = any(count and not number for count, number in zip(examples, entry_numbers, strict=True))
        if not has_others and abs(sum_of_entries - 1) <= _SUM_TOLERANCE:
            entries = {entry_names: share / sum_of_entries for entry_names, share in entries.items()}
            sum_of_entries = Fraction(1)
        shares = [Fraction(0)] * len(names)
        for number, (entry_names, entry_share) in enumerate([((), 1 - sum_of_entries), *entries.items()]):
            members = [j for j in range(len(names)) if entry_numbers[j] == number]
            divided = temperature_shares([examples[j] for j in members], self.alpha)
            _check_entry(entry_names, entry_share, bool(sum(divided)))
            for j, share in zip(members, divided, strict=True):
                shares[j] = entry_share * share
        limits = self.limits(examples)
        if limits is None or not total:
            return shares
        return bound_shares(total, shares, limits, entry_numbers, self.max_repeats)


def _check_entry(names: tuple[str, ...], share: Fraction, has_text: bool) -> None:
    """Raise ValueError if the languages of an entry of --share cannot have its share. `names` is empty for the
    languages that no entry names; `has_text`: at least one of the languages has examples."""
    if not names and has_text and share <= 0:
        raise ValueError(
            f"the shares of --share sum to {float(1 - share):.10g}, which leaves nothing for the other languages: "
            "lower the shares, or name all languages"
        )
    if not names and not has_text and share != 0:
        raise ValueError(
            f"the shares of --share sum to {float(1 - share):.10g} and no other language has text: make them sum to 1"
        )
    if names and share and not has_text:
        raise ValueError(f"--share {'+'.join(names)}={float(share):g} has no text that fills a row")


def bound_shares(
    total: int, shares: Sequence[Fraction], limits: Sequence[int], entry_numbers: Sequence[int], max_repeats: float
) -> list[Fraction]:
    """`shares`, changed so that no language j has more than `limits[j]` of `total` examples. `Sampling` says which
    languages get the examples above a limit.

    `entry_numbers[j]` is the number of the entry of --share that names language j, from 1, or 0 if none does. Raises
    ValueError if the limits of all languages that have a share sum to less than `total`; the message quotes
    `max_repeats`.
    """
    amounts, full = [total * share for share in shares], set[int]()
    while over := [j for j, amount in enumerate(amounts) if amount > limits[j]]:
        full.update(over)
        free = [k for k, share in enumerate(shares) if share and k not in full]
        for j in over:
            same_entry = [k for k in free if entry_numbers[k] == entry_numbers[j]]
            takers = same_entry or [k for k in free if entry_numbers[k] == 0] or free
            if not takers:
                sum_of_limits = sum(limit for limit, share in zip(limits, shares, strict=True) if share)
                raise ValueError(
                    f"{total:,} examples are asked for, but with --max-repeats {max_repeats:g} all languages together "
                    f"give only {sum_of_limits:,}: raise --max-repeats, or ask for fewer rows"
                )
            excess, takers_share = amounts[j] - limits[j], sum(shares[k] for k in takers)
            amounts[j] = Fraction(limits[j])
            for k in takers:
                amounts[k] += excess * shares[k] / takers_share
    return [amount / total for amount in amounts]

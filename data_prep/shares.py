"""Shares of languages and pairs in the sampled examples: by temperature, by --share, and bounded by repeats."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_SUM_TOLERANCE = Fraction(1, 1000)  # error allowed in the sum of --share: three times 0.333 counts as 1


def temperature_shares(examples: Sequence[int], alpha: float) -> list[Fraction]:
    """p_j = m_j^alpha / sum_k m_k^alpha for each language j with m_j = `examples[j]`; 0 if m_j is 0.

    alpha 1 is the natural distribution, 0 the uniform one (Conneau & Lample, 2019, section 3.1). The powers are rounded
    floats, but the shares are exact fractions of these, so that they sum to exactly 1.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha is {alpha}: it must be between 0 (uniform) and 1 (natural distribution)")
    weights = [Fraction(float(m) ** alpha) if m else Fraction(0) for m in examples]
    total = sum(weights)
    return [weight / total if total else Fraction(0) for weight in weights]


def apportion(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Divide `total` into integers, each `total * share` rounded down or up, by the largest-remainder method.

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
class Sampling:
    """The settings that give each language (or pair) its share of the examples that are sampled.

    A line of `share` is NAME=SHARE or NAME+NAME=SHARE: these languages together have this share of all examples, and
    divide it by temperature `alpha`. The languages in no line divide the rest by `alpha`.

    With `max_repeats` r above 0, a language of m examples gives at most ⌊r · m⌋ examples. The rest of its share is
    divided among the languages of its line that can give more, in proportion to their shares; if none can, among the
    languages in no line that can; if none of these can either, among all languages that can.
    """

    alpha: float
    share: tuple[str, ...] = ()
    max_repeats: float = 0.0

    def set_shares(self) -> dict[tuple[str, ...], Fraction]:
        """The names in each line of `share`, and their common share. Raises ValueError for a line of another form, and
        for a repeated name."""
        shares: dict[tuple[str, ...], Fraction] = {}
        for line in self.share:
            names, _, number = line.rpartition("=")
            try:
                share = Fraction(number)
            except (ValueError, ZeroDivisionError):
                share = Fraction(-1)
            if not all(names.split("+")) or not 0 <= share <= 1:
                raise ValueError(f"--share {line}: write languages or pairs and a share from 0 to 1, as in sw+yo=0.02")
            shares[tuple(names.split("+"))] = share
        for name, times in Counter(name for line in self.share for name in line.rpartition("=")[0].split("+")).items():
            if times > 1:
                raise ValueError(f"--share names {name} {times} times: name it once")
        return shares

    def limits(self, examples: Sequence[int]) -> list[int] | None:
        """The most examples that each language may give, repeats included; None without a bound."""
        bound = Fraction(str(self.max_repeats))
        return [int(bound * count) for count in examples] if bound else None

    def shares(self, names: Sequence[str], examples: Sequence[int], total: int | None = None) -> list[Fraction]:
        """Each language's share of `total` examples; without a total, `max_repeats` is not applied.

        Raises ValueError where the lines of `share` leave too little or too much for the other languages, and where
        `total` exceeds all limits together.
        """
        set_shares = self.set_shares()
        number_of = {name: number for number, line_names in enumerate(set_shares, 1) for name in line_names}
        line_numbers = [number_of.get(name, 0) for name in names]  # 0: in no line
        set_total = sum(set_shares.values(), Fraction(0))
        has_others = any(count and not number for count, number in zip(examples, line_numbers, strict=True))
        if not has_others and abs(set_total - 1) <= _SUM_TOLERANCE:
            set_shares = {line_names: share / set_total for line_names, share in set_shares.items()}
            set_total = Fraction(1)
        shares = [Fraction(0)] * len(names)
        for number, (line_names, line_share) in enumerate([((), 1 - set_total), *set_shares.items()]):
            members = [j for j in range(len(names)) if line_numbers[j] == number]
            divided = temperature_shares([examples[j] for j in members], self.alpha)
            _check_line(line_names, line_share, bool(sum(divided)))
            for j, share in zip(members, divided, strict=True):
                shares[j] = line_share * share
        limits = self.limits(examples)
        if limits is None or not total:
            return shares
        return bound_shares(total, shares, limits, line_numbers, self.max_repeats)


def _check_line(names: tuple[str, ...], share: Fraction, has_text: bool) -> None:
    """Raise ValueError where the languages of a --share line cannot have their share. Empty `names`: the languages in
    no line."""
    if not names and has_text and share <= 0:
        raise ValueError(
            f"the shares of --share sum to {float(1 - share):.10g}, which leaves nothing for the other languages: "
            "lower them, or name all languages"
        )
    if not names and not has_text and share != 0:
        raise ValueError(
            f"the shares of --share sum to {float(1 - share):.10g} and no other language has text: make them sum to 1"
        )
    if names and share and not has_text:
        raise ValueError(f"--share {'+'.join(names)}={float(share):g}: it has no text that fills a row")


def bound_shares(
    total: int, shares: Sequence[Fraction], limits: Sequence[int], line_numbers: Sequence[int], max_repeats: float
) -> list[Fraction]:
    """Shares of `total` such that no language j has more than `limits[j]` examples; `Sampling` says who gets the rest.

    `line_numbers[j]` is the number of the --share line that names language j, 0 if none does. Raises ValueError where
    the limits of all languages that have a share sum to less than `total`; the message names `max_repeats`.
    """
    amounts, full = [total * share for share in shares], set[int]()
    while over := [j for j, amount in enumerate(amounts) if amount > limits[j]]:
        full.update(over)
        free = [k for k, share in enumerate(shares) if share and k not in full]
        for j in over:
            same_line = [k for k in free if line_numbers[k] == line_numbers[j]]
            takers = same_line or [k for k in free if line_numbers[k] == 0] or free
            if not takers:
                sum_of_limits = sum(limit for limit, share in zip(limits, shares, strict=True) if share)
                raise ValueError(
                    f"{total:,} examples are asked for, but with --max-repeats {max_repeats:g} all languages together "
                    f"give only {sum_of_limits:,}: raise it, or ask for fewer rows"
                )
            excess, takers_share = amounts[j] - limits[j], sum(shares[k] for k in takers)
            amounts[j] = Fraction(limits[j])
            for k in takers:
                amounts[k] += excess * shares[k] / takers_share
    return [amount / total for amount in amounts]

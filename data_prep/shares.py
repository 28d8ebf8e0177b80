"""Shares of languages and pairs, by temperature, by --share and bounded by repeats; and how they divide a total."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_SUM_TOLERANCE = Fraction(1, 1000)  # error allowed in the sum of set shares: three times 0.333 counts as 1


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

    `share` are lines NAME=SHARE or NAME+NAME=SHARE: those names together have that share of all, and divide it by
    `alpha`; all other languages divide the rest by `alpha`. With `max_repeats` r above 0, a language of m examples is
    used at most ⌊r · m⌋ times. The rest of its share goes to the other languages of its line; if they are full, to the
    languages of no line; if those are full too, to all. It is divided in proportion to the takers' shares.
    """

    alpha: float
    share: tuple[str, ...] = ()
    max_repeats: float = 0.0

    def set_shares(self) -> dict[tuple[str, ...], Fraction]:
        """Parse the lines of `share`. Raises ValueError for a line of another form, and for a repeated name."""
        parts: dict[tuple[str, ...], Fraction] = {}
        for line in self.share:
            names, _, number = line.rpartition("=")
            try:
                share = Fraction(number)
            except (ValueError, ZeroDivisionError):
                share = Fraction(-1)
            if not all(names.split("+")) or not 0 <= share <= 1:
                raise ValueError(f"--share {line}: write languages or pairs and a share from 0 to 1, as in sw+yo=0.02")
            parts[tuple(names.split("+"))] = share
        for name, times in Counter(name for line in self.share for name in line.rpartition("=")[0].split("+")).items():
            if times > 1:
                raise ValueError(f"--share names {name} {times} times: name it once")
        return parts

    def limits(self, examples: Sequence[int]) -> list[int] | None:
        """Most examples that each language may give; None without a bound."""
        bound = Fraction(str(self.max_repeats))
        return [int(bound * number) for number in examples] if bound else None

    def shares(self, names: Sequence[str], examples: Sequence[int], total: int | None = None) -> list[Fraction]:
        """Compute each language's share of `total` examples; without a total, no bound is applied.

        Raises ValueError where set shares leave too little or too much, and where `total` exceeds all bounds together.
        """
        parts = self.set_shares()
        number_of = {name: number for number, group in enumerate(parts, 1) for name in group}
        groups = [number_of.get(name, 0) for name in names]
        whole = sum(parts.values(), Fraction(0))
        others = any(count and not group for count, group in zip(examples, groups, strict=True))
        if not others and abs(whole - 1) <= _SUM_TOLERANCE:
            parts, whole = {group: part / whole for group, part in parts.items()}, Fraction(1)
        rest = 1 - whole
        shares = [Fraction(0)] * len(names)
        for number, (group, part) in enumerate([((), rest), *parts.items()]):
            members = [j for j, its_group in enumerate(groups) if its_group == number]
            divided = temperature_shares([examples[j] for j in members], self.alpha)
            _check_part(number, group, part, bool(sum(divided)))
            for j, share in zip(members, divided, strict=True):
                shares[j] = part * share
        limits = self.limits(examples)
        if limits is None or not total:
            return shares
        return bound_shares(total, shares, limits, groups, self.max_repeats)


def _check_part(number: int, group: tuple[str, ...], part: Fraction, has_text: bool) -> None:
    """Raise ValueError where a group (0: the languages without a set share) cannot have its part."""
    if number == 0 and has_text and part <= 0:
        raise ValueError(
            f"the shares of --share sum to {float(1 - part):.10g}, which leaves nothing for the other languages: lower "
            "them, or name all languages"
        )
    if number == 0 and not has_text and part != 0:
        raise ValueError(
            f"the shares of --share sum to {float(1 - part):.10g} and no other language has text: make them sum to 1"
        )
    if number and part and not has_text:
        raise ValueError(f"--share {'+'.join(group)}={float(part):g}: it has no text that fills a row")


def bound_shares(
    total: int, shares: Sequence[Fraction], limits: Sequence[int], groups: Sequence[int], repeats: float
) -> list[Fraction]:
    """Bound shares of `total`, so that no language j has more than `limits[j]`; `Sampling` says who gets the rest.

    `groups[j]` is the number of the --share line that names language j, 0 if none does. Raises ValueError where the
    limits of all languages that have a share are less than `total`; `repeats` is the bound in that message.
    """
    amounts, full = [total * share for share in shares], set[int]()
    while over := [j for j, amount in enumerate(amounts) if amount > limits[j]]:
        full.update(over)
        free = [k for k, share in enumerate(shares) if share and k not in full]
        for j in over:
            same = [k for k in free if groups[k] == groups[j]]
            takers = same or [k for k in free if groups[k] == 0] or free
            if not takers:
                most = sum(limit for limit, share in zip(limits, shares, strict=True) if share)
                raise ValueError(
                    f"{total:,} examples are asked for, but with --max-repeats {repeats:g} all languages together give "
                    f"only {most:,}: raise it, or ask for fewer rows"
                )
            left, weight = amounts[j] - limits[j], sum(shares[k] for k in takers)
            amounts[j] = Fraction(limits[j])
            for k in takers:
                amounts[k] += left * shares[k] / weight
    return [amount / total for amount in amounts]

"""What `mix` will write, known before a token is read: the examples of every encoded shard and their sampled order."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from data_prep.encoded import Batches, read_batches
from data_prep.sampling import Order, apportion, temperature_shares
from xlme_ds.data.schema import Layout

BLOCK = {"mono": 1 << 16, "para": 1 << 18}  # slots that are shuffled together: some 30,000 rows or more
STRETCH = 8192  # ids of a side, in about one piece of a file, that are used in the same block
ORDER = "every example of a language once a pass, pass after pass; blocks of {} slots, stretches of {} ids"


@dataclass(frozen=True)
class Source:
    """An encoded shard as examples of one group (a language, or a language pair).

    Task mono: `examples` training rows. Task para: pairs that fit into a row, `tokens` ids in their items (specials
    included). `batches` tell where the ids are.
    """

    name: str
    group: str
    examples: int
    tokens: int
    batches: Batches
    unfit: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Pairs that do not fit into a row: their records, in order."""

    @property
    def too_long(self) -> int:
        """How many pairs do not fit."""
        return len(self.unfit)

    def records(self, examples: np.ndarray) -> np.ndarray:
        """The records of examples that are pairs."""
        fitting_before = self.unfit - np.arange(len(self.unfit))
        return examples + np.searchsorted(fitting_before, examples, side="right")


@dataclass(frozen=True)
class Plan:
    """The sampled order of a task's examples, and where each stands. `sources` are sorted by group, then name."""

    folder: Path
    row_tokens: int
    layout: Layout
    group_languages: tuple[tuple[int, ...], ...]
    sources: tuple[Source, ...]
    order: Order

    @cached_property
    def _first(self) -> np.ndarray:
        """Examples before each source, over all groups."""
        return np.cumsum([0] + [source.examples for source in self.sources])

    def find(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(group, source, example within the source) of each slot of the order, int64."""
        group, example = self.order.locate(slots)
        examples = np.array(self.order.examples)
        at = (np.cumsum(examples) - examples)[group] + example
        source = np.searchsorted(self._first, at, side="right") - 1
        return group, source, at - self._first[source]

    @property
    def mean_tokens(self) -> float:
        """Ids of an example, on average over the corpus."""
        return _mean_tokens(self.sources)

    def path(self, source: int) -> Path:
        """The shard of a source."""
        return self.folder / self.sources[source].name


def make_plan(
    folder: Path,
    row_tokens: int,
    layout: Layout,
    languages: Sequence[str],
    sources: Sequence[Source],
    order: tuple[str, float, int],
) -> Plan:
    """Plan over the `sources` of a task, its slots still to come (`with_total`); `order` is (task, alpha, seed)."""
    task, alpha, seed = order
    sources = sorted(sources, key=lambda source: (source.group, source.name))
    groups = sorted({source.group for source in sources})
    examples = tuple(sum(s.examples for s in sources if s.group == group) for group in groups)
    shares = tuple(temperature_shares(examples, alpha))
    members = tuple(group_languages(group, languages) for group in groups)
    neighbours = max(int(STRETCH * len(members[0]) / _mean_tokens(sources)), 1)
    sampled = Order(tuple(groups), examples, shares, (), seed, task, BLOCK[task], neighbours)
    return Plan(folder, row_tokens, layout, members, tuple(sources), sampled)


def _mean_tokens(sources: Sequence[Source]) -> float:
    return max(sum(source.tokens for source in sources), 1) / max(sum(source.examples for source in sources), 1)


def with_total(plan: Plan, total: int) -> Plan:
    """The same examples, sampled `total` times."""
    return replace(plan, order=replace(plan.order, quotas=tuple(apportion(total, plan.order.shares))))


def group_languages(group: str, languages: Sequence[str]) -> tuple[int, ...]:
    """Language indices of a group's sides: of a language its own, of the pair `a-b` those of a and b."""
    if group in languages:
        return (languages.index(group),)
    cuts = [i for i, character in enumerate(group) if character == "-"]  # codes may have a hyphen of their own
    for left, right in ((group[:i], group[i + 1 :]) for i in cuts):
        if left in languages and right in languages:
            return languages.index(left), languages.index(right)
    raise ValueError(
        f"{group!r} is neither one of the encoded languages nor a pair of two of them: encode the data again"
    )


def survey(folder: Path, row_tokens: int, layout: Layout, longest: int | None, name: str) -> Source:
    """Count the examples of the encoded shard `name` (`group/number.arrow`) of task folder `folder`.

    A document shard is cut every `row_tokens` - 2 ids. A last slice of one id is no row: it is the last document's
    `</s>`. `longest`: ids that no pair has more of, where that is known; if all fit, their lengths need not be read.
    """
    group, path = name.split("/")[0], folder / name
    batches = read_batches(path)
    tokens, records = int(batches.tokens.sum()), int(batches.records.sum())
    if len(batches.tokens) == 1:
        rows, rest = divmod(tokens, row_tokens - 2)
        return Source(name, group, rows + (rest > 1), tokens, batches)
    if longest is not None and longest + layout.pair_specials <= row_tokens:
        return Source(name, group, records, tokens + layout.pair_specials * records, batches)
    lengths = batches.all_lengths(path).sum(0) + layout.pair_specials
    fits = lengths <= row_tokens
    return Source(name, group, int(fits.sum()), int(lengths[fits].sum()), batches, np.flatnonzero(~fits))

"""What every filter removed, by language or pair: from the counts of stage encode, under the names they have there."""

from collections import Counter
from dataclasses import dataclass

from xlme_ds.data.schema import Manifest

# What is lost, and the counts that say how much of it: documents and pairs are dropped, paragraphs of documents
# removed.
_LOST = {"documents": "dropped", "paragraphs": "removed", "pairs": "dropped"}


@dataclass(frozen=True)
class Loss:
    """One language or pair: how many were `read`, and how many of them each reason `lost`."""

    name: str
    read: int
    lost: dict[str, int]

    @property
    def share(self) -> float:
        """Lost, of those read."""
        return sum(self.lost.values()) / max(self.read, 1)

    def cells(self, reasons: tuple[str, ...]) -> tuple[str, ...]:
        """The values as people read them: name, read, share lost, then every reason's number and share."""
        numbers = (self.lost.get(reason, 0) for reason in reasons)
        each = (f"{n:,} ({100 * n / max(self.read, 1):.2f}%)" if n else "" for n in numbers)
        return (self.name, f"{self.read:,}", f"{100 * self.share:.2f}%", *each)


@dataclass(frozen=True)
class LossTable:
    """Losses of `units` (documents, paragraphs or pairs) wherever there are some, the largest share first."""

    units: str
    losses: tuple[Loss, ...]

    @property
    def title(self) -> str:
        """Heading of the table."""
        return f"{self.units.capitalize()} {_LOST[self.units]}"

    @property
    def reasons(self) -> tuple[str, ...]:
        """All reasons, the one that lost most first."""
        lost = self.total.lost
        return tuple(sorted(lost, key=lambda reason: (-lost[reason], reason)))

    @property
    def total(self) -> Loss:
        """The sum over the languages that lost something."""
        lost: Counter[str] = Counter()
        for loss in self.losses:
            lost.update(loss.lost)
        return Loss("all of these", sum(loss.read for loss in self.losses), dict(lost))

    @property
    def columns(self) -> tuple[str, ...]:
        """Headings of the cells."""
        return ("pair" if self.units == "pairs" else "language", self.units, _LOST[self.units], *self.reasons)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Cells of every loss, and of their sum at the end."""
        return [loss.cells(self.reasons) for loss in (*self.losses, self.total)]


def loss_tables(encoded: Manifest) -> list[LossTable]:
    """A table for each kind of thing that something was lost of."""
    tables = []
    for units, lost in _LOST.items():
        found = [
            Loss(name, counts[f"{units}_in"], counts[lost])
            for name, counts in encoded.counts["by_language"].items()
            if f"{units}_in" in counts and any(counts[lost].values())
        ]
        if found:
            tables.append(LossTable(units, tuple(sorted(found, key=lambda loss: (-loss.share, loss.name)))))
    return tables

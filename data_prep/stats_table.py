"""Size, tokens, unknown rate, tokens per character, shares and repeats by language and pair, from the manifests."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xlme_ds.data.schema import read_manifest

TITLES = {"mono": "Languages", "para": "Language pairs"}


@dataclass(frozen=True)
class Line:
    """One language or pair. Of the documents or pairs that were `read`, encode dropped some, mix found some pairs too
    long for a row, and `units` are left; `used` are the rows or pairs that training reads."""

    name: str
    bytes: int
    read: int
    units: int
    dropped: int
    too_long: int
    tokens: int
    unknown_rate: float
    tokens_per_character: float
    share_before: float
    share_after: float
    used: int
    repeat: float

    def cells(self) -> tuple[str, ...]:
        """The values as people read them, in the order of `columns`."""
        return (
            self.name,
            size_text(self.bytes),
            f"{self.read:,}",
            f"{self.dropped:,}",
            f"{self.too_long:,}",
            f"{self.units:,}",
            f"{self.tokens:,}",
            f"{100 * self.unknown_rate:.3f}%",
            f"{self.tokens_per_character:.3f}",
            f"{100 * self.share_before:.3f}%",
            f"{100 * self.share_after:.3f}%",
            f"{self.used:,}",
            f"{self.repeat:.2f}×",
        )


def columns(task: str) -> tuple[str, ...]:
    """Headings of a task's table."""
    name, units, used = ("language", "documents", "rows used") if task == "mono" else ("pair", "pairs", "pairs used")
    shares = ("share before α", "share after α")
    counts = (f"{units} read", "dropped", "too long", units)
    return (name, "size", *counts, "tokens", "unknown", "tokens/char", *shares, used, "repeat")


def lines_of(encoded_folder: Path, data_folder: Path, task: str) -> list[Line]:
    """One line a language or pair, largest first. Raises ValueError when the folders do not belong together."""
    encoded, mixed = read_manifest(encoded_folder / task), read_manifest(data_folder / task)
    if mixed.stage != "mix" or mixed.settings["encoded"] != encoded.fingerprint():
        raise ValueError(
            f"{data_folder / task} was not mixed from {encoded_folder / task}: name the folder it was mixed from"
        )
    units = "documents" if task == "mono" else "pairs"
    lines = []
    for name, counts in encoded.counts["by_language"].items():
        # a language of which everything was dropped was not mixed
        drawn = mixed.counts["by_language"].get(
            name, {"share_before": 0.0, "share_after": 0.0, "used": 0, "repeat": 0.0}
        )
        lines.append(
            Line(
                name=name,
                bytes=counts["bytes"],
                read=counts[f"{units}_in"],
                units=counts[units] - drawn.get("too_long", 0),
                dropped=sum(counts["dropped"].values()),
                too_long=drawn.get("too_long", 0),
                tokens=counts["tokens"],
                unknown_rate=counts["unknown"] / max(counts["tokens"], 1),
                tokens_per_character=counts["tokens"] / max(counts["characters"], 1),
                **{key: drawn[key] for key in ("share_before", "share_after", "used", "repeat")},
            )
        )
    return sorted(lines, key=lambda line: (-line.share_before, line.name))


def total(lines: Sequence[Line]) -> Line:
    """The sum over all lines; rates are of all tokens."""
    tokens = sum(line.tokens for line in lines)
    characters = sum(line.tokens / line.tokens_per_character for line in lines if line.tokens)
    available = sum(line.used / line.repeat for line in lines if line.repeat)
    used = sum(line.used for line in lines)
    return Line(
        name="all",
        bytes=sum(line.bytes for line in lines),
        read=sum(line.read for line in lines),
        units=sum(line.units for line in lines),
        dropped=sum(line.dropped for line in lines),
        too_long=sum(line.too_long for line in lines),
        tokens=tokens,
        unknown_rate=sum(line.unknown_rate * line.tokens for line in lines) / max(tokens, 1),
        tokens_per_character=tokens / max(characters, 1),
        share_before=sum(line.share_before for line in lines),
        share_after=sum(line.share_after for line in lines),
        used=used,
        repeat=used / available if available else 0.0,
    )


def size_text(number: int) -> str:
    """Bytes with a decimal unit."""
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"

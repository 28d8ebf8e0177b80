"""What is done to every line of text, and the counts that account for all of it.

No text is lost silently: damage is repaired and counted by reason, what cannot be used is dropped and counted.

    invalid_utf8       bytes that are no UTF-8 become U+FFFD
    byte_order_mark    U+FEFF at the start of a line is removed
    carriage_return    CR at the end of a line is removed, elsewhere it becomes a space (it ends no line)
    control_character  NUL and the other C0 and C1 controls but tab and U+0085 are removed

U+2028 and U+0085 end no line: only LF does. White space at both ends is removed without being counted.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")


@dataclass
class Counts:
    """What one task read, repaired, dropped and wrote; `unit` is "documents" or "pairs".

    `paragraphs`, `characters`, `bytes` (of UTF-8), `tokens` and `unknown` (tokens) are of the written units; `tokens`
    includes a document's `</s>`. A pair has two paragraphs.
    """

    unit: str
    units_in: int = 0
    units: int = 0
    paragraphs: int = 0
    characters: int = 0
    bytes: int = 0
    tokens: int = 0
    unknown: int = 0
    files: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """The counts as the manifest has them, once everything read is accounted for."""
        assert self.units_in == self.units + self.dropped.total(), f"{self.unit} were lost: {self}"
        numbers = ("files", "paragraphs", "characters", "bytes", "tokens", "unknown")
        return {
            f"{self.unit}_in": self.units_in,
            self.unit: self.units,
            "dropped": dict(sorted(self.dropped.items())),
            "repaired": dict(sorted(self.repaired.items())),
        } | {name: getattr(self, name) for name in numbers}


def add_counts(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Sum of two `Counts.as_json` values."""
    total: dict[str, Any] = {}
    for key in sorted(a.keys() | b.keys()):
        both = [counts[key] for counts in (a, b) if key in counts]
        total[key] = add_counts(both[0], both[-1] if len(both) == 2 else {}) if isinstance(both[0], dict) else sum(both)
    return total


def clean_line(raw: bytes, repaired: Counter[str]) -> str:
    """Text of one line without its LF; may be empty."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        repaired["invalid_utf8"] += 1
    if text.startswith("\ufeff"):
        text = text.lstrip("\ufeff")
        repaired["byte_order_mark"] += 1
    if "\r" in text:
        text = text.rstrip("\r").replace("\r", " ")
        repaired["carriage_return"] += 1
    if _CONTROL.search(text):
        text = _CONTROL.sub("", text)
        repaired["control_character"] += 1
    return text.strip()

"""Repair every line of text, and count all that a task reads, repairs, drops and writes.

No text is lost silently: damage is repaired and counted by reason, text of no use is dropped and counted.

    invalid_utf8       bytes that are not UTF-8 become U+FFFD
    byte_order_mark    U+FEFF at the start of a line is removed
    carriage_return    CR at the end of a line is removed, elsewhere it becomes a space (it ends no line)
    control_character  NUL and the other C0 and C1 controls but tab and U+0085 are removed

U+2028 and U+0085 end no line: only LF does. White space at both ends is removed without being counted.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
# The same in UTF-8, for a quick look at many lines; and CR, which needs a repair too.
_C0 = bytes(code for code in range(32) if code not in (9, 10)) + b"\x7f"
_C1 = re.compile(b"\xc2[\x80-\x84\x86-\x9f]")
_BOM = "\ufeff".encode()
# Shares that no corpus of real text in UTF-8 comes near, and their likely causes.
_DOUBTS = (
    ("invalid_utf8", 0.02, "of its lines have bytes that are no UTF-8: is it in another encoding, or compressed?"),
    ("control_character", 0.1, "of its lines have control characters: is it UTF-16, or no text?"),
)
_MOST_UNKNOWN = 0.05  # of the tokens
_FEW = 4_000  # bytes in which lines are looked at one by one


@dataclass
class Counts:
    """Counts of the text that one task read, repaired, dropped and wrote; `unit` is "documents" or "pairs".

    `paragraphs`, `characters`, `bytes` (of UTF-8), `tokens` and `unknown` (tokens) are of the written units; `tokens`
    includes a document's `</s>`. A pair has two paragraphs. `removed` has the paragraphs that were read and not
    written, by reason (of documents only): a document that lost all of them is dropped for the reason of the last.
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
    paragraphs_in: int = 0
    removed: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """The counts as the manifest has them; asserts that they account for everything read."""
        assert self.units_in == self.units + self.dropped.total(), f"{self.unit} were lost: {self}"
        removed: dict[str, Any] = {}
        if self.unit == "documents":
            assert self.paragraphs_in == self.paragraphs + self.removed.total(), f"paragraphs were lost: {self}"
            removed = {"paragraphs_in": self.paragraphs_in, "removed": dict(sorted(self.removed.items()))}
        numbers = ("files", "paragraphs", "characters", "bytes", "tokens", "unknown")
        return {
            f"{self.unit}_in": self.units_in,
            self.unit: self.units,
            "dropped": dict(sorted(self.dropped.items())),
            "repaired": dict(sorted(self.repaired.items())),
            **removed,
        } | {name: getattr(self, name) for name in numbers}


def add_counts(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Sum of two `Counts.as_json` values."""
    total: dict[str, Any] = {}
    for key in sorted(a.keys() | b.keys()):
        both = [counts[key] for counts in (a, b) if key in counts]
        total[key] = add_counts(both[0], both[-1] if len(both) == 2 else {}) if isinstance(both[0], dict) else sum(both)
    return total


def doubts(lines: int, repaired: Mapping[str, int], tokens: int = 0, unknown: int = 0) -> Iterator[str]:
    """Warnings of a file that is probably not text as expected: many repairs of its `lines`, or many unknown tokens."""
    for reason, most, words in _DOUBTS:
        share = repaired.get(reason, 0) / max(lines, 1)
        if share > most:
            yield f"{100 * min(share, 1):.0f}% {words}"
    if unknown > _MOST_UNKNOWN * tokens:
        yield f"{100 * unknown / tokens:.0f}% of its tokens are <unk>: does the vocabulary have its script?"


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


def clean_lines(data: bytes, repaired: Counter[str]) -> list[str]:
    """`clean_line` of every line of `data`; many lines at once where none of them needs a repair."""
    if not data:
        return []
    if len(data.translate(None, _C0)) == len(data) and not _C1.search(data) and _BOM not in data:
        try:
            return [line.strip() for line in data.decode().removesuffix("\n").split("\n")]
        except UnicodeDecodeError:
            pass
    half = data.find(b"\n", len(data) // 2) + 1 if len(data) > _FEW else 0
    if 0 < half < len(data):
        return clean_lines(data[:half], repaired) + clean_lines(data[half:], repaired)
    return [clean_line(line, repaired) for line in data.removesuffix(b"\n").split(b"\n")]

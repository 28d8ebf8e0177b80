"""Letters of a line by script, for many lines at once: a table from code point to script.

A letter is a character of Unicode's categories L*. Vowel signs, accents and other marks (M*) belong to the letter
before them and count for nothing, so a text has as many letters composed as decomposed; digits, signs and punctuation
neither.
"""

import unicodedata
from collections.abc import Sequence
from functools import cache

import numpy as np

# Blocks of Unicode 15 that hold the letters of the 100 languages' scripts.
_RANGES: dict[str, tuple[tuple[int, int], ...]] = {
    "Latin": (
        (0x41, 0x5A),
        (0x61, 0x7A),
        (0xC0, 0xD6),
        (0xD8, 0xF6),
        (0xF8, 0x24F),
        (0x1E00, 0x1EFF),
        (0xFF21, 0xFF5A),
    ),
    "Greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "Cyrillic": ((0x400, 0x52F), (0x1C80, 0x1C8F), (0x2DE0, 0x2DFF), (0xA640, 0xA69F)),
    "Armenian": ((0x531, 0x58A), (0xFB13, 0xFB17)),
    "Hebrew": ((0x591, 0x5F4), (0xFB1D, 0xFB4F)),
    "Arabic": ((0x620, 0x65F), (0x66E, 0x6EF), (0x6FA, 0x6FF), (0x750, 0x77F), (0x8A0, 0x8FF), (0xFB50, 0xFEFC)),
    "Devanagari": ((0x900, 0x963), (0x970, 0x97F), (0xA8E0, 0xA8FF)),
    "Bengali": ((0x980, 0x9E3), (0x9F0, 0x9FF)),
    "Gurmukhi": ((0xA00, 0xA65), (0xA70, 0xA7F)),
    "Gujarati": ((0xA80, 0xAE5), (0xAF0, 0xAFF)),
    "Oriya": ((0xB00, 0xB65), (0xB70, 0xB7F)),
    "Tamil": ((0xB80, 0xBE5),),
    "Telugu": ((0xC00, 0xC65),),
    "Kannada": ((0xC80, 0xCE5),),
    "Malayalam": ((0xD00, 0xD65), (0xD7A, 0xD7F)),
    "Sinhala": ((0xD80, 0xDE5), (0xDF2, 0xDF4)),
    "Thai": ((0xE01, 0xE3A), (0xE40, 0xE4E)),
    "Lao": ((0xE80, 0xECE), (0xEDC, 0xEDF)),
    "Myanmar": ((0x1000, 0x103F), (0x1050, 0x108F), (0x109A, 0x109F), (0xA9E0, 0xA9FE), (0xAA60, 0xAA7F)),
    "Georgian": ((0x10A0, 0x10FF), (0x1C90, 0x1CBF), (0x2D00, 0x2D2D)),
    "Ethiopic": ((0x1200, 0x135F), (0x1380, 0x138F), (0x2D80, 0x2DDE), (0xAB01, 0xAB2E)),
    "Khmer": ((0x1780, 0x17D3),),
    "Hangul": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xA960, 0xA97C), (0xAC00, 0xD7FB)),
    "Kana": ((0x3041, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    "Han": (
        (0x3005, 0x3007),
        (0x3100, 0x312F),
        (0x3400, 0x4DBF),
        (0x4E00, 0x9FFF),
        (0xF900, 0xFAFF),
        (0x20000, 0x323AF),
    ),
}
SCRIPTS = tuple(_RANGES)


@cache
def _table() -> np.ndarray:
    """uint8 for every code point: 0 no letter of these scripts, else 1 + the index in SCRIPTS."""
    table = np.zeros(0x110000, np.uint8)
    for number, ranges in enumerate(_RANGES.values()):
        for first, last in ranges:
            for code in range(first, last + 1):
                table[code] = (number + 1) * (unicodedata.category(chr(code))[0] == "L")
    return table


def letters(lines: Sequence[str], scripts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """int64 letters of each (non-empty) line that belong to `scripts`, and letters of any script."""
    codes = np.frombuffer("".join(lines).encode("utf-32-le"), np.uint32)
    found = _table()[codes]
    wanted = np.zeros(len(SCRIPTS) + 1, bool)
    wanted[[1 + SCRIPTS.index(script) for script in scripts]] = True
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    starts = np.cumsum(lengths) - lengths
    return np.add.reduceat(wanted[found], starts, dtype=np.int64), np.add.reduceat(found > 0, starts, dtype=np.int64)

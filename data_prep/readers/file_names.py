"""The languages of a described corpus's files, read from their names: a pattern has {lang}, or {src} and {tgt}, in
place of the codes.

A code is not cut short: `frr1` is frr and not fr, ru_Latn_0 is ru_Latn and not ru. If a name can be read in several
ways, codes that are written out in languages.py come first (en and pt_br before en_pt and br).
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

from data_prep.languages import all_listed, canonical, is_code, language_of
from data_prep.readers.corpus_files import Place
from data_prep.readers.reader import same_text_error, without_compression

Codes = tuple[str, ...]  # one of a language or two of a pair, as a file spells them
_PART = re.compile(r"(\*|\{(?:lang|src|tgt|side)\})")
_PLACEHOLDERS = ("{lang}", "{src}", "{tgt}", "{side}")
_AFTER_CODE = "}*"  # a star after a placeholder: its text must not begin with a letter, which would belong to the code
_STARS = ("*", _AFTER_CODE)
_LONGEST = 12  # characters of a code


class _Code(NamedTuple):
    """A code in a file name, and the position where it begins."""

    start: int
    text: str


_Reading = dict[str, _Code]  # by placeholder


class _CodesInName(NamedTuple):
    """The codes in a name that fits a pattern: of `every` way to read it, and of those that cut no code short
    (`whole`)."""

    every: list[Codes]
    whole: list[Codes]


class FileNames:
    """The files of a corpus by language or pair.

    `places`: all files of its folder, by name. `wanted`: the codes whose files are read. None reads those of all CC-100
    languages in the names, and raises ValueError for a name that may be of several languages or pairs.
    """

    def __init__(self, patterns: Sequence[str], places: Mapping[str, Place], wanted: Sequence[Codes] | None):
        self.patterns, self.places = patterns, places
        self.listed = frozenset(code for codes in wanted or () for code in codes)
        self.codes = {pattern: {name: _codes_in(pattern, name, self.listed) for name in places} for pattern in patterns}
        self.wanted = dict.fromkeys(self._all_codes() if wanted is None else wanted)
        self.files: dict[str, dict[Codes, list[tuple[str, ...]]]] = {}  # inputs by pattern and codes
        for pattern in dict.fromkeys(patterns):
            taken = {
                name for files in self.files.values() for names in chain.from_iterable(files.values()) for name in names
            }
            self.files[pattern] = self._starred(pattern, taken) if "*" in pattern else self._filled(pattern)

    def readings(self, name: str) -> list[Codes]:
        """The codes in a name, by the first pattern that it fits: several if it may be of any of them."""
        return next(filter(None, (self.codes[pattern][name].whole for pattern in self.patterns)), [])

    def files_of(self, codes: Codes) -> list[tuple[str, ...]]:
        """The inputs of a language or pair that fit any pattern, each of one file (with {side} of two).

        If a text is there in several compressions, the file of the first pattern counts. Raises ValueError if one
        pattern has several, and for a pair that is there in both directions.
        """
        by_text: dict[tuple[str, ...], tuple[str, tuple[str, ...]]] = {}
        for pattern, files in self.files.items():
            for names in files.get(codes, ()):
                first_pattern, first = by_text.setdefault(tuple(map(without_compression, names)), (pattern, names))
                if first_pattern == pattern and first != names:
                    raise ValueError(same_text_error(self.places[first[0]], self.places[names[0]]))
                both_wanted = len(codes) == 2 and codes[::-1] in self.wanted
                reverse = _reversed_names(pattern, names, codes) if both_wanted else names
                if set(reverse) != set(names) and all(name in self.places for name in reverse):
                    raise ValueError(same_text_error(self.places[names[0]], self.places[reverse[0]]))
        return [names for _, names in by_text.values()]

    def _all_codes(self) -> list[Codes]:
        """The languages or pairs of CC-100 in the names, sorted."""
        all_codes = set[Codes]()
        for name, place in self.places.items():
            codes = self.readings(name)
            cc100 = list(filter(_in_cc100, codes))
            if cc100 and len(codes) > 1:
                raise ValueError(
                    f"{place} may be of {' or of '.join(' and '.join(pair) for pair in codes)}: rename it, or list the "
                    f'{"pairs" if len(cc100[0]) > 1 else "languages"} in place of "any"'
                )
            all_codes.update(cc100)
        return sorted(all_codes)

    def _filled(self, pattern: str) -> dict[Codes, list[tuple[str, ...]]]:
        """The inputs of a pattern without *."""
        files: dict[Codes, list[tuple[str, ...]]] = {}
        for codes in self.wanted:
            names = tuple(dict.fromkeys(filled(pattern, codes).replace("{side}", code) for code in codes))
            if all(name in self.places for name in names):
                files[codes] = [names]
        return files

    def _starred(self, pattern: str, taken: Collection[str]) -> dict[Codes, list[tuple[str, ...]]]:
        """The inputs of a pattern with *, except for files that earlier patterns have `taken`.

        A listed code also has the files of longer codes of its language that begin with it (en has en_US_0), unless
        these are listed too.
        """
        by_codes_in_name: dict[Codes, list[Codes]] = {}  # wanted codes, by those of them that the pattern has
        for codes in self.wanted:
            in_name = tuple(code for key, code in zip(_keys(codes), codes, strict=True) if f"{{{key}}}" in pattern)
            by_codes_in_name.setdefault(in_name, []).append(codes)
        files: dict[Codes, list[tuple[str, ...]]] = {}
        for name in (name for name in self.places if name not in taken):
            every, whole = self.codes[pattern][name]
            listed = [codes for codes in every if codes in by_codes_in_name]
            exact = [codes for codes in listed if codes in whole]
            languages = set(map(languages_of, whole))
            for in_name in exact or [codes for codes in listed if languages_of(codes) in languages]:
                for codes in by_codes_in_name[in_name]:
                    files.setdefault(codes, []).append((name,))
        return files


def filled(pattern: str, codes: Codes) -> str:
    """A name with the codes of a language or pair in place of {lang}, or {src} and {tgt}."""
    for key, code in zip(_keys(codes), codes, strict=True):
        pattern = pattern.replace(f"{{{key}}}", code)
    return pattern


def _keys(codes: Codes) -> tuple[str, ...]:
    """The names of the placeholders for these codes."""
    return ("lang",) if len(codes) == 1 else ("src", "tgt")


def _reversed_names(pattern: str, names: tuple[str, ...], codes: Codes) -> tuple[str, ...]:
    """The names that these files would have if the pair were written in the other direction."""
    reversed_names, reversed_pattern = [], filled(pattern, codes[::-1])
    for name, code in zip(names, codes, strict=False):
        own_pattern = re.escape(filled(pattern, codes).replace("{side}", code)).replace(r"\*", "(.*)")
        stars = iter(re.fullmatch(own_pattern, name).groups())  # type: ignore[union-attr]
        filled_pattern = reversed_pattern.replace("{side}", code)
        reversed_names.append(re.sub(r"\*", lambda _, stars=stars: next(stars), filled_pattern))  # type: ignore[misc]
    return tuple(reversed_names)


@cache
def _in_cc100(codes: Codes) -> bool:
    """Whether all codes are of languages of CC-100, and of different ones."""
    try:
        return len(set(map(canonical, codes))) == len(codes)
    except ValueError:
        return False


@cache
def languages_of(codes: Codes) -> tuple[str, ...]:
    """The languages of `codes`; the codes themselves if any of them is not a language's."""
    try:
        return tuple(map(language_of, codes))
    except ValueError:
        return codes


def _codes(reading: _Reading) -> Codes:
    """The codes of a reading, without their places."""
    return tuple(reading[key].text for key in ("lang", "src", "tgt") if key in reading)


def _codes_in(pattern: str, name: str, listed: frozenset[str]) -> _CodesInName:
    """The codes in `name` by `pattern`; `listed`: text that counts as a code even if no language has it."""
    readings = _fitting(pattern, name, listed)
    return _CodesInName(list(dict.fromkeys(map(_codes, readings))), _whole(readings))


@cache
def _parts(pattern: str) -> tuple[str, ...]:
    """A pattern, cut into placeholders, stars and the text between them."""
    parts: list[str] = []
    for part in filter(None, _PART.split(pattern)):
        parts.append(_AFTER_CODE if part == "*" and parts and parts[-1] in _PLACEHOLDERS else part)
    return tuple(parts)


def _fitting(pattern: str, name: str, listed: frozenset[str]) -> list[_Reading]:
    """Every way to read a name by a pattern; ways with the same codes in the same places count as one."""
    parts, readings = _parts(pattern), list[_Reading]()
    todo: list[tuple[int, int, tuple[tuple[str, _Code], ...]]] = [(0, 0, ())]  # parts, characters and codes read so far
    states = set(todo)
    while todo:
        number, at, codes = todo.pop()
        if number == len(parts):
            reading = dict(codes)
            if at == len(name) and ("side" not in reading or reading["side"].text in _codes(reading)):
                readings.append(reading)
            continue
        for end, more in _steps(parts[number], parts[number + 1 :], name, at, dict(codes), listed):
            state = (number + 1, end, codes + more)
            if state not in states:
                states.add(state)
                todo.append(state)
    return readings


def _steps(
    part: str, rest: tuple[str, ...], name: str, at: int, codes: _Reading, listed: frozenset[str]
) -> Iterator[tuple[int, tuple[tuple[str, _Code], ...]]]:
    """Positions where a part that begins at `at` may end, each with the code, if any, that the part adds."""
    key = part[1:-1] if part in _PLACEHOLDERS else ""
    if part in _STARS:
        if part == "*" or not name[at : at + 1].isalpha():
            yield from ((end, ()) for end in _ends(rest, name, at))
    elif not key or key in codes:
        text = codes[key].text if key else part
        if name.startswith(text, at):
            yield at + len(text), ()
    else:
        for end in range(at + 2, min(at + _LONGEST, len(name)) + 1):
            code = name[at:end]
            if code in listed or is_code(code):
                yield end, ((key, _Code(at, code)),)


def _ends(rest: tuple[str, ...], name: str, at: int) -> Iterator[int]:
    """Positions where a star that begins at `at` may end: before each occurrence of the text that follows the star."""
    text = rest[0] if rest and rest[0] not in (*_STARS, *_PLACEHOLDERS) else ""
    if not rest or rest == (text,):  # nothing follows that text
        yield from [len(name) - len(text)] if name.endswith(text, at) else []
        return
    while at <= len(name) and (at := name.find(text, at)) >= 0:
        yield at
        at += 1


def _whole(readings: Sequence[_Reading]) -> list[Codes]:
    """The codes of the readings that cut no code short, the longest first; several if the name may be of any of them.

    CC-100's languages go before others, and codes that are written out in languages.py before other spellings.
    """
    uncut = [reading for reading in readings if not any(_cut_short(reading, other) for other in readings)]
    left = sorted(dict.fromkeys(map(_codes, uncut)), key=_length, reverse=True)
    if cc100 := list(filter(_in_cc100, left)):
        longest = _length(cc100[0])
        left = [codes for codes in left if codes in cc100 or (_length(codes) >= longest and _may_be_meant(codes))]
    if len(set(map(languages_of, left))) <= 1:
        return left[:1]
    written_out = [codes for codes in left if _length(codes) == _length(left[0]) and all_listed(codes)]
    return written_out[:1] if len(set(map(languages_of, written_out))) == 1 else left


def _length(codes: Codes) -> int:
    """The length of all codes together."""
    return len("".join(codes))


def _may_be_meant(codes: Codes) -> bool:
    """Whether codes that are not all in CC-100 may be right although another reading of the name is in CC-100: all are
    codes of languages, and those outside CC-100 have two letters (se_no, not foo_br)."""
    others = [code for code in codes if not _in_cc100((code,))]
    return bool(others) and languages_of(codes) != codes and all(len(re.split("[-_]", code)[0]) == 2 for code in others)


def _cut_short(reading: _Reading, other: _Reading) -> bool:
    """Whether the codes of a reading are those of the other reading, cut short."""
    begin_alike = all(
        other[key].start == code.start and other[key].text.startswith(code.text) for key, code in reading.items()
    )
    return begin_alike and reading != other

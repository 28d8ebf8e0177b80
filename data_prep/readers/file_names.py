"""Reads the languages of a corpus's files from their names, and refuses two names of one text.

A corpus description gives patterns of the names: {lang}, or {src} and {tgt}, match the language codes, {side} the code
of a file's side, and * any text.

Codes are not cut short: `frr1` has the code frr, not fr; `ru_Latn_0` has ru_Latn, not ru. If a name can be read in
several ways, codes that languages.py lists are preferred: `en_pt_br` has en and pt_br, not en_pt and br.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

from data_prep.languages import CC100_LANGUAGES, all_listed, is_code, language_of
from data_prep.readers.corpus_files import CorpusPath

Codes = tuple[str, ...]  # the code of a language, or both codes of a pair, as a file name spells them
_Inputs = dict[Codes, list[tuple[str, ...]]]  # codes -> the inputs with these codes, each as the names of its files
COMPRESSED = r"(?:\.(?:xz|gz|bz2|zst))?"  # pattern of the ending of a compressed file, or of no ending
_PLACEHOLDERS = ("{lang}", "{src}", "{tgt}", "{side}")
# Splits a pattern into its parts: placeholders, stars (each with the text that follows it), and other text.
_SPLIT = re.compile(rf"({'|'.join(map(re.escape, _PLACEHOLDERS))})|(?=\*)")
_MAX_CODE = 12  # characters of the longest code


class _Code(NamedTuple):
    """A code in a file name, and the position where it begins."""

    start: int
    text: str


_Reading = dict[str, _Code]  # one way to read a name: placeholder (without its braces) -> the code in its place


class FileNames:
    """The files of a corpus by language or pair.

    `paths` are all files of the corpus's folder, by name. `wanted` are the codes whose files are read; None means all
    codes of CC-100 languages in the names. Raises ValueError if `wanted` is None and a name may be of several languages
    or pairs.
    """

    def __init__(self, patterns: Sequence[str], paths: Mapping[str, CorpusPath], wanted: Sequence[Codes] | None):
        self.paths = paths
        wanted_codes = frozenset(chain.from_iterable(wanted or ()))
        self.readings: dict[str, dict[str, list[_Reading]]] = {}  # pattern -> file name -> every reading of the name
        self.likely: dict[str, dict[str, list[Codes]]] = {}  # pattern -> file name -> codes of the likely readings
        for pattern in patterns:
            self.readings[pattern] = {name: _readings(pattern, name, wanted_codes) for name in paths}
            self.likely[pattern] = {name: _likely_codes(found) for name, found in self.readings[pattern].items()}
        self.wanted = dict.fromkeys(self._cc100_codes() if wanted is None else wanted)
        self.inputs: dict[str, _Inputs] = {}  # pattern -> its inputs
        taken = set[str]()  # names of files that fit an earlier pattern
        for pattern in dict.fromkeys(patterns):
            self.inputs[pattern] = self._with_star(pattern, taken) if "*" in pattern else self._without_star(pattern)
            taken.update(*chain.from_iterable(self.inputs[pattern].values()))

    def codes_in(self, name: str) -> list[Codes]:
        """The codes in a name, by the first pattern that it fits. The list has several entries if the name is
        ambiguous, and none if the name fits no pattern."""
        return next(filter(None, (likely[name] for likely in self.likely.values())), [])

    def files_of(self, codes: Codes) -> list[tuple[str, ...]]:
        """The inputs of a language or pair by all patterns. An input is given as the names of its files: two for a
        pattern with {side}, one for any other.

        If a text comes in several compressions, the file that fits the earliest pattern is read. Raises ValueError if
        several files of the text fit that pattern, or if both directions of a pair are wanted and have files.
        """
        both_wanted = len(codes) == 2 and codes[::-1] in self.wanted
        # Names without compression -> the first pattern that they fit, and the names that fit it.
        by_text: dict[tuple[str, ...], tuple[str, tuple[str, ...]]] = {}
        for pattern, inputs in self.inputs.items():
            for names in inputs.get(codes, ()):
                text = tuple(map(without_compression, names))
                first_pattern, first_names = by_text.setdefault(text, (pattern, names))
                if first_pattern == pattern and first_names != names:
                    raise ValueError(same_text_error(self.paths[first_names[0]], self.paths[names[0]]))
                reverse = _reversed_names(pattern, names, codes) if both_wanted else names
                if set(reverse) != set(names) and all(name in self.paths for name in reverse):
                    raise ValueError(same_text_error(self.paths[names[0]], self.paths[reverse[0]]))
        return [names for _, names in by_text.values()]

    def _cc100_codes(self) -> list[Codes]:
        """The codes of all languages or pairs of CC-100 in the names. Raises ValueError for an ambiguous name."""
        cc100_codes = set[Codes]()
        for name, path in self.paths.items():
            possible = self.codes_in(name)
            in_cc100 = list(filter(_in_cc100, possible))
            if in_cc100 and len(possible) > 1:
                raise ValueError(
                    f"{path} may be of {' or of '.join(' and '.join(codes) for codes in possible)}: rename it, or list "
                    f'the {"pairs" if len(in_cc100[0]) > 1 else "languages"} in place of "any"'
                )
            cc100_codes.update(in_cc100)
        return sorted(cc100_codes)

    def _without_star(self, pattern: str) -> _Inputs:
        """The inputs of a pattern without *: its names with the wanted codes, where all files of a name exist."""
        inputs: _Inputs = {}
        for codes in self.wanted:
            names = tuple(dict.fromkeys(filled(pattern, codes).replace("{side}", code) for code in codes))
            if all(name in self.paths for name in names):
                inputs[codes] = [names]
        return inputs

    def _with_star(self, pattern: str, taken: Collection[str]) -> _Inputs:
        """The inputs of a pattern with *: one for each file that fits the pattern and is not in `taken`.

        If the code in a file's name is a wanted code with more parts, and of the same language, the file belongs to the
        wanted code, unless the longer code is wanted too: `en_US_0` belongs to en.
        """
        # The codes for which the pattern has placeholders -> the wanted languages or pairs that have these codes.
        wanted_by_name_codes: dict[Codes, list[Codes]] = {}
        for codes in self.wanted:
            name_codes = tuple(code for key, code in zip(_keys(codes), codes, strict=True) if f"{{{key}}}" in pattern)
            wanted_by_name_codes.setdefault(name_codes, []).append(codes)
        inputs: _Inputs = {}
        for name in self.paths:
            if name in taken:
                continue
            likely = self.likely[pattern][name]
            possible = dict.fromkeys(map(_codes, self.readings[pattern][name]))
            wanted_in_name = [codes for codes in possible if codes in wanted_by_name_codes]
            exact = [codes for codes in wanted_in_name if codes in likely]
            likely_languages = set(map(languages_of, likely))
            same_language = [codes for codes in wanted_in_name if languages_of(codes) in likely_languages]
            for name_codes in exact or same_language:
                for codes in wanted_by_name_codes[name_codes]:
                    inputs.setdefault(codes, []).append((name,))
        return inputs


def filled(pattern: str, codes: Codes) -> str:
    """A pattern with the codes of a language or pair in place of {lang}, or {src} and {tgt}."""
    for key, code in zip(_keys(codes), codes, strict=True):
        pattern = pattern.replace(f"{{{key}}}", code)
    return pattern


def _keys(codes: Codes) -> tuple[str, ...]:
    return ("lang",) if len(codes) == 1 else ("src", "tgt")


def _reversed_names(pattern: str, names: tuple[str, ...], codes: Codes) -> tuple[str, ...]:
    """The names that these files would have if the pair were written in the other direction."""
    reversed_names = []
    for name, code in zip(names, codes, strict=False):
        name_pattern = re.escape(filled(pattern, codes).replace("{side}", code)).replace(r"\*", "(.*)")
        star_texts = re.fullmatch(name_pattern, name, re.DOTALL).groups()  # type: ignore[union-attr]
        between_stars = filled(pattern, codes[::-1]).replace("{side}", code).split("*")
        reversed_names.append("".join(chain.from_iterable(zip(between_stars, (*star_texts, ""), strict=True))))
    return tuple(reversed_names)


@cache
def _in_cc100(codes: Codes) -> bool:
    """Whether all codes are of languages of CC-100, each of a different one."""
    languages = set(languages_of(codes))
    return len(languages) == len(codes) and languages.issubset(CC100_LANGUAGES)


@cache
def languages_of(codes: Codes) -> tuple[str, ...]:
    """The languages of `codes`; the codes themselves if one of them is no known code."""
    try:
        return tuple(map(language_of, codes))
    except ValueError:
        return codes


def _codes(reading: _Reading) -> Codes:
    return tuple(reading[key].text for key in ("lang", "src", "tgt") if key in reading)


def _readings(pattern: str, name: str, wanted_codes: frozenset[str]) -> list[_Reading]:
    """Every way to read a name by a pattern, without repeats, those with the longest codes first. `wanted_codes` count
    as codes even if they do not have the form of a code."""
    parts = list(filter(None, _SPLIT.split(pattern)))
    # The ways to read the parts so far: the position in the name where the next part begins, and the codes before it.
    # They are the keys of a dict, because a dict leaves out repeats and keeps the order.
    states: dict[tuple[int, tuple[tuple[str, _Code], ...]], None] = {(0, ()): None}
    for index in range(len(parts)):
        # The ends come in rising order, so `reversed` puts the longest codes first.
        states = dict.fromkeys(
            (end, codes + new_codes)
            for start, codes in states
            for end, new_codes in reversed([*_ends_of_part(parts, index, name, start, dict(codes), wanted_codes)])
        )
    readings = [dict(codes) for end, codes in states if end == len(name)]
    return [reading for reading in readings if "side" not in reading or reading["side"].text in _codes(reading)]


def _ends_of_part(
    parts: list[str], index: int, name: str, start: int, codes: _Reading, wanted_codes: frozenset[str]
) -> Iterator[tuple[int, tuple[tuple[str, _Code], ...]]]:
    """Yield (end, new codes) for each position where part `index` may end if it begins at `start`; a part has at most
    one new code.

    `codes` are the codes of earlier parts: a placeholder that occurs again must match the same code.
    """
    part = parts[index]
    key = part[1:-1] if part in _PLACEHOLDERS else ""
    if part.startswith("*"):
        text = part[1:]
        # After a code, the text that * matches does not begin with a letter, which would belong to the code.
        if index > 0 and parts[index - 1] in _PLACEHOLDERS and name[start : start + 1].isalpha():
            return
        if index + 1 == len(parts):  # the name must end with the text
            start = max(start, len(name) - len(text))
        while (position := name.find(text, start)) >= 0:
            yield position + len(text), ()
            start = position + 1
    elif not key or key in codes:
        text = codes[key].text if key else part
        if name.startswith(text, start):
            yield start + len(text), ()
    else:
        for end in range(start + 2, min(start + _MAX_CODE, len(name)) + 1):  # a code has at least two letters
            code = name[start:end]
            if code in wanted_codes or is_code(code):
                yield end, ((key, _Code(start, code)),)


def _likely_codes(readings: Sequence[_Reading]) -> list[Codes]:
    """The likely codes of a name.

    1. The candidates are the codes of the readings that cut no code short, the longest first.
    2. If some candidates have only codes of CC-100, leave out every other candidate that is shorter than the longest of
       these, or cannot be meant (`_may_be_meant`).
    3. If all remaining candidates are of one language or pair, return the first. Else, of the longest candidates, take
       those that languages.py lists; if they are of one language or pair, return the first. Else the name is ambiguous:
       return all remaining candidates.
    """
    uncut = [reading for reading in readings if not any(_is_cut_short(reading, other) for other in readings)]
    candidates = sorted(dict.fromkeys(map(_codes, uncut)), key=_length, reverse=True)
    if cc100 := list(filter(_in_cc100, candidates)):
        longest = _length(cc100[0])
        candidates = [
            codes for codes in candidates if codes in cc100 or (_length(codes) >= longest and _may_be_meant(codes))
        ]
    if len(set(map(languages_of, candidates))) <= 1:
        return candidates[:1]
    listed = [codes for codes in candidates if _length(codes) == _length(candidates[0]) and all_listed(codes)]
    return listed[:1] if len(set(map(languages_of, listed))) == 1 else candidates


def _length(codes: Codes) -> int:
    return len("".join(codes))


def _may_be_meant(codes: Codes) -> bool:
    """Whether codes that are not all in CC-100 may be right although another reading of the name is in CC-100.

    True if `languages_of` spells them differently, and the language part of each code outside CC-100 has two letters.
    So se_no may be meant, but not foo_br, and not se alone.
    """
    others = [code for code in codes if not _in_cc100((code,))]
    return bool(others) and languages_of(codes) != codes and all(len(re.split("[-_]", code)[0]) == 2 for code in others)


def _is_cut_short(reading: _Reading, other: _Reading) -> bool:
    """Whether each code of `reading` is the beginning of the code that the `other` reading has for that placeholder,
    and at least one is shorter."""
    begin_alike = all(
        other[key].start == code.start and other[key].text.startswith(code.text) for key, code in reading.items()
    )
    return begin_alike and reading != other


def require_language(code: str, where: object) -> str:
    """The language of a code, by `language_of`. The ValueError for an unknown code names the file `where`."""
    try:
        return language_of(code)
    except ValueError as error:
        stop = "" if str(error).endswith("?") else "."
        raise ValueError(f"{where}: {error}{stop} A file name begins with its language's code, as en.txt") from None


def without_compression(name: str) -> str:
    """A file name without the ending that tells its compression."""
    return re.sub(COMPRESSED + "$", "", name)


def check_unique_texts(files: Iterable[tuple[CorpusPath, str]]) -> None:
    """Raise ValueError if two files or members of files have the same name apart from folder, compression and case."""
    by_name: dict[str, CorpusPath] = {}
    for path, name in files:
        key = without_compression(name.rpartition("/")[2]).lower()
        if key in by_name:
            raise ValueError(same_text_error(by_name[key], path))
        by_name[key] = path


def same_text_error(first: CorpusPath, second: CorpusPath) -> str:
    """Error message for two files that seem to be the same text."""
    return (
        f"{first} and {second} have names of the same text, which would be read twice: remove one of them, or rename "
        "one if the texts differ"
    )

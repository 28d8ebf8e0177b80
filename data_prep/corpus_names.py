"""File name patterns of corpus descriptions: {lang}; or {src} and {tgt}, and {side} for one of the two."""

import re
from collections.abc import Container, Mapping, Sequence

from data_prep.corpus_files import Place
from data_prep.languages import canonical
from data_prep.progress import warn
from data_prep.readers.find import split_pair

_CODE = r"[a-z]{2,3}(?:_[A-Za-z]{2,4}|-Han[st])?"


def file_names(patterns: Sequence[str], codes: tuple[str, ...], listed: Container[str]) -> list[str]:
    """The file (two with {side}) of a language or pair, by the first pattern whose files are all listed; or none."""
    for pattern in patterns:
        if len(codes) == 1:
            names = [pattern.replace("{lang}", codes[0])]
        else:
            named = pattern.replace("{src}", codes[0]).replace("{tgt}", codes[1])
            names = [named.replace("{side}", code) for code in codes] if "{side}" in named else [named]
        if all(name in listed for name in names):
            return names
    return []


def spelled(patterns: Sequence[str], spellings: str, listed: Container[str]) -> str:
    """The first of `a|b` that has a file, else the first."""
    codes = spellings.split("|")
    return next((code for code in codes if file_names(patterns, (code,), listed)), codes[0])


def code_pairs(pairs: Sequence[str], where: str) -> list[tuple[str, ...]]:
    """Both codes of every `a-b`. Raises ValueError, which names `where`, on an unknown code."""
    return [split_pair(pair, where) for pair in pairs]


def match_any(patterns: Sequence[str], listed: Mapping[str, Place], corpus: str) -> list[tuple[str, ...]]:
    """The pairs whose files the names show, sorted; what is left out is told in a line on stderr."""
    matchers = [_matcher(pattern) for pattern in patterns]
    found: set[tuple[str, ...]] = set()
    strange, foreign = [], set()
    for name, place in listed.items():
        match = next(filter(None, (matcher.fullmatch(name) for matcher in matchers)), None)
        if match is None:
            strange += [] if place.is_folder else [name]
        elif _known(match["src"], match["tgt"]):
            found.add((match["src"], match["tgt"]))
        else:
            foreign.add(f"{match['src']}-{match['tgt']}")
    for what, left in (("files, by their names,", strange), ("pairs, by their languages,", sorted(foreign))):
        if left:
            some = ", ".join(left[:8]) + (" …" if len(left) > 8 else "")
            warn(f"{len(left)} {what} are not read as {corpus}: {some}")
    return sorted(found)


def _known(a: str, b: str) -> bool:
    try:
        return canonical(a) != canonical(b)
    except ValueError:
        return False


def _matcher(pattern: str) -> re.Pattern[str]:
    """`{src}` and `{tgt}` may stand several times."""
    regex = ""
    seen: set[str] = set()
    for part in re.split(r"(\{(?:src|tgt|side)\})", pattern):
        name = part[1:-1]
        if part not in ("{src}", "{tgt}", "{side}"):
            regex += re.escape(part)
        elif name == "side":
            regex += "(?:(?P=src)|(?P=tgt))"
        else:
            regex += f"(?P={name})" if name in seen else f"(?P<{name}>{_CODE})"
            seen.add(name)
    return re.compile(regex)

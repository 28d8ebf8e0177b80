"""Inputs of the two shorthand layouts, CC-100's and Moses', by file name alone; no content is read."""

import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

from data_prep.corpus_files import Place, files_in
from data_prep.languages import canonical
from data_prep.progress import warn
from data_prep.readers.inputs import Input

_COMPRESSED = r"(?P<compression>\.(?:xz|gz|bz2|zst))?"
_MONO = re.compile(rf"(?P<code>[^.]+)\.txt{_COMPRESSED}")
_ZIP = re.compile(r"(?P<pair>[^.]+-[^.]+)\.txt\.zip")
_SIDE = re.compile(rf"(?P<stem>(?:.+\.)?(?P<pair>[^.]+-[^.]+))\.(?P<code>[^.]+?){_COMPRESSED}")


def find_documents(folder: Path | str) -> list[Input]:
    """The `<lang>.txt[.xz|.gz|.bz2|.zst]` files of a folder, sorted. Raises ValueError on an unknown language code."""
    inputs = []
    for path in files_in(str(folder)):
        if match := _MONO.fullmatch(path.name):
            language = _canonical(match["code"], path)
            inputs.append(Input(language, (language,), (path,)))
        else:
            _warn_ignored(path, "<lang>.txt[.xz|.gz|.bz2|.zst]")
    _refuse_twins((source.paths[0], source.paths[0].name) for source in inputs)
    return _found(inputs, folder, "<lang>.txt[.xz|.gz|.bz2|.zst]")


def find_pairs(folder: Path | str) -> list[Input]:
    """The `a-b.txt.zip` files and the `X.a-b.a` + `X.a-b.b` files of a folder, sorted.

    Raises ValueError on a side without the other, a damaged zip file and an unknown language code.
    """
    inputs = []
    sides: dict[tuple[str, str], dict[str, Place]] = {}
    files: list[tuple[Place, str]] = []
    for path in files_in(str(folder)):
        match = _SIDE.fullmatch(path.name)
        if zipped := _ZIP.fullmatch(path.name):
            a, b = split_pair(zipped["pair"], path)
            inputs.append(_pair_input(a, b, (path,), zip_members(path, a, b)))
            files += [(path, name) for name in (path.name, *inputs[-1].members)]
        elif match and match["code"] in _ends(match["pair"]):
            files.append((path, path.name))
            sides.setdefault((match["stem"], match["pair"]), {})[match["code"]] = path
        else:
            _warn_ignored(path, "a-b.txt.zip or X.a-b.a and X.a-b.b")
    _refuse_twins(files)
    for (stem, pair), paths in sides.items():
        a, b = split_pair(pair, next(iter(paths.values())))
        for code in (a, b):
            if code not in paths:
                lone = next(iter(paths.values()))
                raise ValueError(f"{lone} has no other side: put {stem}.{code} next to it, or remove it")
        inputs.append(_pair_input(a, b, (paths[a], paths[b])))
    return _found(inputs, folder, "a-b.txt.zip or X.a-b.a and X.a-b.b")


def _refuse_twins(files: Iterable[tuple[Place, str]]) -> None:
    """Raise ValueError where two files are, or hold, what is named the same but for compression and case."""
    seen: dict[str, Place] = {}
    for path, name in files:
        key = re.sub(r"\.(xz|gz|bz2|zst)$", "", name.rpartition("/")[2]).lower()
        if key in seen:
            raise ValueError(
                f"{seen[key]} and {path} are the same text by their names, which would count twice: remove one of them, or "
                "rename it if it is another text"
            )
        seen[key] = path


def _found(inputs: list[Input], folder: Path | str, layout: str) -> list[Input]:
    if not inputs:
        raise ValueError(f"{folder} holds no corpus file: the names must be {layout}")
    return sorted(inputs, key=lambda source: (source.name, source.files))


def _warn_ignored(path: Place, layout: str) -> None:
    if not path.is_folder:
        warn(f"{path} is ignored: its name is not {layout}")


def _canonical(code: str, path: Place) -> str:
    try:
        return canonical(code)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _pair_input(a: str, b: str, paths: tuple[Place, ...], members: tuple[str, ...] = ()) -> Input:
    languages = (_canonical(a, paths[0]), _canonical(b, paths[0]))
    layout = "moses_zip" if members else "moses"
    return Input("-".join(languages), languages, paths, members, layout, codes=(a, b))


def _ends(pair: str) -> set[str]:
    """What may be a language code at either end of `a-b`; codes may have hyphens themselves."""
    cuts = [i for i, letter in enumerate(pair) if letter == "-"]
    return {pair[:i] for i in cuts} | {pair[i + 1 :] for i in cuts}


def split_pair(pair: str, where: object) -> tuple[str, str]:
    """The two codes of `a-b` as written. Raises ValueError, which names `where`, when no cut gives two known codes."""
    problems = []
    for cut in (match.start() for match in re.finditer("-", pair)):
        codes = pair[:cut], pair[cut + 1 :]
        try:
            if canonical(codes[0]) != canonical(codes[1]):
                return codes
            problems.append(f"both sides are {codes[0]!r}")
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(f"{where}: {problems[0] if problems else f'{pair!r} is not a pair a-b'}")


def zip_members(path: Place, a: str, b: str) -> tuple[str, ...]:
    """The two sides' members of an OPUS zip file. Raises ValueError when there is not one for each."""
    if path.size == 0:
        raise ValueError(f"{path} is empty: fetch it again")
    try:
        with path.open() as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            before = min((member.header_offset for member in archive.infolist()), default=0)
            if before:
                raise ValueError(
                    f"{path} begins with {before} bytes that no member has, as two zip files in one do: fetch it again"
                )
            found = []
            for code in (a, b):
                matches = [name for name in names if name.endswith(f".{a}-{b}.{code}")]
                if len(matches) != 1:
                    raise ValueError(
                        f"{path} has {len(matches)} members named X.{a}-{b}.{code}: it must have one a side"
                    )
                archive.open(matches[0]).close()
                found += matches
    except RuntimeError as error:  # encrypted, or packed by a method that Python does not know
        raise ValueError(
            f"{path} cannot be read ({error}): unpack it and pack it with deflate, without a password"
        ) from None
    except (zipfile.BadZipFile, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path} cannot be read ({error}): it is truncated or damaged, fetch it again") from None
    return tuple(found)

"""Offline back-translation: the lines of a text and their translations become pairs, which `xlme prep encode --para`
reads.

FOLDER/back_<to>.a-b.a, .b               the pairs of languages a and b, when all are translated
FOLDER/.back_<to>.a-b.json               the settings, model and text that the pairs come from
FOLDER/.back_<to>.a-b.parts/<n>.json     one translated part; n is the index of its first line
"""

import shutil
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..cli import note
from ..io.files import read_versioned, write_text, write_versioned
from ..io.folders import lock_folder
from ..trained.weights import weights_sha256
from .translator import Translator, translate_lines

_PART_LINES = 2000


def write_pairs(
    folder: Path,
    codes: tuple[str, str],
    translator: Translator,
    lines: Sequence[str],
    languages: tuple[int, int],
    beam: int,
    penalty: float,
) -> None:
    """Translate `lines`, and write them and their translations into `folder`. After a stop, a second call translates
    only the missing parts. `codes` and `languages`: the language of the lines, then that of the translations.

    Raises ValueError if the folder has pairs of other text, another model or other settings, and if another process is
    writing these pairs.
    """
    name = f"back_{codes[1]}.{'-'.join(sorted(codes))}"
    files = [folder / f"{name}.{code}" for code in codes]
    record, parts_folder = folder / f".{name}.json", folder / f".{name}.parts"
    provenance = {
        "weights": weights_sha256(translator.model),
        "source": sha256("\n".join(lines).encode()).hexdigest(),
        "beam": beam,
        "length_penalty": penalty,
    }
    if not record.exists():
        if foreign := next((file for file in files if file.exists()), None):
            raise ValueError(f"{foreign} exists already, and this command did not write it: name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_versioned(record, provenance)
    if read_versioned(record) != provenance:
        raise ValueError(
            f"{folder} has pairs of other text, another model or other settings: name another folder, or delete it"
        )
    if all(file.exists() for file in files):
        shutil.rmtree(parts_folder, ignore_errors=True)  # a stop may have come before all parts were removed
        print(f"{files[1]} is complete")
        return
    part_files = {first: parts_folder / f"{first:09d}.json" for first in range(0, len(lines), _PART_LINES)}
    with lock_folder(parts_folder):
        for first, file in part_files.items():
            if not file.exists():
                part_lines = lines[first : first + _PART_LINES]
                write_versioned(file, _translated_part(translator, part_lines, languages, beam, penalty))
        parts = [read_versioned(file) for file in part_files.values()]
        pairs = [pair for part in parts for pair in part["pairs"]]
        # The file of the translations is written last: it marks the pairs as complete.
        for side, file in enumerate(files):
            write_text(file, "".join(f"{pair[side]}\n" for pair in pairs))
        # While no other process may write there. NFS may keep the folder, because the lock is open; the next call
        # removes it.
        shutil.rmtree(parts_folder, ignore_errors=True)
    too_long, empty = (sum(part[name] for part in parts) for name in ("cut", "empty"))
    print(
        f"{files[1]}: {len(pairs)} pairs; left out: {too_long} lines too long, "
        f"{empty} without words, {len(lines) - len(pairs) - too_long - empty} with an empty translation"
    )
    if not pairs:
        note("no pair is left: a model that writes empty translations needs more training")


def _translated_part(
    translator: Translator, lines: Sequence[str], languages: tuple[int, int], beam: int, penalty: float
) -> dict[str, Any]:
    """The pairs of some lines; the number of lines that were too long, and of those without words."""
    translations, cut = translate_lines(translator, lines, languages, beam, penalty)
    cut_numbers = set(cut)
    pairs = [
        pair
        for number, pair in enumerate(zip(lines, translations, strict=True), start=1)
        if number not in cut_numbers and all(side.strip() for side in pair)
    ]
    empty = sum(not len(translator.vocabulary.encode(line)) for line in lines)  # `strip` leaves a zero-width space
    return {"pairs": pairs, "cut": len(cut), "empty": empty}

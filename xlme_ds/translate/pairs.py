"""Offline back-translation: the lines of a text and their translations become pairs, which `xlme prep encode --para`
reads.

FOLDER/back_<to>.a-b.a, .b               the pairs of languages a and b, when all are translated
FOLDER/.back_<to>.a-b.json               the settings, model and text that the pairs come from
FOLDER/.back_<to>.a-b.parts/<n>.json     one translated part; n is the index of its first line
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cli import note
from ..io.files import read_versioned, write_text, write_versioned
from ..io.folders import lock_folder
from .translator import Translator, translate_lines

_PART_LINES = 2000


@dataclass(frozen=True)
class PairFolder:
    """The pairs of two languages in `folder`; the text in language `target` is the translation."""

    folder: Path
    source: str
    target: str

    def path(self, code: str) -> Path:
        """The file with the text in language `code`."""
        return self.folder / f"back_{self.target}.{'-'.join(sorted((self.source, self.target)))}.{code}"

    @property
    def parts(self) -> Path:
        """The folder of the translated parts."""
        return self.folder / f".{self.path('parts').name}"

    def begin(self, provenance: Mapping[str, Any]) -> bool:
        """Begin, or resume after a stop. Returns whether `write` has anything left to do. `provenance`: the settings,
        model and text that the pairs come from. Raises ValueError if the folder has pairs of another provenance."""
        complete = self.path(self.target).exists() and self.path(self.source).exists()
        record = self.folder / f".{self.path('json').name}"
        if not complete and not record.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_versioned(record, provenance)
        if not record.exists() or read_versioned(record) != provenance:
            raise ValueError(
                f"{self.folder} has pairs of other text, another model or other settings: name another folder, or "
                "delete it"
            )
        if not complete:
            self.parts.mkdir(exist_ok=True)
        return self.parts.exists()  # also true for complete pairs if a stop came before the parts were removed

    def write(
        self, translator: Translator, lines: Sequence[str], languages: tuple[int, int], beam: int, penalty: float
    ) -> None:
        """Translate the missing parts, and write both files. Raises ValueError if another process is writing these
        pairs."""
        part_files = {first: self.parts / f"{first:09d}.json" for first in range(0, len(lines), _PART_LINES)}
        with lock_folder(self.parts):
            for first, file in part_files.items():
                if not file.exists():
                    part_lines = lines[first : first + _PART_LINES]
                    translations, cut = translate_lines(translator, part_lines, languages, beam, penalty)
                    part_pairs = [
                        pair
                        for number, pair in enumerate(zip(part_lines, translations, strict=True), start=1)
                        if number not in cut and all(side.strip() for side in pair)
                    ]
                    empty = sum(not line.strip() for line in part_lines)
                    write_versioned(file, {"pairs": part_pairs, "cut": len(cut), "empty": empty})
            parts = [read_versioned(file) for file in part_files.values()]
            pairs = [pair for part in parts for pair in part["pairs"]]
            # The file of the translations is written last: it marks the pairs as complete.
            for side, code in enumerate((self.source, self.target)):
                write_text(self.path(code), "".join(f"{pair[side]}\n" for pair in pairs))
            shutil.rmtree(self.parts)
        too_long, empty = (sum(part[name] for part in parts) for name in ("cut", "empty"))
        print(
            f"{self.path(self.target)}: {len(pairs)} pairs; left out: {too_long} lines too long, "
            f"{empty} without words, {len(lines) - len(pairs) - too_long - empty} with an empty translation"
        )
        if not pairs:
            note("no pair is left: a model that writes empty translations needs more training")

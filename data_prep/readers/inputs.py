"""What an input is: the files of one language or pair, and how to read them."""

from dataclasses import dataclass, field
from typing import Any

from data_prep.corpus_files import Place

# Format -> task. Compression goes by the file's ending and is no part of the format.
FORMATS = {
    "cc100": "mono",  # a paragraph a line, an empty line between documents
    "lines": "mono",  # a document a line
    "moses": "para",  # two files, line by line
    "moses_zip": "para",  # two members of a zip file, line by line
    "wikimatrix_tsv": "para",  # score, source, target
    "ccaligned_tsv": "para",  # source, target, score; or with the URLs of whole pages: see `columns`
    "tmx": "para",
}


@dataclass(frozen=True)
class Input:
    """One file of documents (`languages` has one code) or one set of pairs (two codes).

    `paths`: one file, or the two sides. `members`: the two sides inside a zip file. The codes in `name` and `languages`
    are CC-100's, `codes` are the file's own. `columns` name the columns of a .tsv file; `filters` are settings by name.
    """

    name: str
    languages: tuple[str, ...]
    paths: tuple[Place, ...]
    members: tuple[str, ...] = ()
    format: str = "cc100"
    corpus: str = ""
    codes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    filters: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)

    @property
    def files(self) -> list[tuple[str, int]]:
        """Name and bytes of every file."""
        return [(path.name, path.size) for path in self.paths]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(size for _, size in self.files)

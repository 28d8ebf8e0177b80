"""The text that `bench.tokenize` measures, and a vocabulary for it."""

import lzma
import os
from collections import Counter
from collections.abc import Container
from pathlib import Path

from data_prep.clean import clean_line
from data_prep.languages import canonical
from data_prep.sample import SampleConfig
from data_prep.sample import run as make_sample
from data_prep.vocab import VocabConfig
from data_prep.vocab import run as make_vocabulary

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "corpus"
_ENDING = ".txt.xz"


def corpus_files(
    corpus: Path | None, languages: Container[str], megabytes: float, scratch: Path
) -> tuple[Path, dict[str, list[Path]]]:
    """(folder, its files by language): the corpus's own, or copies of the first `megabytes` (0: all) of `languages`.

    Without a corpus, the one beside the repository is taken, or else the sample corpus. Raises ValueError when there
    are no files.
    """
    if corpus is None and not SHARED.is_dir():
        make_sample(SampleConfig(scratch / "sample"))
    mono = (corpus or (SHARED if SHARED.is_dir() else scratch / "sample" / "train")) / "mono"
    files: dict[str, list[Path]] = {}
    for path in sorted(mono.glob(f"*{_ENDING}")):
        language = canonical(path.name.removesuffix(_ENDING))
        if not languages or language in languages:
            files.setdefault(language, []).append(path)
    if not files:
        raise ValueError(f"{mono} holds no <lang>{_ENDING} to measure: name a folder with mono/ in it by --corpus")
    if not languages and not megabytes:
        return mono, files
    part = scratch / "mono"
    part.mkdir(parents=True)
    return part, {language: [_cut(path, part, megabytes) for path in paths] for language, paths in files.items()}


def _cut(path: Path, folder: Path, megabytes: float) -> Path:
    """The first whole lines of a file, of at most that size, as a file in `folder`."""
    if not megabytes:
        (folder / path.name).symlink_to(path.resolve())
    else:
        with lzma.open(path) as file, lzma.open(folder / path.name, "wb", preset=1) as cut:
            cut.write(file.read(int(megabytes * 1e6)).rpartition(b"\n")[0] + b"\n")
    return folder / path.name


def documents_of(path: Path) -> list[list[str]]:
    """The cleaned lines of every document, read without the stage's own reader."""
    documents: list[list[str]] = [[]]
    with lzma.open(path) as file:
        for raw in file:
            line = clean_line(raw.rstrip(b"\n"), Counter())
            if line:
                documents[-1].append(line)
            elif documents[-1]:
                documents.append([])
    return [document for document in documents if document]


def trained(mono: Path, out: Path, size: int, sentences: int) -> Path:
    """Folder of a vocabulary trained on the text itself."""
    make_vocabulary(VocabConfig(out=out, mono=mono, size=size, sentences=sentences, processes=os.cpu_count() or 1))
    return out

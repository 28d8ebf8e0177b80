"""The corpus of docs/results.md: ten languages of a folder of real text, with translation pairs kept out for the test
of retrieval.

`python -m bench.results_corpus --corpus DIR --out DIR` writes train/ and heldout/, each with mono/ and para/ as
`data_prep` reads them. A held-out English sentence is in no pair of the training text, in no language, and neither side
is a line of its mono text.
"""

import hashlib
import lzma
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

LANGUAGES = ("ar", "de", "en", "es", "fr", "hi", "ru", "sw", "tr", "zh")
PIVOT = "en"
HELDOUT_SHARE = 40  # one English sentence of so many, chosen by its own hash
HELDOUT_PAIRS = 500
WORDS = range(4, 40)  # of the English side of a held-out pair: shorter ones repeat, longer ones leave nothing to find


@dataclass(frozen=True)
class Corpus:
    """Arguments of the command."""

    corpus: Path
    """Folder with mono/<lang>.txt.xz and para/en-<lang>.txt.zip."""
    out: Path


def pairs(archive: Path) -> Iterator[tuple[str, str]]:
    """The lines of both sides of an OPUS archive."""
    language = archive.name.split(".")[0].split("-")[1]
    with zipfile.ZipFile(archive) as opened:
        names = {name.rsplit(".", 1)[-1]: name for name in opened.namelist()}
        sides = [opened.read(names[code]).decode("utf-8").splitlines() for code in (PIVOT, language)]
    yield from zip(*sides, strict=True)


def is_heldout(english: str) -> bool:
    """Whether a sentence belongs to the held-out text; the same in every language."""
    chosen = int.from_bytes(hashlib.sha256(english.lower().encode()).digest()[:8], "big") % HELDOUT_SHARE == 0
    return chosen and len(english.split()) in WORDS


def write_pairs(folder: Path, language: str, lines: list[tuple[str, str]]) -> None:
    """A line-aligned pair of files."""
    folder.mkdir(parents=True, exist_ok=True)
    for code, side in zip((PIVOT, language), zip(*lines, strict=True), strict=True):
        (folder / f"Results.{PIVOT}-{language}.{code}").write_text(
            "".join(line + "\n" for line in side), encoding="utf-8"
        )


def main() -> None:
    """Split and write."""
    arguments = tyro.cli(Corpus, description=__doc__)
    hidden: set[str] = set()
    for language in LANGUAGES:
        if language == PIVOT:
            continue
        kept, heldout = [], {}
        for english, other in pairs(arguments.corpus / "para" / f"{PIVOT}-{language}.txt.zip"):
            if not is_heldout(english):
                kept.append((english, other))
            elif len(heldout) < HELDOUT_PAIRS and english != other and other not in heldout.values():
                heldout.setdefault(english, other)
        hidden |= set(heldout) | set(heldout.values())
        write_pairs(arguments.out / "train" / "para", language, kept)
        write_pairs(arguments.out / "heldout" / "para", language, list(heldout.items()))
        print(f"{PIVOT}-{language}: {len(kept)} pairs to train on, {len(heldout)} kept out")
    for language in LANGUAGES:
        text = lzma.decompress((arguments.corpus / "mono" / f"{language}.txt.xz").read_bytes()).decode("utf-8")
        documents = [[line for line in d.split("\n") if line and line not in hidden] for d in text.split("\n\n")]
        for split, chosen in (("train", range(0, 50)), ("heldout", range(50, 51))):
            folder = arguments.out / split / "mono"
            folder.mkdir(parents=True, exist_ok=True)
            written = ["".join(x + "\n" for x in d) for n, d in enumerate(documents) if d and n % 51 in chosen]
            (folder / f"{language}.txt").write_text("\n".join(written), encoding="utf-8")


if __name__ == "__main__":
    main()

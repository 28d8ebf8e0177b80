"""Stage `sample`: the Universal Declaration of Human Rights as a small real corpus in CC-100's and OPUS's layouts.

OUT/{train,heldout}/mono/<lang>.txt.xz      a paragraph a line, an empty line between documents (articles)
OUT/{train,heldout}/para/en-<lang>.txt.zip  UDHR.en-<lang>.en and UDHR.en-<lang>.<lang>, line-aligned
OUT/SOURCE.md                               where the text comes from; written last
"""

import io
import lzma
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from data_prep import udhr
from data_prep.parallel import on_root
from data_prep.progress import say
from data_prep.store import write_file
from data_prep.udhr import Declaration

# Kept out of training in every language and edition. Spread over the text, without twins elsewhere in it: slavery,
# arrest, movement, property, leisure, culture.
HELDOUT = (4, 9, 13, 17, 24, 27)

_SOURCE = """# Sample corpus

The Universal Declaration of Human Rights in {languages} languages, from the npm package `{package}`
(SHA-256 {sha256}), which takes it from the "UDHR in Unicode" project
(https://www.unicode.org/udhr/). The declaration is free of copyright; the package is under the MIT licence.

`train/` holds the preamble and the articles but {heldout}; `heldout/` holds those. Headings are left out.
A document is an article. Some languages come in several editions or orthographies: the others are more documents in
`train/mono` and take no part in pairs. Pairs are aligned paragraph by paragraph where both sides have as many, else
article by article.
"""


@dataclass(frozen=True)
class SampleConfig:
    """Write the sample corpus (Universal Declaration of Human Rights, 91 languages)."""

    out: Path
    """Folder to write."""
    package: Path | None = None
    """The npm package udhr 6.0.0 as a .tgz file, where there is no network; fetched with npm if absent."""


def run(config: SampleConfig) -> None:
    """`_run`, once, however many ranks a launcher started."""
    on_root(lambda: _run(config))


def _run(config: SampleConfig) -> None:
    """Fetch the package, write both layouts. Raises ValueError when it cannot be fetched or is another package."""
    source = _SOURCE.format(
        languages=len(udhr.FILES), package=udhr.PACKAGE, sha256=udhr.SHA256, heldout=", ".join(map(str, HELDOUT))
    )
    marker = config.out / "SOURCE.md"
    if marker.exists() and marker.read_text(encoding="utf-8") == source:
        say(f"{config.out} is complete")
        return
    if marker.exists() and not marker.read_text(encoding="utf-8", errors="replace").startswith("# Sample corpus"):
        raise ValueError(f"{marker} is not of the sample corpus, which would replace it: choose another --out")
    if config.package is not None and not config.package.is_file():
        raise ValueError(f"{config.package} does not exist: --package takes the file `npm pack {udhr.PACKAGE}` writes")
    with tempfile.TemporaryDirectory() as folder:
        declarations = udhr.read(config.package or udhr.fetch(Path(folder)))
    marker.unlink(missing_ok=True)
    for part in ("train", "heldout"):
        kept = {language: [_select(d, part) for d in editions] for language, editions in declarations.items()}
        for language, editions in kept.items():
            others = editions[1:] if part == "train" else []
            _write_mono(config.out / part / "mono" / f"{language}.txt.xz", [editions[0], *others])
            if language != "en":
                _write_pairs(config.out / part / "para", language, kept["en"][0], editions[0])
    write_file(marker, source.encode(), config.out)
    say(f"{config.out}: {len(declarations)} languages, text in train/ and heldout/ (see SOURCE.md)")


def _select(declaration: Declaration, part: str) -> Declaration:
    return {number: text for number, text in declaration.items() if (number in HELDOUT) == (part == "heldout")}


def _write_mono(path: Path, editions: list[Declaration]) -> None:
    documents = ["".join(f"{paragraph}\n" for paragraph in text) for edition in editions for text in edition.values()]
    write_file(path, lzma.compress("\n".join(documents).encode()), path.parent)


def _write_pairs(folder: Path, language: str, english: Declaration, other: Declaration) -> None:
    pairs: list[tuple[str, str]] = []
    for number in sorted(english.keys() & other.keys()):
        ours, theirs = english[number], other[number]
        pairs += zip(ours, theirs, strict=True) if len(ours) == len(theirs) else [(" ".join(ours), " ".join(theirs))]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for side, code in enumerate(("en", language)):
            member = zipfile.ZipInfo(f"UDHR.en-{language}.{code}")  # its date is 1980-01-01: the same bytes every time
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, "".join(f"{pair[side]}\n" for pair in pairs))
    write_file(folder / f"en-{language}.txt.zip", packed.getvalue(), folder)

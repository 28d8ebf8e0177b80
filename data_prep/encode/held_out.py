"""Finds text that `encode` leaves out: text of the other split, and the lines of test sets. Texts that the model
cannot tell apart count as the same text."""

import re
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from itertools import compress, pairwise
from pathlib import Path

import numpy as np

from data_prep.filters.clean import clean_lines, text_warnings
from data_prep.readers.corpus_files import CorpusPath, read_decompressed
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.io.files import refuse_carriage_returns

OTHER_SPLIT = "other_split"
HELD_OUT_TEXT = "held_out_text"
_MARKUP = re.compile(r".*\t.*|\{.*\}|<.*>")  # a line of a table, of JSON Lines, or of XML


def in_other_split(split: str, share: float, texts: Iterable[bytes]) -> np.ndarray:
    """bool [texts]: True for each text that is not in `split`, `train` or `heldout`. `share` is the share
    of all texts that is held out.

    A 64-bit hash (BLAKE2b) of a text's normal form (`Vocabulary.normalise`) decides the split of the text. So texts
    that the model cannot tell apart are in one split, even if they are in different files.
    """
    digests = (blake2b(text, digest_size=8, person=b"xlme held out").digest() for text in texts)
    limit = int(share * 2**64)
    held_out = np.array([int.from_bytes(digest, "little") < limit for digest in digests], bool)
    return held_out if split == "train" else ~held_out


def read_digests(paths: Iterable[Path], vocabulary: Vocabulary) -> set[bytes]:
    """Read the lines of UTF-8 files, compressed or not, such as a test set's. Returns their hashes (`digest_lines`).

    Raises ValueError for a file that is not UTF-8 or does not have one sentence per line, for a folder or device, and
    for a pipe, because every process and every later run must read the files again.
    """
    digests: set[bytes] = set()
    for path in paths:
        corpus_path = CorpusPath(str(path.absolute().parent), path.name)
        if corpus_path.is_pipe:
            raise ValueError(f"{path} is a pipe, which can be read once: store its lines in a file")
        if path.exists() and not path.is_file():
            raise ValueError(f"--without {path} is not a file: name a file with text")
        lines = _clean_sentences(path, b"".join(read_decompressed(corpus_path)))
        ids, lengths = vocabulary.encode_lines(lines)
        digests.update(compress(digest_lines(ids, lengths), lengths))  # without lines that have no ids
    return digests


def _clean_sentences(path: Path, data: bytes) -> list[str]:
    """Clean the lines of a test set as training text is cleaned, and leave out empty lines. Raises ValueError if the
    file is not UTF-8 or does not have one sentence per line."""
    repaired = Counter[str]()
    lines = list(filter(None, clean_lines(data, repaired)))
    effect = "so --without has no effect"
    if repaired["invalid_utf8"]:
        raise ValueError(f"{path} is not UTF-8: convert it")
    if not lines:
        raise ValueError(f"{path} has no text, {effect}: name the file of the test set")
    refuse_carriage_returns(data, path)
    if 2 * sum(map(bool, map(_MARKUP.fullmatch, lines))) > len(lines):
        raise ValueError(f"{path} is a table, JSON or XML, {effect}: store only the sentences, one per line")
    for warning in text_warnings(len(lines), repaired):
        raise ValueError(f"{path}: {warning}")
    return lines


def digest_lines(ids: np.ndarray, lengths: np.ndarray) -> list[bytes]:
    """Returns a hash of each line's token ids. `ids` are those of all lines, one after the other, and `lengths` are the
    numbers of ids of the lines."""
    data, stops = ids.tobytes(), (np.cumsum(lengths) * ids.itemsize).tolist()
    return [blake2b(data[start:stop], digest_size=16).digest() for start, stop in pairwise([0, *stops])]

"""Tables of pairs, a row a line and tabs between the columns: WikiMatrix's and CCAligned's .tsv files."""

import math
import re
from collections.abc import Iterator

from data_prep.clean import Counts, clean_lines
from data_prep.corpus_files import MAX_LINE, MAX_ROW, clip_lines, cut_blocks, read_text
from data_prep.readers.reader import Input, PairReader, ScoredPair, TextBlock, pieces


class TableReader(PairReader):
    """A pair a row, in columns that the description names."""

    boundary = re.compile(rb"\n")

    def __init__(self, *columns: str):
        self.columns = columns

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Blocks of whole rows: one over MAX_ROW bytes, which is dropped later, is clipped lest it is cut in two."""
        for data, _ in cut_blocks(clip_lines(read_text(source.paths[0]), MAX_ROW), size, self.boundary):
            yield TextBlock((data,))

    def scored(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[ScoredPair]:
        """The pairs of one block, with the column `score` if there is one."""
        for piece in pieces(block.sides[0]):
            rows = zip(clean_lines(piece, counts.repaired), piece.removesuffix(b"\n").split(b"\n"), strict=True)
            for line, raw in rows:
                pair = "long_line" if len(raw) > MAX_ROW else _pair(line, source.columns)
                if isinstance(pair, str):
                    counts.units_in += 1
                    counts.dropped[pair] += 1
                else:
                    yield pair


def _pair(row: str, columns: tuple[str, ...]) -> ScoredPair | str:
    """Both sides and the score, or the reason for which the row is dropped."""
    fields = dict(zip(columns, row.split("\t"), strict=False))
    if row.count("\t") != len(columns) - 1:  # white space at the ends was removed, and with it an empty field there
        return "malformed"
    try:
        score = float(fields["score"]) if "score" in fields else None
    except ValueError:
        return "malformed"
    if score is not None and not math.isfinite(score):
        return "malformed"
    a, b = fields["source"].strip(), fields["target"].strip()
    if max(len(a.encode()), len(b.encode())) > MAX_LINE:
        return "long_line"
    return a, b, score

"""Tables of pairs, a row a line and tabs between the columns: WikiMatrix's and CCAligned's .tsv files."""

import math
import re
from collections.abc import Iterator

from data_prep.clean import Counts, clean_lines
from data_prep.corpus_files import MAX_LINE, MAX_ROW, chunks, clip_lines, cut_blocks, open_stream
from data_prep.readers.reader import Input, PairReader, TextBlock, pieces


class TableReader(PairReader):
    """A pair a row, in columns that the description names."""

    boundary = re.compile(rb"\n")

    def __init__(self, *columns: str):
        self.columns = columns

    def columns_problem(self, columns: tuple[str, ...]) -> str:
        """Both sides must be among them."""
        return "" if {"source", "target"} <= set(columns) else "'source' and 'target' must be among them"

    def blocks(self, source: Input, size: int) -> Iterator[TextBlock]:
        """Blocks of whole rows: one over MAX_ROW bytes, which is dropped later, is clipped lest it is cut in two."""
        text = clip_lines(chunks(open_stream(source.paths[0]), str(source.paths[0])), MAX_ROW)
        for data, _ in cut_blocks(text, size, self.boundary):
            yield TextBlock((data,))

    def scored(self, source: Input, block: TextBlock, counts: Counts) -> Iterator[tuple[str, str, float | None]]:
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


def _pair(row: str, columns: tuple[str, ...]) -> tuple[str, str, float | None] | str:
    """Both sides and the score, or the reason for which the row is dropped."""
    fields = dict(zip(columns, row.split("\t"), strict=False))
    if row.count("\t") != len(columns) - 1:  # white space at the ends was removed, and with it an empty field there
        return "malformed"
    score = None
    if "score" in fields:
        try:
            score = float(fields["score"])
        except ValueError:
            return "malformed"
        if not math.isfinite(score):
            return "malformed"
    a, b = fields["source"].strip(), fields["target"].strip()
    if max(len(a.encode()), len(b.encode())) > MAX_LINE:
        return "long_line"
    return a, b, score

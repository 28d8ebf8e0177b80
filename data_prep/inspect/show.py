"""Stage `show` prints training rows as text, with their items, their languages and the positions that training
masks."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.text import Text

from data_prep.languages import language_of
from data_prep.progress import printable, warn
from data_prep.store import is_intact, mixed_tasks, read_arrow
from xlme_ds.data.masking import draw_masks
from xlme_ds.data.schema import EOS, LAYOUTS, TASKS, Layout, Manifest, Rows, read_manifest, row_schema
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary

_SPACE = "▁"  # SentencePiece's mark for a space


@dataclass(frozen=True)
class ShowConfig:
    """Print training rows as text, with their items, languages and masked positions."""

    data: Path
    """Folder that `mix` wrote."""
    task: Literal["mono", "para"] | None = None
    """Print rows of this task only; by default, of both tasks."""
    rows: int = 5
    """Number of rows to print for each task."""
    start: int = 0
    """Index of the first row to look at, counted from 0."""
    language: str | None = None
    """Print only rows that have an item in this language."""
    seed: int = 1
    """The run's --seed, which decides the masked positions."""
    mask_fraction: float = 0.15
    """The run's --objective.mask-fraction; 0 marks no position."""


@dataclass(frozen=True)
class ShownRow:
    """One training row: its index among the rows of its task, its `tokens` int32 [T], the `lengths` of its items, and
    in `languages` the language code of each side of each item."""

    index: int
    tokens: np.ndarray
    lengths: list[int]
    languages: list[str]

    def masked(self, task: str, seed: int, fraction: float) -> set[int]:
        """The positions that training masks when it reads this row for the first time."""
        if not fraction:
            return set()
        lengths, no_languages = np.array(self.lengths, np.int64), np.zeros(0, np.int64)
        rows = Rows(self.tokens[None], np.array([len(lengths)]), lengths, no_languages)
        positions, _ = draw_masks([(TASKS.index(task), rows, np.array([self.index]))], seed, fraction)
        return set(positions.tolist())


def run(config: ShowConfig) -> None:
    """Print rows. Raises ValueError if no row fits the settings, or if `mix` did not write the folder."""
    if config.rows < 1 or config.start < 0:
        raise ValueError(
            f"--rows is {config.rows} and --start is {config.start}: set --rows to 1 or more, --start to 0 or more"
        )
    if not 0 <= config.mask_fraction < 1:
        raise ValueError(f"--mask-fraction is {config.mask_fraction}: it must be at least 0 and below 1")
    tasks = [config.task] if config.task else mixed_tasks(config.data)
    warnings = list(filter(None, [_show(config, task) for task in tasks]))
    if len(warnings) == len(tasks):
        raise ValueError(warnings[0])
    for warning in warnings:
        warn(warning)


def _show(config: ShowConfig, task: str) -> str:
    """Print rows of a task. Returns a warning if no row fits the settings, else an empty string."""
    folder, console = config.data / task, Console(highlight=False)
    manifest = read_manifest(folder)
    if manifest.stage != "mix":
        raise ValueError(f"{folder} was written by stage {manifest.stage}: show reads what mix wrote")
    vocabulary = Vocabulary(config.data / "vocab" / MODEL_FILE)
    if vocabulary.sha256 != manifest.vocabulary_sha256:
        raise ValueError(
            f"{vocabulary.path} is not the vocabulary that {config.data} was made with: put the original file there"
        )
    language = config.language
    if language is not None:
        with suppress(ValueError):  # a name that is no language code stays as it is; the next check reports it
            language = language_of(language)
        if language not in manifest.languages:
            return f"{folder} has no text in {language}: its languages are {', '.join(manifest.languages)}"
    is_plain = not console.is_terminal  # a file or a pipe, which shows no colours
    has_row = False
    rows = min(config.rows, manifest.rows)  # `islice` takes no number above sys.maxsize
    for row in islice(rows_from(folder, manifest, config.start, language), rows):
        has_row = True
        for line in _describe(row, task, LAYOUTS[manifest.layout], vocabulary, config, brackets=is_plain):
            console.print(line, soft_wrap=is_plain)
    if has_row:
        return ""
    rows_name = "row" if manifest.rows == 1 else "rows"
    row_name = f"row in {config.language}" if config.language else "row"
    return f"{folder} has no {row_name} from row {config.start} on: it has {manifest.rows} {rows_name}"


def rows_from(folder: Path, manifest: Manifest, start: int, language: str | None) -> Iterator[ShownRow]:
    """Yield the rows from index `start` on; if `language` is given, only rows that have an item in this language.
    Raises ValueError for a damaged shard."""
    rows_before = 0  # in the shards and record batches before
    for shard in manifest.shards:
        if rows_before + shard.rows <= start:
            rows_before += shard.rows
            continue
        path, advice = folder / shard.name, "check the folder with `xlme prep verify`"
        if not is_intact(folder, shard):
            raise ValueError(f"{path} is missing, or not the file that the manifest lists: {advice}")
        for batch in read_arrow(path):
            if batch.schema != row_schema(manifest.settings["row_tokens"]):
                raise ValueError(f"{path} does not have the columns of training rows: {advice}")
            for i, indices in enumerate(batch.column("languages").to_pylist()):
                codes = [manifest.languages[index] for index in indices]
                if rows_before + i >= start and (language is None or language in codes):
                    tokens = np.array(batch.column("tokens")[i].values, np.int32)
                    yield ShownRow(rows_before + i, tokens, batch.column("lengths")[i].as_py(), codes)
            rows_before += batch.num_rows


def _describe(
    row: ShownRow, task: str, layout: Layout, vocabulary: Vocabulary, config: ShowConfig, brackets: bool
) -> Iterator[Text]:
    """Yield the lines to print for one row: a heading, then a line for each side of each item, then an empty line."""
    masked = row.masked(task, config.seed, config.mask_fraction)
    sizes = f"{len(row.lengths)} item{'s' * (len(row.lengths) != 1)}, {sum(row.lengths)} of {len(row.tokens)} tokens"
    yield Text(f"{task} row {row.index}: {sizes}, {len(masked)} masked", style="bold")
    sides = len(row.languages) // len(row.lengths)
    codes = iter(row.languages)
    for item, (begin, end) in enumerate(pairwise(np.cumsum([0, *row.lengths]).tolist()), 1):
        assert row.tokens[begin] == layout.opening and row.tokens[end - 1] == EOS
        spans = [(begin + 1, end - 1)]  # an item of one side may have several documents, with `</s>` in between
        if sides == 2:
            separator = begin + 1 + int(np.argmax(row.tokens[begin + 1 : end] == EOS))  # the first `</s>`
            spans = [(begin + 1, separator), (separator + len(layout.between), end - 1)]
        for first, stop in spans:
            label = Text(f"{item:>4} {next(codes):<8}", style="cyan")
            yield label + Text(" ") + text_of(row.tokens, first, stop, masked, vocabulary, brackets)
    yield Text("")


def text_of(
    tokens: np.ndarray, first: int, stop: int, masked: set[int], vocabulary: Vocabulary, brackets: bool
) -> Text:
    """The text of the tokens at positions [first, stop), including each `</s>`.

    Tokens at `masked` positions have reversed colours. With `brackets`, for output without colour, these tokens are
    in ⟦⟧ too.
    """
    line = Text()
    for position in range(first, stop):
        token = int(tokens[position])
        piece = vocabulary.piece(token)
        if token == EOS:
            line.append(f" {piece}", style="dim")
            continue
        if piece.startswith(_SPACE) and position > first:
            line.append(" ")
        text = printable(piece.removeprefix(_SPACE).replace(_SPACE, " "))
        if position in masked:
            line.append(f"⟦{text or _SPACE}⟧" if brackets else text or " ", style="reverse")
        else:
            line.append(text)
    return line

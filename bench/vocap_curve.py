"""The curves of stage `vocap` against vocabularies that SentencePiece trains from nothing at the same sizes.

    python -m bench.vocap_curve --mono ../shared/data/corpus/mono [--languages sw hi ja de] [--lines 3000]

Prints the ALP of both (mean log-probability of a sentence, nats) and their ratio: over 1, the path's is the worse.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import sentencepiece as spm
import tyro

from data_prep.clean import Counts
from data_prep.readers import documents, find_documents
from data_prep.vocap_curve import SPECIALS, count_words, curve, measure, parse


@dataclass(frozen=True)
class Settings:
    """What is compared."""

    mono: Path
    """Folder of documents, `<lang>.txt[.xz|...]`."""
    languages: tuple[str, ...] = ("sw", "hi", "ja", "de")
    lines: int = 3000
    """Lines of a language at most, from its start."""
    largest: int = 4000
    least: int = 500
    shrink: float = 0.6
    character_coverage: float = 0.9995


def compare(lines: list[str], settings: Settings) -> Iterator[tuple[int, float, float]]:
    """(pieces, ALP on the pruning path, ALP of a training from nothing)."""
    text = count_words(lines)
    for point in curve(text, settings.largest, settings.least, settings.shrink, settings.character_coverage):
        model = io.BytesIO()
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=len(point.pieces) + len(SPECIALS),
            hard_vocab_limit=False,
            character_coverage=settings.character_coverage,
            normalization_rule_name="nmt_nfkc",
            minloglevel=2,
        )
        yield len(point.pieces), point.alp, measure(text, parse(model.getvalue())).alp


def main(settings: Settings) -> None:
    """Print a Markdown table."""
    print("| language | pieces | path | from nothing | ratio |\n|---|---|---|---|---|")
    for source in find_documents(settings.mono):
        if source.languages[0] in settings.languages:
            found = chain.from_iterable(documents(source, Counts("documents")))
            lines = [line[:1000] for line in islice(found, settings.lines)]
            for size, path, trained in compare(lines, settings):
                row = f"{size:,} | {path:.1f} | {trained:.1f} | {path / trained:.3f}"
                print(f"| {source.languages[0]} | {row} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Settings))

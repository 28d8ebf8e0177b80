"""`xlme predict --model PATH --text TEXT ...` shows what a model predicts for sentences."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import fail, program
from .io.help import call_from_command_line

if TYPE_CHECKING:
    from .api import ScoredPiece

_SHOWN = 3  # number of tokens that are shown for a <mask>


@dataclass(frozen=True)
class PredictSettings:
    """Show the likeliest tokens for each <mask> of a text. In a text without <mask>, mark the words that the
    discriminator takes for replacements.

    xlme predict --model runs/quickstart --text "Everyone has the <mask> to education." "All are equel."
    """

    model: Path
    """Folder of a run, or of its export; RUN@STEP names a checkpoint."""
    text: tuple[str, ...]
    """Texts, each in quotes."""
    language: str = ""
    """Code of the texts' language, for a model with language embeddings."""


def main(arguments: list[str] | None = None) -> None:
    """Print the predictions; a user's mistake ends in one line on stderr and exit code 2."""
    settings = call_from_command_line(PredictSettings, program("predict"), arguments)
    try:
        run(settings)
    except (ValueError, OSError) as error:
        fail("xlme predict", error)


def run(settings: PredictSettings) -> None:
    """Print a line for each text: `fill`, the text and the likeliest tokens of each `<mask>`, or `judge`, the text with
    the probability after each word that is more likely replaced than not.

    Raises ValueError if the model cannot read a text or has no head for it.
    """
    from rich.console import Console
    from rich.text import Text

    from . import load  # it loads torch

    model, console = load(settings.model), Console(highlight=False, emoji=False)
    for text in settings.text:
        if "<mask>" in text:
            masks = model.fill(text, top=_SHOWN, language=settings.language)
            likeliest = "; ".join(", ".join(map(_with_percent, pieces)) for pieces in masks)
            console.print(f"fill:  {text}  {likeliest}", markup=False, soft_wrap=True)
            continue
        line = Text("judge: ")
        for word, probability in _words(model.judge(text, language=settings.language)):
            if probability > 0.5:
                line.append(f"{word} [{probability:.0%} replaced] ", "bold red")
            else:
                line.append(f"{word} ")
        line.rstrip()
        console.print(line, soft_wrap=True)


def _with_percent(piece: "ScoredPiece") -> str:
    return f"{piece.text.lstrip('▁') or piece.text} {piece.probability:.0%}"


def _words(pieces: "Iterable[ScoredPiece]") -> list[tuple[str, float]]:
    """Each word with the highest probability of any of its pieces."""
    words: list[tuple[str, float]] = []
    for piece in pieces:
        new_word = piece.text.startswith("▁") or not words
        word_start, highest = ("", 0.0) if new_word else words.pop()
        words.append((word_start + piece.text.removeprefix("▁"), max(highest, piece.probability)))
    return words


if __name__ == "__main__":
    main()

"""Machine translation: the objective, the decoder, and what `xlme translate` does, as a function.

xlme.translate.lines("runs/mt", ["A sentence."], "en", "de")
"""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["lines"]


def lines(
    model: Path | str, text: Sequence[str], source: str, target: str, beam: int = 4, length_penalty: float = 1.0
) -> list[str]:
    """The lines `text` translated from the language `source` into `target`, by a model trained for objective.name mt.

    `beam`: hypotheses that are followed; 1 takes the likeliest token each time. `length_penalty`: above 1 prefers
    longer translations. Raises ValueError for another model or an unknown code of a language.
    """
    from .text import load_translator, translate_lines

    translator = load_translator(Path(model))
    languages = translator.language(source, "source"), translator.language(target, "target")
    return translate_lines(translator, text, languages, beam, length_penalty).lines


def __dir__() -> list[str]:
    return __all__

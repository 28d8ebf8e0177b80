"""Translate text with a trained model.

xlme.translate.lines("runs/mt", ["A sentence."], "en", "de")
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

from ..io.argument_types import check_argument_types, require_unicode

__all__ = ["lines"]


@check_argument_types
def lines(
    model: Path | str, text: Sequence[str], source: str, target: str, beam: int = 4, length_penalty: float = 1.0
) -> list[str]:
    """The lines `text` translated from the language `source` into `target`, by a model trained for objective.name mt,
    which runs on the GPU if there is one. Lines that are too long for the model are cut, with a warning.

    `beam`: number of hypotheses; 1 takes the likeliest token each time. `length_penalty`: above 1 prefers
    longer translations. Raises ValueError for a model without a decoder, an unknown language and a single string.
    """
    from .translator import check_search, load_translator, translate_lines

    if isinstance(text, str):
        raise ValueError("the text is one string: give a list of lines")
    unicode_lines = [require_unicode(line) for line in text]
    translator = load_translator(Path(model))
    check_search(translator, beam, length_penalty)
    languages = translator.language_index(source, "source"), translator.language_index(target, "target")
    translations, cut = translate_lines(translator, unicode_lines, languages, beam, length_penalty)
    if cut:
        counted = f"{len(cut)} of {len(unicode_lines)} lines"
        warnings.warn(f"{counted} were cut to the length that the model reads", stacklevel=3)
    return translations


def __dir__() -> list[str]:
    return __all__

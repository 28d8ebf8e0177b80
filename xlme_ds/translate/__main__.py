"""`xlme translate --model RUN --source FILE --from CODE --to CODE --out FILE` translates line by line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..cli import fail, note, program
from ..io.files import require_writable_file, write_text
from ..io.help import call_from_command_line

_USAGE = "xlme translate --model PATH --source PATH --from LANG --to LANG (--out PATH | --pairs PATH) [OPTIONS]"
_MAX_NAMED = 5  # largest number of line numbers that a note lists


@dataclass(frozen=True)
class TranslateSettings:
    """Translate the lines of a file with a model trained for objective.name mt, on the GPU if there is one.

    xlme translate --model runs/mt --source test.de --from de --to en --out test.mt.en
    """

    model: Path
    """Folder of a run, or of its export; RUN@STEP names a checkpoint. An unfinished run counts as its newest
    checkpoint."""
    source: Path
    """UTF-8 text, one sentence per line; the translation of a blank line is empty."""
    from_language: Annotated[str, tyro.conf.arg(name="from", metavar="LANG")]
    """Code of the source's language, as in the training data."""
    to_language: Annotated[str, tyro.conf.arg(name="to", metavar="LANG")]
    """Code of the language to translate into."""
    out: Path | None = None
    """File to write, with one line per line of the source. Required without --pairs."""
    pairs: Path | None = None
    """In place of --out, for back-translation: folder to write pairs into, which `xlme prep encode --para` reads. After
    a stop, the same command resumes."""
    beam: int = 4
    """Number of hypotheses per sentence; 1 takes the most likely token each time, and is fastest."""
    length_penalty: float = 1.0
    """Log-probabilities are divided by the length to this power; above 1 prefers longer translations."""
    reference: Path | None = None
    """File with a human translation of each line; BLEU and chrF are printed."""
    trained_on: tuple[Path, ...] = ()
    """Folders that `xlme prep mix` wrote; the number of lines of source and --reference that they contain is
    printed."""


def main(arguments: list[str] | None = None) -> None:
    """Write the translation; a user's mistake ends in one line on stderr and exit code 2, with nothing written."""
    settings = call_from_command_line(TranslateSettings, program("translate"), arguments, usage=_USAGE)
    try:
        run(settings)
    except (ValueError, OSError) as error:
        fail("xlme translate", error)


def run(settings: TranslateSettings) -> None:
    """Translate, write and score. Raises ValueError or OSError for settings that do not fit, before it writes
    anything."""
    from .pairs import write_pairs  # it loads torch
    from .translator import bleu_and_chrf, check_search, leak_report, load_translator, read_lines, translate_lines

    _check_outputs(settings)
    for path in filter(None, (settings.source, settings.reference)):
        if not path.exists():
            raise ValueError(f"{path} does not exist: name a text file with a sentence per line")
        if path.is_dir():
            raise ValueError(f"{path} is a folder: name a text file with a sentence per line")
    lines = read_lines(settings.source)
    if not any(line.strip() for line in lines):
        raise ValueError(f"{settings.source} has no text: name another --source")
    reference = None if settings.reference is None else read_lines(settings.reference)
    if reference is not None:
        if len(reference) != len(lines):
            raise ValueError(
                f"{settings.reference} has {len(reference)} lines, {settings.source} {len(lines)}: a reference needs "
                "one line per line of the source"
            )
        # Without sacreBLEU, this raises now, not at the end.
        bleu_and_chrf(reference[:1], reference[:1], settings.to_language)
    translator = load_translator(settings.model)
    check_search(translator, settings.beam, settings.length_penalty)
    languages = (
        translator.language_index(settings.from_language, "--from"),
        translator.language_index(settings.to_language, "--to"),
    )
    if settings.pairs is not None:
        if languages[0] == languages[1]:
            raise ValueError(
                f"--from {settings.from_language} and --to {settings.to_language} are one language, and --pairs needs "
                "two: change one"
            )
        write_pairs(
            settings.pairs,
            (settings.from_language, settings.to_language),
            translator,
            lines,
            languages,
            settings.beam,
            settings.length_penalty,
        )
        return
    leaks = leak_report(translator, settings.source, lines, reference, settings.trained_on)
    translations, cut = translate_lines(translator, lines, languages, settings.beam, settings.length_penalty)
    assert settings.out is not None
    write_text(settings.out, "".join(f"{line}\n" for line in translations))
    if cut:
        named = " ".join(map(str, cut[:_MAX_NAMED])) + (" ..." if len(cut) > _MAX_NAMED else "")
        longest = translator.model.cfg.max_positions - 2
        note(f"{settings.source}: {len(cut)} lines have more than {longest} tokens and were cut: {named}")
    print(f"{settings.out}: {len(translations)} lines")
    if reference is not None:
        print("\n".join(bleu_and_chrf(translations, reference, settings.to_language)))
    print(leaks, end="")


def _check_outputs(settings: TranslateSettings) -> None:
    from .translator import COMPRESSED

    out = settings.out
    if (out is None) == (settings.pairs is None):
        raise ValueError("--out names a file to write and --pairs a folder: give one of them")
    if settings.pairs is not None and (settings.reference is not None or settings.trained_on):
        raise ValueError("--pairs is for text without a translation: leave out --reference and --trained-on")
    if out is None:
        return
    inputs = {"source": settings.source, "reference": settings.reference}
    both_exist = [(name, path) for name, path in inputs.items() if path and path.exists() and out.exists()]
    if overwritten := [name for name, path in both_exist if out.samefile(path)]:
        raise ValueError(f"--out {out} is the {' and the '.join(overwritten)}: name another file")
    if out.suffix in COMPRESSED:
        raise ValueError(f"--out {out} would be plain text: leave out {out.suffix}")
    require_writable_file(out, "--out")


if __name__ == "__main__":
    main()

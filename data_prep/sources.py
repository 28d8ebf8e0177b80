"""What text a stage reads: the flags that name it, and the inputs that they stand for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import UseAppendAction

from data_prep.corpus import Corpus, inputs_of, read_corpora
from data_prep.readers import Input, find_documents, find_pairs
from xlme_ds.data.schema import TASKS


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The flags of every stage that reads text."""

    mono: Path | None = None
    """Folder of <lang>.txt[.xz|.gz|.bz2|.zst]: a paragraph a line, an empty line between documents."""
    para: Path | None = None
    """Folder of a-b.txt.zip (OPUS), or of X.a-b.a and X.a-b.b; each side is text of its language."""
    corpus: UseAppendAction[tuple[str, ...]] = ()
    """Corpus description: a .toml file, or the name of a ready one such as cc100; may be given several times."""
    where: UseAppendAction[tuple[str, ...]] = ()
    """NAME=PLACE, the folder or URI of a described corpus instead of the description's; may be given several times."""
    allow_missing: bool = False
    """Go on when files of a description's languages are missing; they are named in a warning."""

    @property
    def names_text(self) -> bool:
        """Whether any text is named."""
        return self.mono is not None or self.para is not None or bool(self.corpus)


@dataclass(frozen=True)
class Sources:
    """The inputs of one task (mono or para) by name, those of one name in the order given, and their descriptions."""

    inputs: tuple[Input, ...]
    corpora: tuple[Corpus, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """What the descriptions say that shapes a stage's bytes."""
        return {key: value for corpus in self.corpora for key, value in corpus.settings.items()}


def find_sources(text: TextConfig) -> dict[str, Sources]:
    """The sources of each task that has any; no content is read but zip listings.

    Raises ValueError when nothing is named, and for names that cannot work.
    """
    if not text.names_text:
        raise ValueError("neither --mono nor --para nor --corpus is given: name at least one corpus")
    corpora = read_corpora(text.corpus, text.where)
    sources = {}
    for task, folder, find in zip(TASKS, (text.mono, text.para), (find_documents, find_pairs), strict=True):
        inputs = [*(find(folder) if folder else []), *inputs_of(corpora, task, text.allow_missing)]
        if inputs:
            _refuse_doubles(inputs)
            inputs.sort(key=lambda source: source.name)  # stable
            sources[task] = Sources(tuple(inputs), tuple(corpus for corpus in corpora if corpus.task == task))
    return sources


def _refuse_doubles(inputs: list[Input]) -> None:
    """Raise ValueError where the same files are named twice for one language or pair: their text would count twice."""
    seen: dict[tuple[str, ...], str] = {}
    for source in inputs:
        files = tuple(str(path.local.resolve()) if path.local else str(path) for path in source.paths)
        by = f"corpus {source.corpus}" if source.corpus else "--mono or --para"
        if (source.name, *files) in seen:
            other = seen[(source.name, *files)]
            raise ValueError(
                f"{source.paths[0]} is named twice for {source.name} (by {other} and by {by}), so its text would count twice: "
                "name it once"
            )
        seen[(source.name, *files)] = by

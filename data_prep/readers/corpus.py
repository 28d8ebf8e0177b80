"""Find the text that a stage of data preparation reads: folders with files for each language or pair, and corpora that
TOML files describe."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep.filters.clean import EXACT_DUPLICATES, LANGUAGE, MODEL, SCRIPT
from data_prep.filters.columns import COLUMN
from data_prep.filters.language_id import labels_of, load_identifier
from data_prep.languages import CC100_LANGUAGES, english_first
from data_prep.progress import warn
from data_prep.readers import READERS, Input, find_documents, find_pairs, make_input
from data_prep.readers.corpus_files import CorpusPath, list_folder
from data_prep.readers.description import CorpusDescription, read_corpora
from data_prep.readers.file_names import Codes, FileNames, filled, languages_of
from xlme_ds.data.schema import TASKS
from xlme_ds.io.files import file_sha256, real_path


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The flags of every stage that reads text."""

    mono: Path | None = None
    """Folder of <lang>.txt[.xz|.gz|.bz2|.zst] (a paragraph per line, an empty line between documents), <lang>.jsonl[…]
    or <lang>.parquet (a document per record, its text in the field `text`)."""
    para: Path | None = None
    """Folder of translation pairs: de-en.txt.zip (OPUS's form), or NAME.de-en.de and NAME.de-en.en, aligned by line."""
    corpus: tuple[str, ...] = ()
    """Corpus descriptions: .toml files, or names of ready ones such as cc100."""
    where: tuple[str, ...] = ()
    """NAME=PLACE: read the corpus NAME from the folder or URI PLACE instead of the one in its description."""
    allow_missing: bool = False
    """Continue when files of a description's languages are missing; a warning names them."""

    @property
    def has_input(self) -> bool:
        """Whether any of the flags names text."""
        return self.mono is not None or self.para is not None or bool(self.corpus)


@dataclass(frozen=True)
class Sources:
    """The inputs of one task (mono or para), sorted by name. If names are equal, inputs of --mono or --para come
    before those of --corpus.

    `settings`: the values of the corpus descriptions that change a stage's output. The names of files and places are
    left out: the output does not depend on them.
    """

    inputs: tuple[Input, ...]
    settings: dict[str, Any]


def find_sources(text: TextConfig) -> dict[str, Sources]:
    """The sources of each task that has text, found by file names, file sizes and the listings of zip files.

    No text is read, except to find copies: files of one language or pair that have the same size are compared. Raises
    ValueError if no text is named, or if a description, a file or its name cannot be used.
    """
    if not text.has_input:
        raise ValueError("neither --mono nor --para nor --corpus is given: name at least one corpus")
    corpora = read_corpora(text.corpus, text.where)
    sources = {}
    folders, finders = (text.mono, text.para), (find_documents, find_pairs)
    for task, folder, find_inputs in zip(TASKS, folders, finders, strict=True):
        inputs = find_inputs(folder) if folder else []
        settings: dict[str, Any] = {}
        for corpus in corpora:
            if corpus.task == task:
                described_inputs = corpus_inputs(corpus, text.allow_missing)
                inputs += described_inputs
                settings |= _described_settings(corpus, described_inputs)
        if inputs:
            _warn_of_unknown_languages(inputs)
            _check_named_once(inputs)
            _warn_of_copies(inputs)
            # `sorted` is stable: equal names stay in the order given.
            sources[task] = Sources(tuple(sorted(inputs, key=lambda source: source.name)), settings)
    return sources


def corpus_inputs(corpus: CorpusDescription, allow_missing: bool = False) -> list[Input]:
    """The inputs of a described corpus, found by file names and the listings of zip files. Warns of files in the
    corpus's folder that are not read.

    Raises ValueError if no file name fits the description, or if a language or pair that it lists has no file. With
    `allow_missing` such a language or pair only gives a warning.
    """
    paths = {path.name: path for path in list_folder(corpus.where, recursive=any("/" in name for name in corpus.files))}
    wanted = None if corpus.codes is None else [*chain.from_iterable(corpus.codes)]
    file_names = FileNames(corpus.files, paths, wanted)
    # For each language or pair to read, its possible spellings.
    to_read = [[codes] for codes in file_names.wanted] if corpus.codes is None else corpus.codes
    inputs: list[Input] = []
    missing = []
    for spellings in to_read:
        for codes in spellings:  # the first spelling that has files is taken
            if names_of_inputs := file_names.files_of(codes):
                for names in names_of_inputs:
                    inputs.append(_make_input(corpus, codes, tuple(paths[name] for name in names)))
                break
        else:
            missing.append("-".join(spellings[0]))
    missing_message = (
        f"{corpus.where} has no file of {corpus.name} for {len(missing)} of {len(to_read)} "
        f"{'languages' if corpus.task == 'mono' else 'pairs'} ({_first_few(missing)})"
    )
    if missing and not allow_missing:
        raise ValueError(
            f"{missing_message}: fetch them, or give --allow-missing, or list fewer in a description of your own"
        )
    if not inputs:
        raise ValueError(
            f"{corpus.where} holds no file of {corpus.name}: the names must be {' or '.join(corpus.files)}"
        )
    if missing:
        warn(missing_message)
    _warn_of_unread(corpus, file_names, inputs)
    return inputs


def _make_input(corpus: CorpusDescription, codes: Codes, paths: tuple[CorpusPath, ...]) -> Input:
    if corpus.format.startswith("arrow") and paths[0].name.rpartition("/")[2].startswith("cache-"):
        # `map` and `filter` of Hugging Face's datasets write such a copy of the data into the same folder.
        raise ValueError(
            f"{paths[0]} is a cache of Hugging Face's datasets, so its text would count twice: set files to "
            "data-*.arrow, or save the dataset by save_to_disk and read that folder"
        )
    return make_input(
        codes,
        paths,
        corpus.format,
        corpus=corpus.name,
        columns=tuple(filled(column, codes) for column in corpus.columns),
        filters=corpus.filters,
        line_end=corpus.line_end,
    )


def _warn_of_unread(corpus: CorpusDescription, file_names: FileNames, inputs: Sequence[Input]) -> None:
    """Warn of the corpus's files that are not read. If no file of a language or pair is read, the warning has its codes
    in place of the files."""
    read = {path.name for source in inputs for path in source.paths}
    languages = {source.languages for source in inputs}
    other_files, other_codes = [], set[str]()
    for name, path in file_names.paths.items():
        if name in read or path.is_folder:
            continue
        codes = next(iter(file_names.codes_in(name)), ())
        if not codes or english_first(languages_of(codes)) in languages:
            other_files.append(name)
        else:
            other_codes.add("-".join(codes))
    code_label = "language" if corpus.task == "mono" else "pair"
    for label, unread in (("file", other_files), (code_label, sorted(other_codes))):
        if unread:
            count = f"{len(unread)} {label}{'s' * (len(unread) != 1)}"
            warn(f"{corpus.where} has {count} that {corpus.name} does not read: {_first_few(unread)}")


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "")


def _described_settings(corpus: CorpusDescription, inputs: list[Input]) -> dict[str, Any]:
    """The values of a description on which the output depends, each with the key `NAME.KEY`. Warns of the inputs'
    languages that the model of the filter `language` does not know."""
    settings: dict[str, Any] = {
        "format": corpus.format,
        "columns": list(corpus.columns),
        "filters": list(corpus.filters),
    }
    if corpus.line_end:
        settings["line_end"] = corpus.line_end
    filters = dict(corpus.filters)
    if LANGUAGE in filters:  # the name of the model in place of the path of its file
        model = filters[LANGUAGE].get(MODEL, "")
        languages = sorted({language for source in inputs for language in source.languages})
        if unknown := [language for language in languages if not labels_of(language, model)]:
            warn(
                f"the filter `language` keeps all text in {', '.join(unknown)}: its model does not know these languages"
            )
        settings["language_model"] = load_identifier(model).name
        filters[LANGUAGE] = {key: value for key, value in filters[LANGUAGE].items() if key != MODEL}
    return {f"{corpus.name}.{key}": value for key, value in (settings | filters).items()}


def _warn_of_unknown_languages(inputs: list[Input]) -> None:
    """Warn of languages that CC-100 does not have: their codes may be typing errors. If such a language has the filter
    `script`, also warn that the filter keeps all its text, because its script is not known."""
    unknown = sorted({language for source in inputs for language in source.languages} - set(CC100_LANGUAGES))
    if unknown:
        warn(f"not among CC-100's languages: {', '.join(unknown)}. Text is read under these codes: check the spelling")
    filtered = {language for source in inputs if SCRIPT in source.filters for language in source.languages}
    if unfiltered := sorted(filtered.intersection(unknown)):
        warn(f"the filter `{SCRIPT}` keeps all text in {', '.join(unfiltered)}: it does not know their scripts")


def _check_named_once(inputs: list[Input]) -> None:
    """Raise ValueError if a text (files, members, columns and chosen rows) is named twice for one language or pair.
    Raise it too if a text is named for two of them, unless its format marks the language of each text."""
    # text -> each language or pair for which it is named -> the flag or corpus that names it
    origins_by_text: dict[tuple[object, ...], dict[str, str]] = {}
    for source in inputs:
        origin = f"corpus {source.corpus}" if source.corpus else "--mono or --para"
        text = (*sorted(map(_file_identity, source.paths)), source.members, *_chosen_part(source))
        origins = origins_by_text.setdefault(text, {})
        first_name = next(iter(origins), source.name)
        if first_name != source.name and not READERS[source.format].has_language_tags:
            raise ValueError(
                f"{source.paths[0]} is named for {first_name} and for {source.name}, which cannot both be right: name "
                "another file for one of them"
            )
        if source.name in origins:
            raise ValueError(
                f"{source.paths[0]} is named twice for {source.name} (by {origins[source.name]} and by {origin}), so "
                "its text would count twice: name it once"
            )
        origins[source.name] = origin


def _warn_of_copies(inputs: list[Input]) -> None:
    """Warn of files of one language or pair, such as en.txt and eng.txt, that have the same bytes, unless the filter
    `exact_duplicates` removes the copy."""
    by_sizes: dict[tuple[object, ...], list[Input]] = {}  # only files of equal size need checksums
    for source in inputs:
        if source.size and all(path.local_path and not path.is_pipe for path in source.paths):
            by_sizes.setdefault((source.name, *sorted(size for _, size in source.files)), []).append(source)
    for same_size in (sources for sources in by_sizes.values() if len(sources) > 1):
        by_text: dict[tuple[object, ...], Input] = {}
        for source in same_size:
            checksums = sorted(file_sha256(path.local_path) for path in source.paths if path.local_path)
            first = by_text.setdefault((*checksums, *_chosen_part(source)), source)
            if first is not source and not all(EXACT_DUPLICATES in copy.filters for copy in (source, first)):
                files, first_files = (" and ".join(map(str, copy.paths)) for copy in (source, first))
                verb = "has" if len(first.paths) == 1 else "have"
                warn(
                    f"the text of {files} counts twice as {source.name}, because {first_files} {verb} the same bytes: "
                    "remove one"
                )


def _chosen_part(source: Input) -> tuple[object, ...]:
    """The part of its files that an input reads: columns, and rows that the filter `column` chooses."""
    return source.columns, repr(source.filters.get(COLUMN))


def _file_identity(path: CorpusPath) -> str:
    """A string that is the same for all names of a local file, such as symbolic and hard links."""
    local = path.local_path
    if local is None or not local.exists():
        return str(local or path)
    status = local.stat()
    return f"{status.st_dev} {status.st_ino}" if status.st_nlink > 1 else str(real_path(local))

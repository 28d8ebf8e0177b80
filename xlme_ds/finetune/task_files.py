"""Find the files of a task, sort them by purpose (to train, to score, to choose settings), and read their examples.

In files of tagged words, a line has one word and its tag. In files of pairs, a line has two texts and a label.
Questions are in SQuAD's JSON. The test sets in XTREME's download have no labels: a line has only the word or the two
texts, and the answers to a question are empty.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ..io.files import file_sha256, real_path, refuse_carriage_returns, visible_paths
from ..io.folders import require_folder
from .downstream_tasks import DownstreamTask
from .settings import TuningConfig

_CONLL_LANGUAGES = {"eng": "en", "deu": "de", "esp": "es", "ned": "nl"}
_SPLITS = {"testa": "dev", "testb": "test", "": "test"}  # "": a test set of XQuAD or TyDiQA, whose pattern has no split
NO_LABEL = ""  # in place of a missing tag or label; a question without a label has an empty list of answers
HELD_OUT_EVERY = 10  # if a run holds out training examples, it holds out one in this many


class Sentence(NamedTuple):
    """Words, and one tag for each."""

    words: list[str]
    tags: list[str]


class TextPair(NamedTuple):
    """Two texts and their label."""

    first: str
    second: str
    label: str


class Question(NamedTuple):
    """A question about a text (the context), which contains the answer."""

    id: str
    question: str
    context: str
    answers: list[tuple[str, int]]  # (text, index of its first character in the context); any of them is right


Example = Sentence | TextPair | Question


class TaskFile(NamedTuple):
    """A file with examples for a task."""

    path: Path
    language: str
    split: str  # "train", "dev" or "test"
    own_dataset: bool  # False for a file of another dataset that the task is trained on, such as SQuAD for MLQA

    @property
    def may_lack_labels(self) -> bool:
        """Whether the examples may have no labels. Only those of the task's test sets may: training and the choice of
        settings need labels."""
        return self.own_dataset and self.split == "test"


class TaskSets(NamedTuple):
    """The files of a run by their purpose."""

    train: list[TaskFile]
    test: list[TaskFile]  # files to score: the test sets, or the dev sets on request and if no language has a test set
    # Files by which settings are chosen: the dev sets of the languages that are trained on or, if `held_out` is True,
    # the training files.
    dev: list[TaskFile]
    held_out: bool  # whether a tenth of each training file is left out of training, to serve as dev set
    has_dev: bool  # whether the task has dev sets of its own
    dev_only: list[str]  # languages with a dev set only, which is neither scored nor used to choose settings

    def fingerprints(self) -> dict[str, str]:
        """The SHA-256 of each test set and dev set, by file name."""
        return fingerprints([*self.test, *(source for source in self.dev if source.split == "dev")])


def fingerprints(sources: Iterable[TaskFile]) -> dict[str, str]:
    """SHA-256 of files, by name."""
    return {source.path.name: file_sha256(source.path) for source in sources}


def find_task_files(task: DownstreamTask, folders: list[Path]) -> list[TaskFile]:
    """The task's files in and below `folders`, recognized by their names. Raises ValueError if there are none, or if
    two files of one dataset have the same split and language."""
    patterns = [(pattern, True) for pattern in task.file_patterns]
    patterns += [(pattern, False) for pattern in task.train_file_patterns]
    files: dict[tuple[str, str, bool], TaskFile] = {}
    paths: list[Path] = []
    for folder in folders:
        require_folder(folder, "name the folder of the task's files")
        # If `folder` is XTREME's download, only the task's own folders in it are searched.
        for searched in [folder / name for name in task.folders if (folder / name).is_dir()] or [folder]:
            paths += visible_paths(searched)
    for path, (pattern, own_dataset) in product(paths, patterns):
        if match := re.fullmatch(pattern, path.name):
            groups = {"language": "en", "split": ""} | match.groupdict()  # not every pattern has both
            language = _CONLL_LANGUAGES.get(groups["language"], groups["language"])
            split = _SPLITS.get(groups["split"], groups["split"])
            source = TaskFile(path, language, split, own_dataset)
            earlier = files.setdefault((language, split, own_dataset), source)
            if real_path(earlier.path) != real_path(path):
                raise ValueError(f"{path} and {earlier.path} are both the {split} set of {language}: keep one of them")
    if not files:
        raise ValueError(
            f"no file of the task in {', '.join(map(str, folders))}: name a folder with files like "
            f"{task.example_file_name}"
        )
    return list(files.values())


def choose_sets(
    sources: Sequence[TaskFile], name: str, tuning: TuningConfig, several_settings: bool, split: str = "test"
) -> TaskSets:
    """Sort the files of the task `name` by their purpose; `split` (test or dev) names the sets to score.

    `several_settings`: whether the command runs several settings, to choose the best by the dev sets of the training
    languages. A language's dev set is the task's own or, if the task has none, that of the other dataset on which the
    task is trained. Settings are never chosen on a file that is scored: if there are several settings and no other dev
    set, every tenth training example is held out. Raises ValueError if there is nothing to score, or no training set of
    a language in `tuning.train_languages`.
    """
    requested = tuning.train_languages
    train_files = {source.language: source for source in sources if source.split == "train"}
    train = [train_files[language] for language in sorted(train_files) if "all" in requested or language in requested]
    missing = [language for language in requested if language != "all" and language not in train_files]
    if missing or not train:
        raise ValueError(
            f"no training set of {', '.join(missing) or 'any language'} in the data, only of "
            f"{', '.join(sorted(train_files)) or 'none'}: add its folder, or set tuning.train_languages"
        )
    own_files = [source for source in sources if source.own_dataset]
    own_dev = [source for source in own_files if source.split == "dev"]
    test = [source for source in own_files if source.split == split] or own_dev
    if not test and split == "dev" and name in ("xquad", "tydiqa"):
        raise ValueError(f"{name} has no dev sets: leave out --split dev to score its tests")
    if not test:
        raise ValueError(
            f"no {'dev' if split == 'dev' else 'test or dev'} set of {name} in the data: add the folder that has one"
        )
    train_languages = {source.language for source in train}
    dev_files = {
        source.language: source
        for source in sorted(sources, key=lambda source: source.own_dataset)  # the task's own replace the others
        if source.split == "dev" and source not in test and source.language in train_languages
    }
    held_out = tuning.held_out or (several_settings and not dev_files)
    dev = train if held_out else [dev_files[language] for language in sorted(dev_files)]
    used_languages = {source.language for source in test} | (set() if held_out else dev_files.keys())
    dev_only = sorted({source.language for source in own_dev} - used_languages)
    return TaskSets(train, test, dev, held_out, bool(own_dev), dev_only)


def training_examples(
    source: TaskFile, task: DownstreamTask, tuning: TuningConfig, held_out: bool = False
) -> list[Example]:
    """The examples of a training file that a run trains on; if `held_out`, the tenth that the run does not train on.

    Questions on one context are either all held out or all trained on. Without `tuning.held_out` none is held out.
    Raises ValueError if there are too few to hold out a tenth.
    """
    examples = read_examples(source, task)[: tuning.train_examples or None]  # 0: all
    if not tuning.held_out:
        return examples
    # The questions on one context are a group; any other example is a group of its own.
    groups: dict[object, int] = {}
    group_of = [
        groups.setdefault(example.context if isinstance(example, Question) else index, len(groups))
        for index, example in enumerate(examples)
    ]
    if len(groups) < HELD_OUT_EVERY:
        kind = "contexts" if task.kind == "span" else "examples"
        limit = ", or raise tuning.train_examples" if tuning.train_examples else ""
        raise ValueError(
            f"{source.path} gives {len(groups)} {kind}, too few to hold out every tenth: add a dev set to the data"
            + limit
        )
    return [
        example
        for example, group in zip(examples, group_of, strict=True)
        if (group % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out
    ]


def read_examples(source: TaskFile, task: DownstreamTask) -> list[Example]:
    """All examples of a file. Raises ValueError for a malformed example, naming the file and the line or question, for
    a test set where only some examples have labels, and for an empty file."""
    reader = {"tokens": _sentences, "pair": _pairs, "span": _questions}[task.kind]
    examples = list(reader(source, task))
    if not examples:
        raise ValueError(f"{source.path} is empty: it must hold at least one example")
    return examples


def have_labels(examples: Sequence[Example]) -> bool:
    """Whether the examples of a file have labels. Either all have them or none has, so the first one tells."""
    first = examples[0]
    if isinstance(first, Sentence):
        return first.tags[0] != NO_LABEL
    return bool(first.answers) if isinstance(first, Question) else first.label != NO_LABEL


def _sentences(source: TaskFile, task: DownstreamTask) -> Iterator[Example]:
    """The sentences of a file with one word and its tag per line. A test set may have words without tags."""
    path, lines = source.path, _lines(source.path)
    full_lines = [line for line in lines if line.strip()]
    # The published PAN-X has the language before every word (de:Berlin); XTREME's scripts remove it.
    prefix = f"{source.language.partition('-')[0]}:"
    prefix = prefix if all(line.startswith(prefix) for line in full_lines) else ""
    # The majority of the lines decides whether words are bare, because a few bare words may end like a tag: Malcolm X.
    tagged = sum(" " in line and line.rpartition(" ")[2] in task.labels for line in full_lines)
    has_tabs = any("\t" in line for line in full_lines)
    bare = source.may_lack_labels and not has_tabs and 2 * tagged < len(full_lines)
    if bare and tagged > max(1, len(full_lines) / 20):
        raise ValueError(f"{path} has a tag in {tagged} of {len(full_lines)} lines: give all words a tag, or none")
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*lines, ""], start=1):  # the added empty line ends the last sentence
        # In a file without tags, a word may be white space of another kind, such as a no-break space.
        is_empty = not (line.strip(" \t") if bare else line.strip())
        if is_empty or line.startswith("-DOCSTART-"):
            if words:
                yield Sentence(words, tags)
                words, tags = [], []
            continue
        columns = [line, NO_LABEL] if bare else line.split("\t" if "\t" in line else " ")
        if len(columns) < 2:
            raise ValueError(f"{path}, line {number}: a word without a tag")
        if columns[-1] not in task.labels and not bare:
            raise ValueError(f"{path}, line {number}: tag {columns[-1]!r} is none of {', '.join(task.labels)}")
        words.append(columns[0].removeprefix(prefix))
        tags.append(columns[-1])


def _pairs(source: TaskFile, task: DownstreamTask) -> Iterator[Example]:
    """The pairs of a file with two texts and their label per line. A test set may have texts without labels."""
    path, column_count = source.path, 0
    for number, line in enumerate(_lines(path), start=1):
        if not line:
            continue
        columns = line.split("\t")
        # The first line decides whether all lines have a label.
        column_count = column_count or (2 if source.may_lack_labels and len(columns) == 2 else 3)
        if len(columns) != column_count:
            form = "text, text and label" if column_count == 3 else "two as in the lines before, which have no label"
            advice = ": is it a file of another task?" if number == 1 else ""
            raise ValueError(f"{path}, line {number}: {len(columns)} columns, expected {form}{advice}")
        if column_count == 2:
            columns.append(NO_LABEL)
        elif columns[2] not in task.labels:
            raise ValueError(f"{path}, line {number}: label {columns[2]!r} is none of {', '.join(task.labels)}")
        yield TextPair(*columns)


def _lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, without line ends. A file other than .tsv is read as Latin-1 if most of its non-ASCII
    lines are not valid UTF-8."""
    content = path.read_bytes()
    refuse_carriage_returns(content, path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The original files of CoNLL-2002 and 2003 are Latin-1. If most non-ASCII lines are UTF-8, the file is damaged.
        non_ascii = [line for line in content.split(b"\n") if not line.isascii()]
        utf8_count = sum(line.decode("utf-8", "ignore").encode() == line for line in non_ascii)
        if path.suffix == ".tsv" or 2 * utf8_count >= len(non_ascii):
            number = error.object.count(b"\n", 0, error.start) + 1
            raise ValueError(f"{path}, line {number} is not UTF-8: convert the file") from None
        text = content.decode("latin-1")
    return [line.rstrip("\r") for line in text.split("\n")]


def _questions(source: TaskFile, task: DownstreamTask) -> Iterable[Example]:
    """The questions of a file in SQuAD's JSON. A test set may have questions without answers."""
    path = source.path
    try:
        articles = json.loads(path.read_text(encoding="utf-8-sig"))["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        entries = [(paragraph["context"], entry) for paragraph in paragraphs for entry in paragraph["qas"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not in SQuAD's JSON format: {error!r}") from None
    questions = [_question(path, context, entry) for context, entry in entries]
    # In a test set, either all questions must have answers, or none may: the first question decides.
    must_have_answers = not source.may_lack_labels or any(question.answers for question in questions[:1])
    ids: set[str] = set()
    for question in questions:
        if bool(question.answers) != must_have_answers:
            problem = "has no answer" if must_have_answers else "has an answer, but those before it have none"
            raise ValueError(f"{path}, question {question.id} {problem}: fetch the file again")
        if question.id in ids and source.may_lack_labels:
            raise ValueError(
                f"{path} has two questions {question.id}, but predictions are stored by id: fetch the file again"
            )
        ids.add(question.id)
    return questions


def _question(path: Path, context: str, entry: Mapping[str, Any]) -> Question:
    """The question in an entry of "qas". Empty answers are left out, because in test sets they mean "no label"."""
    try:
        answers = [(answer["text"], int(answer["answer_start"])) for answer in entry["answers"]]
        question = Question(
            str(entry["id"]), entry["question"], context, [answer for answer in answers if answer[0].strip()]
        )
        for text in (question.id, question.question, context, *(answer for answer, _ in answers)):
            text.encode()  # raises for half a surrogate pair, which JSON allows
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        question_id = entry.get("id") if isinstance(entry, dict) else entry
        raise ValueError(f"{path}, question {question_id}: not in SQuAD's format: {error!r}") from None
    for text, start in question.answers:
        if start < 0 or context[start : start + len(text)] != text:
            raise ValueError(f"{path}, question {question.id}: its context does not read {text!r} at character {start}")
    return question

"""The tasks of XTREME that XLM-E is fine-tuned on, and CoNLL's NER: their kinds of prediction, file names, labels, and
published grids of settings."""

from dataclasses import dataclass, replace
from typing import Literal

# A model for `tokens` predicts a label for every word, for `pair` one label for two texts, for `span` the answer to a
# question as a piece of a text.
TaskKind = Literal["tokens", "pair", "span"]

ENTITY_TAGS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
PARTS_OF_SPEECH = (
    "ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM",
    "VERB", "X",
)  # fmt: skip

_LANGUAGE = r"(?P<language>\w+(?:-(?:[A-Z][a-z]{3}|[A-Z]{2}))?)"  # en, zh-Hans, pt-BR
_TABLES = (rf"(?P<split>train|dev|test)-{_LANGUAGE}\.tsv",)
_SQUAD = r"(?P<split>train|dev)-v1\.1\.json"
_TYDIQA = rf"tydiqa\.goldp\.{_LANGUAGE}\.(?P<split>train)\.json"


@dataclass(frozen=True)
class DownstreamTask:
    """One task. `learning_rates`, `batch_sizes` and `epochs` are the paper's grid (XLM-E, Table 11; `conll` has that
    of `ner`). The first value of each is the default.

    `folders`: the names of the task's folders in XTREME's download; the first has the task's tests. If a folder of
    --data has subfolders with these names, only these subfolders are searched.
    """

    kind: TaskKind
    folders: tuple[str, ...]
    file_patterns: tuple[str, ...]  # patterns of the names of the task's own files
    metrics: tuple[str, ...]  # settings are chosen by the first metric
    learning_rates: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    epochs: tuple[int, ...]
    labels: tuple[str, ...] = ()
    train_file_patterns: tuple[str, ...] = ()  # patterns of another dataset's training and dev files
    max_tokens: int = 128
    warmup_steps: int = 0  # the published number of warm-up steps; 0: a tenth of all steps
    example_file_name: str = "train-en.tsv"  # a name that the first pattern of `file_patterns` matches


_QUESTIONS = DownstreamTask(
    "span", (), (), ("f1", "em"), (2e-5, 3e-5, 4e-5), (32,), (), train_file_patterns=(_SQUAD, _TYDIQA), max_tokens=384
)

# The tasks by the name that --task takes.
DOWNSTREAM_TASKS: dict[str, DownstreamTask] = {
    "pos": DownstreamTask(
        "tokens", ("udpos",), _TABLES, ("f1", "accuracy"), (1e-5, 2e-5, 3e-5), (8, 16, 32), (10,), PARTS_OF_SPEECH
    ),
    "ner": DownstreamTask(
        "tokens", ("panx",), _TABLES, ("f1",), (5e-6, 6e-6, 7e-6, 8e-6, 9e-6), (8,), (10,), ENTITY_TAGS
    ),
    "conll": DownstreamTask(
        "tokens", ("conll",), (r"(?P<language>eng|deu|esp|ned)\.(?P<split>train|testa|testb)",), ("f1",),
        (5e-6, 6e-6, 7e-6, 8e-6, 9e-6), (8,), (10,),
        (*ENTITY_TAGS, "B-MISC", "I-MISC"), example_file_name="eng.train",
    ),
    "xquad": replace(
        _QUESTIONS, folders=("xquad", "squad"), file_patterns=(rf"xquad\.{_LANGUAGE}\.json",), epochs=(4,),
        example_file_name="xquad.en.json",
    ),
    "mlqa": replace(
        _QUESTIONS, folders=("mlqa", "squad"), epochs=(2, 3, 4),
        file_patterns=(rf"(?P<split>dev|test)-context-{_LANGUAGE}-question-(?P=language)\.json",),
        example_file_name="dev-context-en-question-en.json",
    ),
    "tydiqa": replace(  # XTREME's tests are TyDiQA's dev sets
        _QUESTIONS, folders=("tydiqa",), epochs=(10, 20, 40), train_file_patterns=(),
        file_patterns=(_TYDIQA, rf"tydiqa\.goldp\.{_LANGUAGE}\.dev\.json"),
        example_file_name="tydiqa.goldp.en.train.json",
    ),
    "xnli": DownstreamTask(
        "pair", ("xnli",), _TABLES, ("accuracy",), (5e-6, 6e-6, 7e-6, 8e-6), (32,), (10,),
        ("entailment", "neutral", "contradiction"), warmup_steps=12_500,
    ),
    "pawsx": DownstreamTask(
        "pair", ("pawsx",), _TABLES, ("accuracy",), (8e-6, 9e-6, 1e-5, 2e-5), (32,), (10,), ("0", "1")
    ),
}  # fmt: skip

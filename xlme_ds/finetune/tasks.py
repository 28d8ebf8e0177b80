"""The tasks of XTREME that XLM-E is fine-tuned on, and CoNLL's NER: kind of prediction, file names, labels, published
grids."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["tokens", "pair", "span"]
"""A label for every word, one for two texts, or an answer inside a text."""

ENTITIES = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
PARTS_OF_SPEECH = (
    "ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM",
    "VERB", "X",
)  # fmt: skip

_TABLES = (r"(?P<split>train|dev|test)-(?P<language>\w+)\.tsv",)
_SQUAD = r"(?P<split>train|dev)-v1\.1\.json"
_TYDIQA = r"tydiqa\.goldp\.(?P<language>\w+)\.(?P<split>train)\.json"
_TYDIQA_TEST = r"tydiqa\.goldp\.(?P<language>\w+)\.dev\.json"  # XTREME's tests are TyDiQA's dev sets
_XQUAD = r"xquad\.(?P<language>\w+)\.json"
_MLQA = r"(?P<split>dev|test)-context-(?P<language>\w+)-question-(?P=language)\.json"
_CONLL = (r"(?P<language>eng|deu|esp|ned)\.(?P<split>train|testa|testb)",)


@dataclass(frozen=True)
class Task:
    """One task; the grid is the paper's (XLM-E, Table 11), its first values are the defaults."""

    kind: Kind
    folders: tuple[str, ...]
    """Their names in XTREME's download, the task's own first; where a folder of --data has such ones, no other is
    looked into."""
    files: tuple[str, ...]
    """Patterns of the names of its own files."""
    metrics: tuple[str, ...]
    """The first is the one that settings are chosen by."""
    learning_rates: tuple[float, ...]
    batches: tuple[int, ...]
    epochs: tuple[int, ...]
    labels: tuple[str, ...] = ()
    train_files: tuple[str, ...] = ()
    """Patterns of another set's training and dev files, which are read besides: its questions."""
    max_tokens: int = 128
    warmup_steps: int = 0
    """Published instead of a tenth of the steps."""


def _questions(
    folders: tuple[str, ...], files: tuple[str, ...], train_files: tuple[str, ...], epochs: tuple[int, ...]
) -> Task:
    rates = (2e-5, 3e-5, 4e-5)
    return Task("span", folders, files, ("f1", "em"), rates, (32,), epochs, train_files=train_files, max_tokens=384)


TASKS: dict[str, Task] = {
    "pos": Task("tokens", ("udpos",), _TABLES, ("f1", "accuracy"), (1e-5, 2e-5, 3e-5), (8, 16, 32), (10,), PARTS_OF_SPEECH),
    "ner": Task("tokens", ("panx",), _TABLES, ("f1",), (5e-6, 6e-6, 7e-6, 8e-6, 9e-6), (8,), (10,), ENTITIES),
    "conll": Task(
        "tokens", ("conll",), _CONLL, ("f1",), (5e-6, 6e-6, 7e-6, 8e-6, 9e-6), (8,), (10,), (*ENTITIES, "B-MISC", "I-MISC")
    ),
    "xquad": _questions(("xquad", "squad"), (_XQUAD,), (_SQUAD, _TYDIQA), (4,)),
    "mlqa": _questions(("mlqa", "squad"), (_MLQA,), (_SQUAD, _TYDIQA), (2, 3, 4)),
    "tydiqa": _questions(("tydiqa",), (_TYDIQA, _TYDIQA_TEST), (), (10, 20, 40)),
    "xnli": Task(
        "pair", ("xnli",), _TABLES, ("accuracy",), (5e-6, 6e-6, 7e-6, 8e-6), (32,), (10,),
        ("entailment", "neutral", "contradiction"), warmup_steps=12_500,
    ),
    "pawsx": Task("pair", ("pawsx",), _TABLES, ("accuracy",), (8e-6, 9e-6, 1e-5, 2e-5), (32,), (10,), ("0", "1")),
}  # fmt: skip
"""By the name that --task takes."""

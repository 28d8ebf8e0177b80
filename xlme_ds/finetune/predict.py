"""What a fine-tuned model says of a file, and how well: F1 of entities and of tags, accuracy, F1 and exact match of
answers."""

import importlib.util
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..data.schema import write_json
from .answers import best_answer, compare, mlqa_words, squad_words
from .batches import collate
from .examples import Example, Pair, Question, Sentence
from .features import Feature
from .model import TaskModel
from .tasks import Task

Predictions = list[list[str]] | list[str]
"""Tags of every word, or one label or answer an example."""


def check_scorer(name: str) -> None:
    """Raise ValueError when the package that scores the task is not installed; before training, not after."""
    if name in ("pos", "ner", "conll") and importlib.util.find_spec("seqeval") is None:
        raise ValueError("tags are scored by seqeval, which is missing: pip install --use-pep517 seqeval")


@torch.no_grad()
def logits_of(model: TaskModel, features: Sequence[Feature], batch: int = 32) -> list[np.ndarray]:
    """float32 logits of every feature: [tokens, labels], or [labels] of pairs; computed in batches of like length."""
    model.eval()
    device = next(model.parameters()).device
    order = sorted(range(len(features)), key=lambda i: len(features[i].ids))
    out: list[np.ndarray] = [np.empty(0)] * len(features)
    for start in range(0, len(order), batch):
        here = order[start : start + batch]
        logits = model(collate([features[i] for i in here], model.kind).to(device)).float().cpu().numpy()
        for i, one in zip(here, logits, strict=True):
            out[i] = one if model.kind == "pair" else one[: len(features[i].ids)]
    return out


def predict(model: TaskModel, examples: Sequence[Example], features: Sequence[Feature], task: Task) -> Predictions:
    """The model's tags, labels or answers, one entry an example."""
    logits = logits_of(model, features)
    if task.kind == "pair":
        return [task.labels[int(one.argmax())] for one in logits]
    of_example: dict[int, list[int]] = {}
    for i, feature in enumerate(features):
        of_example.setdefault(feature.example, []).append(i)
    if task.kind == "tokens":
        return [
            [task.labels[int(best)] for i in parts for best in logits[i][features[i].places].argmax(-1)]
            for parts in of_example.values()
        ]
    return [
        best_answer(question, [features[i] for i in parts], [logits[i] for i in parts])
        for question, parts in ((examples[n], parts) for n, parts in of_example.items())
        if isinstance(question, Question)
    ]


def score(
    name: str, task: Task, examples: Sequence[Example], predictions: Predictions, language: str
) -> dict[str, float]:
    """Per cent by metric. Entities are whole and typed (CoNLL, by seqeval); of parts of speech runs of equal tags are,
    as in XTREME."""
    if task.kind == "span":
        words = mlqa_words if name == "mlqa" else squad_words
        pairs = [
            compare(str(given), [text for text, _ in question.answers], language, words)
            for question, given in zip(examples, predictions, strict=True)
            if isinstance(question, Question)
        ]
        f1, em = np.mean(pairs, axis=0) * 100
        return {"f1": float(f1), "em": float(em)}
    if task.kind == "pair":
        right = [
            pair.label == given for pair, given in zip(examples, predictions, strict=True) if isinstance(pair, Pair)
        ]
        return {"accuracy": 100 * float(np.mean(right))}
    tags = [sentence.tags for sentence in examples if isinstance(sentence, Sentence)]
    from seqeval.metrics import accuracy_score, f1_score

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # parts of speech have no B- and I-, says seqeval for each of them
        found = {"f1": 100 * float(f1_score(tags, predictions))}
    return found | ({"accuracy": 100 * float(accuracy_score(tags, predictions))} if "accuracy" in task.metrics else {})


def predictions_file(folder: Path, task: Task, split: str, language: str) -> Path:
    """Where the predictions of a file go, in the form that XTREME's evaluation takes: `xnli/test-de.tsv`,
    `mlqa/test-de.json`."""
    return folder / task.folders[0] / f"{split}-{language}.{'json' if task.kind == 'span' else 'tsv'}"


def write_predictions(path: Path, examples: Sequence[Example], predictions: Predictions) -> None:
    """A label a line; a tag a line and an empty line after each sentence; JSON of answers by the question's id."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(examples[0], Question):
        pairs = zip(examples, predictions, strict=True)
        write_json(path, {question.id: given for question, given in pairs if isinstance(question, Question)})
    else:
        lines = [one if isinstance(one, str) else "".join(f"{tag}\n" for tag in one) for one in predictions]
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        os.replace(temporary, path)

"""Predict the tags, labels or answers of a task file, and score them. Entities are scored by F1, parts of speech by F1
and accuracy, pairs of texts by accuracy, and answers by F1 and exact match.

A context that is longer than the model's input is read in several windows. The answer to a question is the best span in
all windows. To compare answers, SQuAD v1.1 lower-cases them and drops English articles and ASCII punctuation. MLQA
(Lewis et al., 2020) drops the articles of the text's own language instead, and all punctuation of Unicode, and splits
Chinese into characters.
"""

import re
import string
import unicodedata
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from ..data.rows import batches_by_length
from ..io.files import write_json, write_text
from .downstream_tasks import DownstreamTask
from .features import Feature, collate_features
from .objective import TaskModel
from .task_files import Example, Question, Sentence, TextPair

Predictions = list[list[str]] | list[str]  # one entry per example: the list of its words' tags, a label, or an answer

PREDICTIONS_FOLDER = "predictions"  # in the run folder
# SQuAD's usual baselines and XTREME use these two values, too.
N_BEST = 20  # number of candidates in a window for an answer's first token, and for its last token
MAX_ANSWER_TOKENS = 30  # length of the longest answer

_ARTICLES = {  # patterns from MLQA's evaluation, by language
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": r"\sال^|ال",
}


@torch.no_grad()
def logits_of(model: TaskModel, features: Sequence[Feature], batch_size: int = 32) -> list[np.ndarray]:
    """The float32 logits of each feature, in the order of `features`. The shape of each array is [labels] for pairs,
    and [tokens, labels] for the other kinds. `batch_size`: the number of features that the model reads at once."""
    model.eval()
    device = next(model.parameters()).device
    all_logits: list[np.ndarray] = [np.empty(0)] * len(features)
    for indices in batches_by_length([len(feature.ids) for feature in features], batch_size):
        outputs = model(collate_features([features[i] for i in indices], model.kind).to(device)).float().cpu().numpy()
        for i, logits in zip(indices, outputs, strict=True):
            all_logits[i] = logits if model.kind == "pair" else logits[: len(features[i].ids)]
    return all_logits


def predict(
    model: TaskModel, examples: Sequence[Example], features: Sequence[Feature], task: DownstreamTask
) -> Predictions:
    """The model's tags, labels or answers, one entry for each example."""
    logits = logits_of(model, features)
    if task.kind == "pair":
        return [task.labels[int(pair_logits.argmax())] for pair_logits in logits]
    groups = groupby(zip(features, logits, strict=True), key=lambda pair: pair[0].example)
    by_example = [list(group) for _, group in groups]  # the features of each example, with their logits
    if task.kind == "tokens":
        return [
            [
                task.labels[best]
                for feature, token_logits in inputs
                for best in token_logits[feature.word_starts].argmax(-1)
            ]
            for inputs in by_example
        ]
    return [
        best_answer(question, *zip(*inputs, strict=True))
        for question, inputs in zip(examples, by_example, strict=True)
        if isinstance(question, Question)
    ]


def best_answer(question: Question, windows: Sequence[Feature], logits: Sequence[np.ndarray]) -> str:
    """The text of the best span in all windows of a question; empty if no window has a span. `logits` has an array
    [tokens, 2] for each window: the logit that a token begins the answer, and the logit that it ends the answer.

    The best span has the largest sum of its first token's first logit and its last token's second logit. Only spans of
    at most `MAX_ANSWER_TOKENS` tokens are compared, whose first and last tokens are among the window's `N_BEST`
    candidates for them.
    """
    best_sum, answer = -np.inf, ""
    for window, window_logits in zip(windows, logits, strict=True):
        positions = np.flatnonzero(window.offsets[:, 0] >= 0)  # where the window has tokens of the context
        firsts, lasts = (
            positions[np.argsort(-window_logits[positions, column], kind="stable")[:N_BEST]] for column in (0, 1)
        )
        for first in firsts:
            for last in lasts:
                logit_sum = window_logits[first, 0] + window_logits[last, 1]
                if first <= last < first + MAX_ANSWER_TOKENS and logit_sum > best_sum:
                    best_sum = logit_sum
                    answer = question.context[window.offsets[first, 0] : window.offsets[last, 1]].strip()
    return answer


def answer_words(text: str, language: str | None = None) -> list[str]:
    """The words of a text in `language` as MLQA compares them; without a language, as SQuAD compares them."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    if language is not None:
        text = "".join(character for character in text if unicodedata.category(character)[0] != "P")
    if articles := _ARTICLES.get(language or "en"):
        text = re.sub(articles, " ", text)
    if language == "zh":  # every Chinese character is a word, and text between them is split at white space
        return re.findall(r"[\u4e00-\u9fa5]|[^\s\u4e00-\u9fa5]+", text)
    return text.split()


def score_answer(prediction: str, answers: Sequence[str], language: str | None = None) -> tuple[float, float]:
    """Returns (F1 over words, exact match) of a predicted answer, each from 0 to 1. If there are several right
    `answers`, each value is the best one over them. `language`: as in `answer_words`.

    F1 is the harmonic mean of precision (the fraction of the predicted words that the answer has) and recall (the
    fraction of the answer's words that were predicted).
    """
    predicted, expected = answer_words(prediction, language), [answer_words(answer, language) for answer in answers]
    f1 = 0.0
    for answer in expected:
        if common := (Counter(predicted) & Counter(answer)).total():
            f1 = max(f1, 2 * common / (len(predicted) + len(answer)))
    return f1, float(predicted in expected)


def score_predictions(
    name: str, task: DownstreamTask, examples: Sequence[Example], predictions: Predictions, language: str
) -> dict[str, float]:
    """The scores of predictions in per cent, by metric. `name` is the name of the task.

    seqeval computes the F1 of tags: a predicted entity is right if all its words and its type are right (CoNLL). For
    parts of speech seqeval takes each run of equal tags as an entity, as in XTREME.
    """
    pairs = zip(examples, predictions, strict=True)
    if task.kind == "span":
        scores = [
            score_answer(str(prediction), [text for text, _ in question.answers], language if name == "mlqa" else None)
            for question, prediction in pairs
            if isinstance(question, Question)
        ]
        f1, em = np.mean(scores, axis=0) * 100
        return {"f1": float(f1), "em": float(em)}
    if task.kind == "pair":
        right = [pair.label == prediction for pair, prediction in pairs if isinstance(pair, TextPair)]
        return {"accuracy": 100 * float(np.mean(right))}
    from seqeval.metrics import accuracy_score, f1_score

    tags = [sentence.tags for sentence in examples if isinstance(sentence, Sentence)]
    measures = {"f1": f1_score, "accuracy": accuracy_score}
    # seqeval warns about parts of speech, because these tags do not begin with B- or I-.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return {metric: 100 * float(measures[metric](tags, predictions)) for metric in task.metrics}


def predictions_file(task: DownstreamTask, split: str, language: str) -> Path:
    """The path of a language's predictions, relative to the run's folder. The files in `predictions/` have the names
    that XTREME's evaluation expects, such as `xnli/test-de.tsv` and `mlqa/test-de.json`."""
    return Path(PREDICTIONS_FOLDER, task.folders[0], f"{split}-{language}.{'json' if task.kind == 'span' else 'tsv'}")


def write_predictions(path: Path, examples: Sequence[Example], predictions: Predictions) -> None:
    """Write the predictions of a file. Labels are written one per line. Tags are written one per line, with an empty
    line after each sentence. Answers are written as a JSON object that maps a question's id to its answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(examples[0], Question):
        pairs = zip(examples, predictions, strict=True)
        write_json(path, {question.id: answer for question, answer in pairs if isinstance(question, Question)})
    else:
        texts = [entry if isinstance(entry, str) else "".join(f"{tag}\n" for tag in entry) for entry in predictions]
        write_text(path, "".join(f"{text}\n" for text in texts))

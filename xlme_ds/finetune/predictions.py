"""Predict the labels or answers of a file, and score them: F1 of entities and of tags, accuracy, F1 and exact match of
answers.

The answer to a question is the best of the spans in all windows of its context. SQuAD v1.1 compares lower-cased words
without English articles and ASCII punctuation. MLQA (Lewis et al., 2020) also drops Unicode's punctuation and the
articles of the text's language, and cuts Chinese into characters.
"""

import re
import string
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from ..io.files import write_json, write_text
from .downstream_tasks import DownstreamTask
from .features import Feature, collate_features
from .objective import TaskModel
from .task_files import Example, Question, Sentence, TextPair

Predictions = list[list[str]] | list[str]  # for each example: the tags of its words, or one label, or one answer
WordSplitter = Callable[[str, str], list[str]]  # (text, language) -> words

# Both values are those of SQuAD's usual baselines and of XTREME.
N_BEST = 20  # number of candidates in a window for an answer's first token, and for its last token
LONGEST_ANSWER = 30  # tokens

_ARTICLES = {  # patterns from MLQA's evaluation, by language
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": r"\sال^|ال",
}


@torch.no_grad()
def logits_of(model: TaskModel, features: Sequence[Feature], batch: int = 32) -> list[np.ndarray]:
    """The float32 logits of each feature: [tokens, labels], or [labels] of pairs."""
    model.eval()
    device = next(model.parameters()).device
    order = sorted(range(len(features)), key=lambda i: len(features[i].ids))  # little padding inside a batch
    all_logits: list[np.ndarray] = [np.empty(0)] * len(features)
    for start in range(0, len(order), batch):
        indices = order[start : start + batch]
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
        return [task.labels[int(of_pair.argmax())] for of_pair in logits]
    features_of_example: dict[int, list[int]] = {}  # index of an example -> indices of its features
    for i, feature in enumerate(features):
        features_of_example.setdefault(feature.example, []).append(i)
    if task.kind == "tokens":
        return [
            [task.labels[int(best)] for i in indices for best in logits[i][features[i].word_starts].argmax(-1)]
            for indices in features_of_example.values()
        ]
    answers = []
    for example, indices in features_of_example.items():
        question = examples[example]
        assert isinstance(question, Question)
        answers.append(best_answer(question, [features[i] for i in indices], [logits[i] for i in indices]))
    return answers


def best_answer(question: Question, windows: Sequence[Feature], logits: Sequence[np.ndarray]) -> str:
    """The text of the best span in all windows of a question: the span with the largest sum of the logits of its first
    and last token. `logits`: [tokens, 2] (first and last) for each window."""
    best_score, answer = -np.inf, ""
    for window, scores in zip(windows, logits, strict=True):
        positions = np.flatnonzero(window.characters[:, 0] >= 0)  # of the context's tokens in the window
        firsts, lasts = (positions[np.argsort(-scores[positions, end], kind="stable")[:N_BEST]] for end in (0, 1))
        for first in firsts:
            for last in lasts:
                score = scores[first, 0] + scores[last, 1]
                if first <= last < first + LONGEST_ANSWER and score > best_score:
                    best_score = score
                    answer = question.context[window.characters[first, 0] : window.characters[last, 1]].strip()
    return answer


def squad_words(text: str, language: str = "en") -> list[str]:
    """The words that SQuAD compares, the same in every `language`."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(_ARTICLES["en"], " ", text).split()


def mlqa_words(text: str, language: str) -> list[str]:
    """The words that MLQA compares."""
    text = "".join(c for c in text.lower() if c not in string.punctuation and unicodedata.category(c)[0] != "P")
    if language in _ARTICLES:
        text = re.sub(_ARTICLES[language], " ", text)
    if language == "zh":  # Chinese characters one by one, text between them split at white space
        return re.findall(r"[\u4e00-\u9fa5]|[^\s\u4e00-\u9fa5]+", text)
    return text.split()


def compare(prediction: str, answers: Sequence[str], language: str, words: WordSplitter) -> tuple[float, float]:
    """(F1 over words, exact match) of a predicted answer, each from 0 to 1. With several right `answers`, the best
    value counts. `words` splits a text."""
    predicted, right = words(prediction, language), [words(answer, language) for answer in answers]
    f1 = max((_f1(predicted, answer) for answer in right), default=0.0)
    return f1, float(predicted in right)


def _f1(first: list[str], second: list[str]) -> float:
    """The harmonic mean of precision and recall of the words that two texts share."""
    common = sum((Counter(first) & Counter(second)).values())
    return 2 * common / (len(first) + len(second)) if common else 0.0


def score(
    name: str, task: DownstreamTask, examples: Sequence[Example], predictions: Predictions, language: str
) -> dict[str, float]:
    """The scores of predictions in per cent, by metric; `name` is the task's. For tags, F1 is seqeval's: it counts
    whole entities with their types (CoNLL); for parts of speech it counts runs of equal tags, as XTREME does."""
    pairs = zip(examples, predictions, strict=True)
    if task.kind == "span":
        splitter = mlqa_words if name == "mlqa" else squad_words
        scores = [
            compare(str(prediction), [text for text, _ in question.answers], language, splitter)
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
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that parts of speech lack B- and I-
        return {metric: 100 * float(measures[metric](tags, predictions)) for metric in task.metrics}


def predictions_file(task: DownstreamTask, split: str, language: str) -> Path:
    """The path of a language's predictions in a run's folder, below `predictions/` as XTREME's evaluation wants it:
    `xnli/test-de.tsv`, `mlqa/test-de.json`."""
    return Path("predictions", task.folders[0], f"{split}-{language}.{'json' if task.kind == 'span' else 'tsv'}")


def write_predictions(path: Path, examples: Sequence[Example], predictions: Predictions) -> None:
    """Write one label a line, or one tag a line with an empty line after each sentence, or JSON of answers by question
    id."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(examples[0], Question):
        pairs = zip(examples, predictions, strict=True)
        write_json(path, {question.id: answer for question, answer in pairs if isinstance(question, Question)})
    else:
        texts = [one if isinstance(one, str) else "".join(f"{tag}\n" for tag in one) for one in predictions]
        write_text(path, "".join(f"{text}\n" for text in texts))

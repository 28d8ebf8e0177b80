"""Examples as token ids: words cut into subwords with the label on the first, pairs, windows over a long context; and
the batches of a step as a function of its number.

B rows, T tokens.
"""

import hashlib
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..config import DataConfig
from ..data.order import Phase, plan_step
from ..data.schema import LAYOUTS, PAD, UNK, Layout
from ..data.vocabulary import Vocabulary
from ..models.text_encoder import one_item_a_row
from .downstream_tasks import DownstreamTask, Kind
from .settings import TuningConfig
from .task_files import NO_LABEL, Example, Question, Sentence, TextPair

IGNORED = -100  # the label of a token for which none is predicted


class Feature(NamedTuple):
    """One input of the model, and the number of its `example`.

    `ids` are int32, in the model's layout as in pre-training; XLM-E's is `<s> … </s>`, for two texts
    `<s> a </s> b </s>`. `labels` are int64: one for each token (IGNORED except on first subwords), one for a pair, or
    the first and last token of an answer. `places` are int64: for a sentence the positions of its first subwords; for
    a question [tokens, 2], each token's first character and last character + 1 in the context, −1 outside it.
    `language` is an index into the model's `language_embeddings`.
    """

    ids: np.ndarray
    labels: np.ndarray
    example: int
    places: np.ndarray
    language: int = 0


def featurise(
    examples: Sequence[Example],
    task: DownstreamTask,
    vocabulary: Vocabulary,
    tuning: TuningConfig,
    layout: Layout = LAYOUTS["xlme"],
    language: int = 0,
    first: int = 0,
) -> list[Feature]:
    """The inputs of all examples (in one `language`), in order; a long sentence or context gives several.

    `tuning` must be completed (`TuningConfig.completed`); `first`: the number of the first example.
    """
    features: list[Feature] = []
    for number, example in enumerate(examples, start=first):
        if isinstance(example, Sentence):
            features += _sentence(example, number, task.labels, vocabulary, tuning.max_tokens, layout)
        elif isinstance(example, TextPair):
            features.append(_pair(example, number, task.labels, vocabulary, tuning.max_tokens, layout))
        else:
            features += _question(example, number, vocabulary, tuning, layout)
    return [feature._replace(language=language) for feature in features]


def _sentence(
    sentence: Sentence, number: int, labels: Sequence[str], vocabulary: Vocabulary, longest: int, layout: Layout
) -> list[Feature]:
    """Cut a long sentence between words. Every word is in one input, and its label is on its first subword."""
    flat, sizes = vocabulary.encode_lines(sentence.words)
    subwords = np.split(flat, np.cumsum(sizes)[:-1])
    inputs: list[tuple[list[int], list[int], list[int]]] = [([], [IGNORED], [])]
    for ids, tag in zip(subwords, sentence.tags, strict=True):
        word = ids[: longest - 2].tolist() or [UNK]  # a word of white space alone has no subwords
        if len(inputs[-1][0]) + len(word) + 2 > longest:
            inputs.append(([], [IGNORED], []))
        tokens, tags, places = inputs[-1]
        places.append(1 + len(tokens))
        tags += [_label(labels, tag)] + [IGNORED] * (len(word) - 1)
        tokens += word
    return [
        Feature(layout.item(np.array(tokens)), np.array([*tags, IGNORED]), number, np.array(places))
        for tokens, tags, places in inputs
    ]


def _pair(
    pair: TextPair, number: int, labels: Sequence[str], vocabulary: Vocabulary, longest: int, layout: Layout
) -> Feature:
    """Cut tokens off the end of the longer side until both fit."""
    first, second = vocabulary.encode(pair.first), vocabulary.encode(pair.second)
    room = longest - layout.pair_specials
    first_length = min(len(first), max(room // 2, room - len(second)))
    ids = layout.item(first[:first_length], second[: room - first_length])
    return Feature(ids, np.array([_label(labels, pair.label)]), number, np.zeros(0, np.int64))


def _label(labels: Sequence[str], label: str) -> int:
    return IGNORED if label == NO_LABEL else labels.index(label)


def _question(
    question: Question, number: int, vocabulary: Vocabulary, tuning: TuningConfig, layout: Layout
) -> list[Feature]:
    """Cut the context into windows that overlap, each after the question."""
    question_ids = vocabulary.encode(question.question)[: tuning.question_tokens]
    context, characters = vocabulary.encode_with_offsets(question.context)
    before = 1 + len(question_ids) + len(layout.between)
    room = tuning.max_tokens - len(question_ids) - layout.pair_specials
    answer = None
    if question.answers:
        text, begin = question.answers[0]
        inside = np.flatnonzero((characters[:, 1] > begin) & (characters[:, 0] < begin + len(text)))
        answer = (int(inside[0]), int(inside[-1])) if len(inside) else None
    features = []
    for start in range(0, max(len(context), 1), tuning.stride):
        ids = layout.item(question_ids, context[start : start + room])
        labels = np.zeros(2, np.int64)  # both the first token, unless the whole answer is in this window
        if answer is not None and start <= answer[0] and answer[1] < start + room:
            labels = np.array(answer) - start + before
        places = np.full((len(ids), 2), -1, np.int64)
        places[before:-1] = characters[start : start + room]
        features.append(Feature(ids, labels, number, places))
        if start + room >= len(context):
            break
    return features


class TaskBatch(NamedTuple):
    """A micro-batch. All integers are int64.

    `labels`: [B, T] for tokens, IGNORED where there is none; [B] for pairs; [B, 2] for spans, first and last token.
    `keys_B` seed the dropout of each row, as in `data.batch.Batch`.
    """

    tokens_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor
    languages_BT: Tensor
    labels: Tensor
    keys_B: Tensor

    def to(self, device: torch.device) -> "TaskBatch":
        """A copy of the batch on `device`."""
        pinned = (tensor.pin_memory() for tensor in self) if device.type == "cuda" else self
        return TaskBatch(*(tensor.to(device, non_blocking=True) for tensor in pinned))


def collate_features(features: Sequence[Feature], kind: Kind, keys: Sequence[int] = ()) -> TaskBatch:
    """Pad features to the longest of them; `keys`, one for each, seed dropout in training."""
    tokens_BT = pad_sequence([torch.from_numpy(feature.ids).long() for feature in features], True, PAD)
    labels = pad_sequence([torch.from_numpy(feature.labels) for feature in features], True, IGNORED)
    positions_BT, inside_BT = one_item_a_row(tokens_BT)
    languages_BT = torch.tensor([feature.language for feature in features])[:, None] * inside_BT
    keys_B = torch.tensor(keys or [0] * len(features))
    labels = labels[:, 0] if kind == "pair" else labels
    return TaskBatch(tokens_BT, positions_BT, inside_BT, languages_BT, labels, keys_B)


class TaskLoader:
    """The training features for one of `world` ranks. It keeps no position: the step's number determines what is read.

    Step s reads numbers [s·B, (s+1)·B); number n is feature n mod N in the order of epoch n div N, which depends on
    (seed, epoch) alone. A step's features are sorted by length, so that a micro-batch has little padding.
    """

    phases = (Phase(0, 0.0, None),)

    def __init__(self, features: Sequence[Feature], kind: Kind, data: DataConfig, seed: int, rank: int, world: int):
        self.features = features
        self.kind = kind
        try:
            self.plan = plan_step(data, world)
        except ValueError as error:  # name the settings of fine-tuning
            message = str(error).replace("data.mono_rows", "tuning.batch").replace("data.", "tuning.")
            raise ValueError(message.replace(" rows", " examples")) from None
        self.rank = rank
        self.row_tokens = round(fmean(len(feature.ids) for feature in features))
        self.seed = seed
        self._orders: dict[int, np.ndarray] = {}

    @property
    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of all features."""
        digest = hashlib.sha256()
        for feature in self.features:
            digest.update(feature.ids.tobytes())
            digest.update(feature.labels.tobytes())
            if feature.language:
                digest.update(str(feature.language).encode())
        return {"features": digest.hexdigest()}

    def _feature(self, number: int) -> Feature:
        epoch, place = divmod(number, len(self.features))
        if epoch not in self._orders:
            shuffle = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._orders = {epoch: shuffle.permutation(len(self.features))}
        return self.features[self._orders[epoch][place]]

    def _sorted(self, step: int) -> list[tuple[int, Feature]]:
        numbered = [(number, self._feature(number)) for number in self.plan.step_rows(step, 0)]
        return sorted(numbered, key=lambda pair: len(pair[1].ids))

    def _read(self, step: int, micro_batch: int) -> list[tuple[int, Feature]]:
        mine = self.plan.row_numbers(step, self.rank, micro_batch, 0) - self.plan.step_rows(step, 0).start
        return self._sorted(step)[mine[0] : mine[-1] + 1]

    def step(self, step: int) -> list[TaskBatch]:
        """All micro-batches of this rank in step `step`."""
        batches = []
        for micro_batch in range(self.plan.accumulation):
            numbers, features = zip(*self._read(step, micro_batch), strict=True)
            hashes = [hashlib.sha256(f"{self.seed}:{number}".encode()).digest() for number in numbers]
            keys = [int.from_bytes(digest[:7], "little") for digest in hashes]
            batches.append(collate_features(features, self.kind, keys))
        return batches

    def describe_rows(self, step: int, micro_batch: int | None = None) -> str:
        """Numbers of the examples in a micro-batch of this rank, or in the whole step, for messages."""
        read = self._sorted(step) if micro_batch is None else self._read(step, micro_batch)
        return "examples " + ", ".join(str(feature.example) for _, feature in read)

    def probe(self) -> TaskBatch:
        """The first feature: the same on all ranks, whatever their number."""
        return collate_features(self.features[:1], self.kind)

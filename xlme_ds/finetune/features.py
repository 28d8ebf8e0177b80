"""The inputs of a fine-tuned model, made from examples, and the batches of a step as a function of the step's number.

In a sentence the first subword of each word has the word's label. A pair of texts is one input. A long context is read
in windows that overlap.

B rows, T tokens.
"""

import hashlib
from collections.abc import Mapping, Sequence
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
from ..models.text_encoder import positions_and_segments
from .downstream_tasks import DownstreamTask, TaskKind
from .settings import TuningConfig
from .task_files import NO_LABEL, Example, Question, Sentence, TextPair

IGNORED = -100  # the label that the loss ignores


class Feature(NamedTuple):
    """One input of the model. `ids` is int32, the other arrays are int64.

    `ids`: one item in the model's layout, as in pre-training. In XLM-E's layout a text is `<s> … </s>`, and two texts
    are `<s> a </s> b </s>`.
    `labels`: a sentence has one label per token, which is IGNORED unless the token is the first subword of a word. A
    pair has one label. A question has two, the positions of the answer's first and last token.
    `word_starts`: for a sentence, the positions of the first subword of each word.
    `offsets`: for a question, each token's range of characters in the context, [begin, end), or −1 for tokens
    outside the context; [tokens, 2].
    """

    ids: np.ndarray
    labels: np.ndarray
    example: int  # index of the example that this input is made from
    word_starts: np.ndarray = np.zeros(0, np.int64)
    offsets: np.ndarray = np.zeros((0, 2), np.int64)
    language: int = 0  # index into the model's `language_embeddings`


def featurise(
    examples: Sequence[Example],
    task: DownstreamTask,
    vocabulary: Vocabulary,
    tuning: TuningConfig,
    layout: Layout = LAYOUTS["xlme"],
    language: int = 0,
    first_index: int = 0,
) -> list[Feature]:
    """The inputs made from all examples, in order; a long sentence or context gives several inputs. All examples are in
    one language, which has the index `language` in the model's `language_embeddings`.

    `tuning` must be completed (`TuningConfig.completed`). `first_index`: the index of the first example.
    """
    label_ids = {NO_LABEL: IGNORED} | {label: index for index, label in enumerate(task.labels)}
    features: list[Feature] = []
    for index, example in enumerate(examples, start=first_index):
        if isinstance(example, Sentence):
            features += _sentence_features(example, index, label_ids, vocabulary, tuning.max_tokens, layout)
        elif isinstance(example, TextPair):
            features.append(_pair_feature(example, index, label_ids, vocabulary, tuning.max_tokens, layout))
        else:
            features += _question_features(example, index, vocabulary, tuning, layout)
    return [feature._replace(language=language) for feature in features]


def _sentence_features(
    sentence: Sentence,
    index: int,
    label_ids: Mapping[str, int],
    vocabulary: Vocabulary,
    max_tokens: int,
    layout: Layout,
) -> list[Feature]:
    """The inputs made from a sentence, which is cut between words into inputs of at most `max_tokens` tokens."""
    ids_of_all, sizes = vocabulary.encode_lines(sentence.words)
    ids_of_words = np.split(ids_of_all, np.cumsum(sizes)[:-1])
    room = max_tokens - 2  # without <s> and </s>
    # (subwords, labels, positions of the words' first subwords) for each input. The first label is that of the opening
    # special token.
    inputs: list[tuple[list[int], list[int], list[int]]] = [([], [IGNORED], [])]
    for ids, tag in zip(ids_of_words, sentence.tags, strict=True):
        subwords = ids[:room].tolist() or [UNK]  # a word of white space alone has no subwords
        if len(inputs[-1][0]) + len(subwords) > room:
            inputs.append(([], [IGNORED], []))
        tokens, token_labels, word_starts = inputs[-1]
        word_starts.append(1 + len(tokens))
        token_labels += [label_ids[tag]] + [IGNORED] * (len(subwords) - 1)
        tokens += subwords
    return [
        Feature(layout.item(np.array(tokens)), np.array([*token_labels, IGNORED]), index, word_starts=np.array(starts))
        for tokens, token_labels, starts in inputs
    ]


def _pair_feature(
    pair: TextPair, index: int, label_ids: Mapping[str, int], vocabulary: Vocabulary, max_tokens: int, layout: Layout
) -> Feature:
    """The input of a pair. If it would have more than `max_tokens` tokens, the end of one text or of both is cut off. A
    text stays whole if it needs at most half of the room, which is `max_tokens` less the special tokens."""
    first, second = vocabulary.encode(pair.first), vocabulary.encode(pair.second)
    room = max_tokens - layout.pair_specials
    first_length = min(len(first), max(room // 2, room - len(second)))
    ids = layout.item(first[:first_length], second[: room - first_length])
    return Feature(ids, np.array([label_ids[pair.label]]), index)


def _question_features(
    question: Question, index: int, vocabulary: Vocabulary, tuning: TuningConfig, layout: Layout
) -> list[Feature]:
    """The inputs made from a question: each holds the question and one window of the context."""
    question_ids = vocabulary.encode(question.question)[: tuning.question_tokens]
    context_ids, context_offsets = vocabulary.encode_with_offsets(question.context)
    context_start = 1 + len(question_ids) + len(layout.between)  # the position in an input where the context begins
    room = tuning.max_tokens - len(question_ids) - layout.pair_specials
    answer = None  # indices of the answer's first and last token in `context_ids`
    if question.answers:
        text, answer_begin = question.answers[0]
        begin, end = context_offsets.T
        answer_tokens = np.flatnonzero((end > answer_begin) & (begin < answer_begin + len(text)))
        answer = (int(answer_tokens[0]), int(answer_tokens[-1])) if len(answer_tokens) else None
    features = []
    # The last window is the first one that reaches the end of the context.
    for start in range(0, max(len(context_ids) - room, 0) + tuning.stride, tuning.stride):
        ids = layout.item(question_ids, context_ids[start : start + room])
        labels = np.zeros(2, np.int64)  # both point at the input's first token unless the window has the whole answer
        if answer is not None and start <= answer[0] and answer[1] < start + room:
            labels = np.array(answer) - start + context_start
        offsets = np.full((len(ids), 2), -1, np.int64)
        offsets[context_start:-1] = context_offsets[start : start + room]
        features.append(Feature(ids, labels, index, offsets=offsets))
    return features


class TaskBatch(NamedTuple):
    """A micro-batch; all tensors are int64."""

    tokens_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor  # 1 at tokens, 0 at padding
    languages_BT: Tensor
    # The labels of `Feature`, by the kind of task: `tokens` [B, T] (IGNORED at padding), `pair` [B], `span` [B, 2].
    labels: Tensor
    seeds_B: Tensor  # random bits that seed the dropout of each row, as in `data.batch.Batch`

    def to(self, device: torch.device) -> "TaskBatch":
        """A copy of the batch on `device`."""
        pinned = (tensor.pin_memory() for tensor in self) if device.type == "cuda" else self
        return TaskBatch(*(tensor.to(device, non_blocking=True) for tensor in pinned))


def collate_features(features: Sequence[Feature], kind: TaskKind, seeds: Sequence[int] = ()) -> TaskBatch:
    """A batch of `features`, padded to the longest of them. `seeds`: one seed of dropout for each feature, or none."""
    ids = [torch.from_numpy(feature.ids).long() for feature in features]
    tokens_BT = pad_sequence(ids, batch_first=True, padding_value=PAD)
    positions_BT, segments_BT = positions_and_segments(tokens_BT)
    languages_BT = torch.tensor([feature.language for feature in features])[:, None] * segments_BT
    labels_of_features = [torch.from_numpy(feature.labels) for feature in features]
    labels = pad_sequence(labels_of_features, batch_first=True, padding_value=IGNORED)
    labels = labels[:, 0] if kind == "pair" else labels
    seeds_B = torch.tensor(seeds or [0] * len(features))
    return TaskBatch(tokens_BT, positions_BT, segments_BT, languages_BT, labels, seeds_B)


class TaskLoader:
    """Gives one of `world` ranks its training batches. No batch depends on the batches before it.

    With N features in all and F features per step, step s reads draws s·F to (s+1)·F − 1. Draw n takes the feature at
    index n mod N of the random order of epoch n div N. This order depends only on the seed, the epoch and N. A step's
    features are sorted by length, so that a micro-batch has little padding.
    """

    phases = (Phase(0, 0.0, None),)

    def __init__(self, features: Sequence[Feature], kind: TaskKind, data: DataConfig, seed: int, rank: int, world: int):
        self.features = features
        self.kind = kind
        try:
            self.plan = plan_step(data, world)
        except ValueError as error:  # the message must name the settings of fine-tuning
            message = str(error).replace("data.mono_rows", "tuning.batch").replace(" rows", " examples")
            raise ValueError(message.replace("data.", "tuning.")) from None
        self.rank = rank
        self.row_tokens = round(fmean(len(feature.ids) for feature in features))
        self.seed = seed
        self._orders: dict[int, np.ndarray] = {}

    @property
    def fingerprints(self) -> dict[str, str]:
        """A dict with one entry, `features`: the SHA-256 of the ids, labels and languages of all features."""
        digest = hashlib.sha256()
        for feature in self.features:
            digest.update(feature.ids.tobytes() + feature.labels.tobytes())
            if feature.language:
                digest.update(str(feature.language).encode())
        return {"features": digest.hexdigest()}

    def micro_batches(self, step: int) -> list[TaskBatch]:
        """All micro-batches of this rank in step `step`."""
        batches = []
        for micro_batch in range(self.plan.accumulation):
            draws, features = zip(*self._draws(step, micro_batch), strict=True)
            hashes = [hashlib.sha256(f"{self.seed}:{draw}".encode()).digest() for draw in draws]
            seeds = [int.from_bytes(digest[:7], "little") for digest in hashes]  # 7 bytes fit int64
            batches.append(collate_features(features, self.kind, seeds))
        return batches

    def describe_rows(self, step: int, micro_batch: int | None = None) -> str:
        """A text for messages: the indices of the examples in a micro-batch of this rank, or in the whole step."""
        return "examples " + ", ".join(str(feature.example) for _, feature in self._draws(step, micro_batch))

    def probe(self) -> TaskBatch:
        """A batch of the first feature alone. It is the same on every rank, whatever the number of ranks."""
        return collate_features(self.features[:1], self.kind)

    def _draws(self, step: int, micro_batch: int | None) -> list[tuple[int, Feature]]:
        """(draw, feature) for each draw in a micro-batch of this rank or, if `micro_batch` is None, in the whole step,
        over all ranks. Short features come first."""
        rows = self.plan.step_rows(step, 0)
        draws = sorted(((draw, self._feature(draw)) for draw in rows), key=lambda drawn: len(drawn[1].ids))
        if micro_batch is None:
            return draws
        indices = self.plan.row_numbers(step, self.rank, micro_batch, 0) - rows.start  # without gaps
        return draws[indices[0] : indices[-1] + 1]

    def _feature(self, draw: int) -> Feature:
        """The feature that a draw takes. Only one epoch's order is kept in memory."""
        epoch, index = divmod(draw, len(self.features))
        if epoch not in self._orders:
            shuffle = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._orders = {epoch: shuffle.permutation(len(self.features))}
        return self.features[self._orders[epoch][index]]

"""Translates the lines of a file with a model trained for objective.name mt, scores translations, and finds the lines
that occur in training data."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..cli import note
from ..data.rows import TASKS
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary
from ..io.files import refuse_carriage_returns
from ..models.text_encoder import language_index
from ..trained.config_json import read_config
from ..trained.encoders import load_whole_export
from ..trained.runs import load_run
from .decoding import translate
from .model import TranslationModel

_ROWS_PER_READ = 4096  # of training data in which lines are searched
_MAX_PENALTY = 10  # powers of lengths then stay well within the range of floats
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {".xz": lzma.LZMADecompressor, ".bz2": bz2.BZ2Decompressor}
COMPRESSED = (".gz", *_DECOMPRESSORS)  # suffixes of the files that are uncompressed when they are read


class Translator(NamedTuple):
    """A translation model and its vocabulary."""

    folder: Path
    model: TranslationModel
    vocabulary: Vocabulary

    def language_index(self, code: str, option: str) -> int:
        """The index of a language's embedding. Raises ValueError, naming the `option`, for an unknown language."""
        try:
            return language_index(self.model.cfg, code)
        except ValueError:
            raise ValueError(
                f"{option} {code} is no language of {self.folder}: choose one of "
                f"{' '.join(self.model.cfg.language_embeddings)}"
            ) from None


def load_translator(folder: Path) -> Translator:
    """The model and vocabulary of a run, a checkpoint (RUN@STEP) or an export. The model is in evaluation mode, on a
    GPU if there is one. Raises ValueError for a folder whose model has no decoder."""
    advice = "name a run of objective.name mt"
    run = load_whole_export(folder)
    if run is None and "config" not in read_config(folder):  # only a run has this key
        raise ValueError(f"{folder} is an export without a decoder: {advice}")
    run = run or load_run(folder)
    if run.task or run.objective.name != "mt":
        training = f"fine-tuned on {run.task}" if run.task else f"trained for {run.objective.name}"
        raise ValueError(f"{folder} was {training} and has no decoder: {advice}")
    model = TranslationModel(run.model)
    run.load_into(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Translator(folder, model.eval().to(device), run.vocabulary)


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, plain or .xz, .gz or .bz2. Raises ValueError for other encodings and damaged files."""
    try:
        data = _uncompressed(path)
        text = data.decode("utf-8-sig")  # drops a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 at byte {error.start}: convert it, or, if it is compressed, uncompress it (.gz, .xz "
            "and .bz2 are read as they are)"
        ) from None
    except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the system, not of gzip or bz2
            raise
        raise ValueError(f"{path} is damaged ({error}): fetch it again") from None
    refuse_carriage_returns(data, path)
    # Not `splitlines`, which ends a line at other characters too.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _uncompressed(path: Path) -> bytes:
    """The uncompressed bytes of all streams of a file. A damaged stream raises an error, while `lzma.open` and
    `bz2.open` would silently leave out the rest of the file."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix not in _DECOMPRESSORS:
        return data
    parts = []
    while data:
        stream = _DECOMPRESSORS[path.suffix]()
        parts.append(stream.decompress(data))
        if not stream.eof:
            raise EOFError("it ends inside of a stream")
        data = stream.unused_data.lstrip(b"\0")  # zero bytes may follow a stream
    return b"".join(parts)


def check_search(translator: Translator, beam: int, length_penalty: float) -> None:
    """Raise ValueError if `beam` or `length_penalty` is out of range. The largest beam depends on the vocabulary."""
    size = translator.vocabulary.size
    if beam < 1:
        raise ValueError(f"beam {beam} keeps no hypothesis: it must be at least 1")
    max_beam = (size - 5) // 2  # a step takes the best 2 · beam candidates, and there are `size` - 5 ordinary tokens
    if beam > max_beam:
        raise ValueError(f"beam {beam} is more than a vocabulary of {size} has room for: it can be at most {max_beam}")
    if not abs(length_penalty) <= _MAX_PENALTY:  # also refuses NaN
        raise ValueError(
            f"length_penalty is {length_penalty}: it must be from -{_MAX_PENALTY} to {_MAX_PENALTY}, such as 1"
        )


def translate_lines(
    translator: Translator, lines: Sequence[str], languages: tuple[int, int], beam: int, length_penalty: float
) -> tuple[list[str], list[int]]:
    """Translate each line by itself; the translation of a blank line is empty. `languages` are the indices of the
    source and the target language. Returns (translations, numbers from 1 of the lines that were too long, so that only
    their start was read)."""
    model, vocabulary = translator.model, translator.vocabulary
    sources = [vocabulary.encode(line) for line in lines]
    longest = model.cfg.max_positions - 2  # ordinary tokens, without the two special ones
    not_empty = [index for index, source in enumerate(sources) if len(source)]
    cut_sources: list[np.ndarray] = [sources[index][:longest] for index in not_empty]
    translations = [""] * len(lines)
    outputs = translate(model, cut_sources, languages, beam, length_penalty)
    for index, tokens in zip(not_empty, outputs, strict=True):
        translations[index] = vocabulary.decode(tokens)
    return translations, [index + 1 for index in not_empty if len(sources[index]) > longest]


def bleu_and_chrf(lines: Sequence[str], reference: Sequence[str], language: str) -> list[str]:
    """BLEU (Post, 2018), with sacreBLEU's tokenizer for the language, and chrF (Popović, 2015): for each a text with
    value and signature. Raises ValueError where a package is not installed."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise ValueError("--reference needs sacreBLEU: pip install 'xlme-ds[translate]'") from None
    code = language.partition("-")[0]  # zh of zh-Hans
    try:
        metrics = BLEU(trg_lang=code), CHRF()
    except RuntimeError:  # the tokenizer for Japanese or Korean is not installed
        raise ValueError(f"--reference in {language} needs a tokenizer: pip install 'sacrebleu[{code}]'") from None
    return [
        metric.corpus_score(list(lines), [list(reference)]).format(signature=str(metric.get_signature()))
        for metric in metrics
    ]


def leak_report(
    translator: Translator, source: Path, lines: list[str], reference: list[str] | None, folders: Sequence[Path]
) -> str:
    """A line that says how many of the `lines` of the file `source` and of their reference are in the training data
    `folders`; empty without `folders`."""
    if not folders:
        return ""
    sides = [[translator.vocabulary.encode(line) for line in side] for side in (lines, reference or [])]
    by_source, by_reference = seen_lines(folders, sides, translator.vocabulary)
    seen = len(by_source | by_reference)
    return (
        f"{source}: {seen} of {len(lines)} lines ({seen / len(lines):.1%}) are in {' '.join(map(str, folders))}, "
        f"{len(by_source)} by the source, {len(by_reference)} by the reference\n"
    )


def seen_lines(
    folders: Sequence[Path], sides: Sequence[Sequence[np.ndarray]], vocabulary: Vocabulary
) -> list[set[int]]:
    """Find the lines of a test set that also occur in training data, as one side of a pair or as a sentence.

    `sides` has the lines of each side of the test set as token ids, int32. `folders` are data folders that `xlme prep
    mix` wrote; their rows of pairs and of sentences are read. Returns for each side the set of the indices of the lines
    that occur. Raises ValueError for rows of another vocabulary, and for a folder without pairs and without sentences.
    """
    keys_of_sides = [[line.tobytes() for line in side] for side in sides]
    texts = (text for folder in folders for text in _texts(folder, vocabulary))
    seen = set[bytes]().union(*keys_of_sides).intersection(texts)
    return [{index for index, key in enumerate(keys) if key in seen} for keys in keys_of_sides]


def _texts(folder: Path, vocabulary: Vocabulary) -> Iterator[bytes]:
    """Yield the int32 ids of every text in the rows of a folder; `_ROWS_PER_READ` rows are read at a time. A text is
    one side of a pair, or a sentence."""
    stores = [RowStore(folder / task) for task in TASKS if (folder / task).is_dir()]
    # Monolingual rows that were mixed without --sentences do not hold single lines.
    unsearched = [
        store for store in stores if store.folder.name == "mono" and store.manifest.packed_unit != "sentences"
    ]
    if len(unsearched) == len(stores):
        raise ValueError(
            f"{folder} has neither pairs nor rows that were mixed with --sentences, in which lines could be found: "
            "name data that a translation model is trained on"
        )
    for store in stores:
        if store in unsearched:
            note(f"{store.folder} was mixed without --sentences: lines were not looked for in its {store.rows} rows")
            continue
        if store.manifest.vocabulary_sha256 != vocabulary.sha256:
            raise ValueError(
                f"{store.folder} was encoded with another vocabulary than the model's: name the data that the model "
                "was trained on"
            )
        for first in range(0, store.rows, _ROWS_PER_READ):
            row_numbers = np.arange(first, min(first + _ROWS_PER_READ, store.rows))
            yield from (text.tobytes() for text in store.read(row_numbers).texts())

"""Cross-lingual sentence retrieval: nearest neighbour by cosine, accuracy@1 in both directions, at every layer.

The sentences are the Tatoeba test set's (LASER's v1 files) or translation pairs that were kept out of training. Every
test pairs English with one other language.

N sentences on each side, L layers including the embeddings, D width.
"""

import lzma
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..cli import progress
from ..config import EncoderName
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary
from ..io.argument_types import check_argument_types
from ..io.folders import require_folder
from ..models.effective_rank import effective_rank
from ..models.text_encoder import TextEncoder
from .compared_models import Models, load_encoders, require_languages, trained_on_entry, trained_on_notes
from .output import ResultTable, table_at_layer
from .text_lines import read_sentence_pairs, require_same_length, split_lines
from .vectors import sentence_vectors, unit_vectors

Bitext = tuple[list[np.ndarray], list[np.ndarray]]  # token ids of (the English sentences, their translations)
Bitexts = Mapping[str, Bitext]  # by the other language
# A translation pair with English: (the other language, token ids of the translation, token ids of the English side).
EnglishPair = tuple[str, np.ndarray, np.ndarray]

ENGLISH = "en"
DIRECTIONS = {"en_xx": "en→xx", "xx_en": "xx→en"}  # key in the results -> title in tables
# Suffix of a direction's key if the mean vector of each side was subtracted. The papers subtract no mean.
CENTRED = "_centred"
FEWEST_PAIRS = 5  # a language with fewer pairs is left out, because an accuracy over so few means nothing

# ISO 639-3 codes in file names -> the papers' codes, for XTREME's 36 languages. Other languages keep the three letters.
XTREME_CODES = {
    "afr": "af", "ara": "ar", "bul": "bg", "ben": "bn", "deu": "de", "ell": "el", "spa": "es", "est": "et", "eus": "eu",
    "pes": "fa", "fin": "fi", "fra": "fr", "heb": "he", "hin": "hi", "hun": "hu", "ind": "id", "ita": "it", "jpn": "ja",
    "jav": "jv", "kat": "ka", "kaz": "kk", "kor": "ko", "mal": "ml", "mar": "mr", "nld": "nl", "por": "pt", "rus": "ru",
    "swh": "sw", "tam": "ta", "tel": "te", "tha": "th", "tgl": "tl", "tur": "tr", "urd": "ur", "vie": "vi", "cmn": "zh",
}  # fmt: skip
LANGUAGE_SETS = {  # languages over which the papers average; the key is their number
    "14": ("ar", "bg", "de", "el", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh"),  # XNLI's languages
    "36": tuple(XTREME_CODES.values()),
}
_TATOEBA_FILE = re.compile(r"tatoeba\.(?P<code>[a-z]{3})-eng\.(eng|(?P=code))")
_HIDDEN_MEMBER = re.compile(r"__MACOSX/|(.*/)?\.")  # zip members that operating systems add
# X.en-de.en, X.en-de.de or the archive X.en-de.txt.zip, languages in either order; `X.` may be absent.
_PAIR_FILE = re.compile(
    rf"(.*\.)?({ENGLISH}-(?P<after>[^.]+)|(?P<before>[^.]+)-{ENGLISH})"
    rf"(\.txt\.zip|\.(?P<side>{ENGLISH}|(?P=after)|(?P=before)))"
)


@check_argument_types
def tatoeba(
    models: Models,
    data: Path | str,
    *,
    layer: int | None = None,
    which: EncoderName | None = None,
    random: bool = False,
) -> dict[str, Any]:
    """Sentence retrieval on the Tatoeba test set. `data` is a folder with LASER's files, tatoeba.xxx-eng.xxx and
    tatoeba.xxx-eng.eng. `help(xlme.evaluate)` explains the other arguments, the errors and what is returned."""
    text = read_tatoeba(Path(data))
    if few := [language for language, (english, _) in text.items() if len(english) < FEWEST_PAIRS]:
        raise ValueError(
            f"{data} has fewer than {FEWEST_PAIRS} pairs for {', '.join(few)}: complete or remove their files"
        )
    compared = load_encoders(models, layer, random, which)
    require_languages(compared, {ENGLISH, *text})
    results = []
    for model in compared:
        bitexts = {
            language: (list(map(model.vocabulary.encode, english)), list(map(model.vocabulary.encode, other)))
            for language, (english, other) in text.items()
        }
        results.append(model.layerwise_metadata | retrieval_scores(model.encoder, bitexts, model.name))
    return {"test": "tatoeba", "models": results}


@check_argument_types
def pairs(
    models: Models,
    data: Path | str,
    *,
    limit: int = 1000,
    layer: int | None = None,
    which: EncoderName | None = None,
    random: bool = False,
) -> dict[str, Any]:
    """Sentence retrieval on translation pairs kept out of training. `data` is a data folder that holds para/, or a
    folder of line-aligned text: X.en-de.en with X.en-de.de, or en-de.txt.zip. Pairs that repeat a sentence of an
    earlier pair are left out; of the others, the first `limit` of each language are scored. `help(xlme.evaluate)`
    explains the other arguments, the errors and what is returned."""
    if limit < FEWEST_PAIRS:
        raise ValueError(f"limit {limit} leaves too few pairs for an accuracy: it must be at least {FEWEST_PAIRS}")
    compared = load_encoders(models, layer, random, which)
    all_bitexts = []  # of all models before the first is scored, so that an error comes early
    for model in compared:
        bitexts = group_by_language(heldout_pairs(Path(data), model.vocabulary), fewest=1)
        all_bitexts.append(
            {language: (english[:limit], other[:limit]) for language, (english, other) in bitexts.items()}
        )
    # To one vocabulary, more sentences may be equal than to another. A language is scored for all models or for none.
    languages = sorted({language for bitexts in all_bitexts for language in bitexts})
    counts = {language: min(len(bitexts.get(language, ([],))[0]) for bitexts in all_bitexts) for language in languages}
    too_few = {language: count for language, count in counts.items() if count < FEWEST_PAIRS}
    tested = [language for language in counts if language not in too_few]
    if not tested:
        raise ValueError(f"{data} has no language with {FEWEST_PAIRS} pairs or more: name data with more pairs")
    require_languages(compared, {ENGLISH, *tested})
    results = []
    for model, bitexts in zip(compared, all_bitexts, strict=True):
        trained_on = trained_on_entry(model, RowStore(Path(data) / "para")) if (Path(data) / "para").is_dir() else {}
        scores = retrieval_scores(model.encoder, {language: bitexts[language] for language in tested}, model.name)
        results.append(model.layerwise_metadata | trained_on | scores | {"too_few": too_few})
    return {"test": "pairs", "models": results}


def read_tatoeba(folder: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Returns for each language (English sentences, their translations), from the files tatoeba.xxx-eng.eng and
    tatoeba.xxx-eng.xxx.

    Raises ValueError for a damaged file, with its name and line, and for a folder without such files.
    """
    require_folder(folder, "name the folder of LASER's Tatoeba v1 files")
    codes = {match["code"] for path in folder.iterdir() if (match := _TATOEBA_FILE.fullmatch(path.name))}
    if not codes:
        raise ValueError(
            f"{folder} holds no file named tatoeba.xxx-eng.xxx: name the folder of LASER's Tatoeba v1 files"
        )
    return {
        language: read_sentence_pairs(folder / f"tatoeba.{code}-eng.eng", folder / f"tatoeba.{code}-eng.{code}")
        for language, code in sorted((XTREME_CODES.get(code, code), code) for code in codes)
    }


def heldout_pairs(folder: Path, vocabulary: Vocabulary) -> Iterator[EnglishPair]:
    """The pairs with English in `folder`, which is a data folder with para/ or has line-aligned files: X.en-de.en with
    X.en-de.de, or en-de.txt.zip.

    Raises ValueError for data that another vocabulary encoded, for damaged files, and for a folder without pairs.
    """
    if (folder / "para").is_dir():
        store = RowStore(folder / "para")
        if store.manifest.vocabulary_sha256 != vocabulary.sha256:
            raise ValueError(
                f"{folder} was encoded with another vocabulary than {vocabulary.path}: "
                "name a data folder of the run, or text"
            )
        yield from stored_pairs(store)
    else:
        yield from _text_pairs(folder, vocabulary)


def stored_pairs(store: RowStore) -> Iterator[EnglishPair]:
    """Yield the pairs with English of a store of the task para."""
    for start in range(0, store.rows, 256):
        rows = store.read(np.arange(start, min(start + 256, store.rows)))
        sides = list(zip((store.languages[index] for index in rows.languages), rows.texts(), strict=True))
        for pair in zip(sides[::2], sides[1::2], strict=True):
            ids_of = dict(pair)
            english = ids_of.pop(ENGLISH, None)
            if english is not None and ids_of:  # not a pair of two English sides
                language, other = ids_of.popitem()
                yield language, other, english


def _text_pairs(folder: Path, vocabulary: Vocabulary) -> Iterator[EnglishPair]:
    """Yield the pairs with English of a folder of line-aligned text."""
    require_folder(folder, "name a data folder with para/, or a folder of text")
    names = [path.name for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    matches = [match for name in names if (match := _PAIR_FILE.fullmatch(name))]
    if not matches:
        raise ValueError(
            f"{folder} holds no pairs with {ENGLISH}: put X.{ENGLISH}-de.{ENGLISH} and X.{ENGLISH}-de.de or "
            f"{ENGLISH}-de.txt.zip there, or name a data folder that has para/"
        )
    for match in matches:
        path, language = folder / match[0], match["after"] or match["before"]
        if match["side"] is None:  # an archive
            sides = _zipped_sides(path, language)
        else:
            paths = [path.with_suffix(f".{code}") for code in (ENGLISH, language)]
            for side_path in paths:
                if not side_path.exists():
                    raise ValueError(f"{path} has no other side: put {side_path.name} next to it")
            if match["side"] != ENGLISH:
                continue  # the loop reads both sides at the English file
            sides = [(str(side_path), side_path.read_bytes()) for side_path in paths]
        (english_name, english), (other_name, other) = ((name, split_lines(data, name)) for name, data in sides)
        require_same_length(english, english_name, other, other_name)
        for lines in zip(other, english, strict=True):
            other_ids, english_ids = map(vocabulary.encode, lines)
            if len(other_ids) and len(english_ids):  # corpora leave the line of a missing translation empty
                yield language, other_ids, english_ids


def _zipped_sides(path: Path, language: str) -> list[tuple[str, bytes]]:
    """Returns (name, content) of an archive's English member, and then of its other member. Raises ValueError if one is
    missing or not the only one, or if the archive cannot be read."""
    sides = []
    try:
        with zipfile.ZipFile(path) as archive:
            for code in (ENGLISH, language):
                visible = (name for name in archive.namelist() if not _HIDDEN_MEMBER.match(name))
                names = [name for name in visible if name.rpartition(".")[2] == code]
                if not names:
                    raise ValueError(f"{path} holds no file that ends in .{code}: fetch it again")
                if len(names) > 1:
                    raise ValueError(f"{path} holds {', '.join(names)}: put each corpus into an archive of its own")
                sides.append((f"{path}:{names[0]}", archive.read(names[0])))
    # RuntimeError: a member is encrypted, or its compression is unknown.
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the system, not of bz2
            raise
        raise ValueError(
            f"{path} cannot be read ({error}): fetch it again, as it is damaged, encrypted or in an unknown compression"
        ) from None
    return sides


def group_by_language(english_pairs: Iterable[EnglishPair], fewest: int = FEWEST_PAIRS) -> dict[str, Bitext]:
    """Group pairs by the language that is not English. Returns for each language (English sentences, translations).

    Languages with fewer than `fewest` pairs are left out, and so are pairs that repeat a sentence of an earlier pair:
    no ranking can distinguish equal candidates.
    """
    # By language: (English sentence, translation) by the bytes of the English sentence.
    kept_pairs: dict[str, dict[bytes, tuple[np.ndarray, np.ndarray]]] = defaultdict(dict)
    translations: dict[str, set[bytes]] = defaultdict(set)
    for language, other, english in english_pairs:
        if english.tobytes() not in kept_pairs[language] and other.tobytes() not in translations[language]:
            kept_pairs[language][english.tobytes()] = (english, other)
            translations[language].add(other.tobytes())
    return {
        language: ([english for english, _ in kept.values()], [other for _, other in kept.values()])
        for language, kept in sorted(kept_pairs.items())
        if len(kept) >= fewest
    }


def retrieval_scores(encoder: TextEncoder, bitexts: Bitexts, name: str) -> dict[str, Any]:
    """The result of `retrieval_accuracies`, with three more keys. `sets`: for each of the papers' sets of languages,
    means over the set's languages that the test has, their number (`found`), and the number of languages in the set
    (`of`). `cut`: the number of sentences too long for the model. `pairs`: the number of pairs of each language."""
    scores = retrieval_accuracies(encoder, bitexts, centred=True, name=name)
    longest = encoder.cfg.max_positions - 2  # without <s> and </s>
    sentences = (sentence for bitext in bitexts.values() for side in bitext for sentence in side)
    sets = {}
    for set_name, codes in LANGUAGE_SETS.items():
        if tested := [code for code in codes if code in bitexts]:
            sets[set_name] = mean_over(scores["languages"], tested) | {"found": len(tested), "of": len(codes)}
    return scores | {
        "sets": sets,
        "cut": sum(len(sentence) > longest for sentence in sentences),
        "pairs": {language: len(english) for language, (english, _) in bitexts.items()},
    }


def retrieval_accuracies(
    encoder: TextEncoder, bitexts: Bitexts, centred: bool = False, name: str = ""
) -> dict[str, Any]:
    """Returns a dict of retrieval scores. `languages` has, for each language and direction, a list of accuracies, one
    per layer. `overall` has, for each direction, a list of their means over the languages, one per layer.

    `centred` adds the directions with centred vectors, and `dimensions`: the centred vectors' effective rank in each
    layer. Lines of progress begin with `name`.
    """
    vectors = (
        (code, sentence_vectors(encoder, [*english, *other], languages=[ENGLISH] * len(english) + [code] * len(other)))
        for code, (english, other) in progress(bitexts.items(), len(bitexts), "languages", name)
    )
    return accuracies_of_vectors(vectors, centred)


def accuracies_of_vectors(vectors: Iterable[tuple[str, np.ndarray]], centred: bool = False) -> dict[str, Any]:
    """The result of `retrieval_accuracies`, computed from each language's vectors [L, 2N, D]: first the N English
    sentences, then their N translations."""
    languages: dict[str, dict[str, list[float]]] = {}
    products: list[np.ndarray] = []  # for each layer, [D, D]: the sum of x xᵀ over all centred vectors x
    for language, vectors_LND in vectors:
        half = vectors_LND.shape[1] // 2
        variants = {"": [(layer[:half], layer[half:]) for layer in vectors_LND]}  # by suffix of the directions' keys
        if centred:
            variants[CENTRED] = [(english - english.mean(0), other - other.mean(0)) for english, other in variants[""]]
            new_products = [english.T @ english + other.T @ other for english, other in variants[CENTRED]]
            products = list(map(np.add, products, new_products)) if products else new_products
        languages[language] = {}
        for suffix, sides_by_layer in variants.items():
            accuracies_by_layer = [accuracy_at_1(english, other) for english, other in sides_by_layer]
            # `accuracy_at_1` returns the directions in the order of DIRECTIONS.
            for direction, accuracies in zip(DIRECTIONS, zip(*accuracies_by_layer, strict=True), strict=True):
                languages[language][direction + suffix] = list(accuracies)
    scores: dict[str, Any] = {"overall": mean_over(languages, list(languages)), "languages": languages}
    if centred:
        scores["dimensions"] = [effective_rank(sum_DD) for sum_DD in products]
    return scores


def accuracy_at_1(english_ND: np.ndarray, other_ND: np.ndarray, block: int = 1024) -> tuple[float, float]:
    """Returns accuracy@1 from English and accuracy@1 to English: the share of sentences whose nearest sentence on the
    other side, by cosine, has the same index. Of equally near sentences the first one counts as the nearest.

    Only `block` rows of the N × N cosines are in memory at a time.
    """
    english_ND, other_ND = unit_vectors(english_ND), unit_vectors(other_ND)
    count = len(english_ND)
    nearest_other = np.empty(count, dtype=np.int64)  # index of the translation nearest to each English sentence
    nearest_english = np.zeros(count, dtype=np.int64)  # index of the English sentence nearest to each translation
    best_cosines = np.full(count, -np.inf)  # the cosine of each translation and the English sentence nearest to it
    for start in range(0, count, block):
        cosines = english_ND[start : start + block] @ other_ND.T
        nearest_other[start : start + block] = cosines.argmax(1)
        block_best = cosines.max(0)
        nearest_english = np.where(block_best > best_cosines, start + cosines.argmax(0), nearest_english)
        best_cosines = np.maximum(best_cosines, block_best)
    partner = np.arange(count)  # a sentence and its translation have the same index
    return float((nearest_other == partner).mean()), float((nearest_english == partner).mean())


def mean_over(languages: Mapping[str, Mapping[str, Sequence[float]]], chosen: Sequence[str]) -> dict[str, list[float]]:
    """The unweighted mean of the scores of the `chosen` languages: for each direction a list, one mean per layer."""
    return {
        direction: np.mean([languages[language][direction] for language in chosen], axis=0).tolist()
        for direction in languages[chosen[0]]
    }


def mean_of_directions(result: Mapping[str, Any], centred: bool = False) -> list[float]:
    """The mean accuracy of both directions by layer, over the papers' 36 languages if the test has them all, else over
    the test's languages. `result`: a model's entry in the test's results."""
    scores = complete_sets(result).get("36", result["overall"])
    suffix = CENTRED if centred else ""
    by_direction = (scores[direction + suffix] for direction in DIRECTIONS)
    return [(from_english + to_english) / 2 for from_english, to_english in zip(*by_direction, strict=True)]


def complete_sets(result: Mapping[str, Any]) -> dict[str, Any]:
    """A model's scores over each of the papers' sets of languages, by name. A set is left out if the test lacks one of
    its languages."""
    return {name: scores for name, scores in result["sets"].items() if scores["found"] == scores["of"]}


def retrieval_tables(results: Mapping[str, Any]) -> list[ResultTable]:
    """One table per model: the accuracies by language, at the layer that the model's entry names."""
    tables = []
    titles = DIRECTIONS | {direction + CENTRED: f"{title} centred*" for direction, title in DIRECTIONS.items()}
    for result in results["models"]:
        table = table_at_layer(
            result,
            "accuracy@1 (%)",
            "language",
            titles,
            {f"mean of the papers' {name}": scores for name, scores in complete_sets(result).items()},
            note="the mean vector of each side of a language subtracted",
            cut_note="sentences were cut to the model's maximum length",
        )
        if "dimensions" in result:
            ranks = ", ".join(f"{rank:.0f}" for rank in result["dimensions"])
            table.notes.append(f"dimensions in which the centred vectors vary (effective rank), by layer: {ranks}")
        table.notes += trained_on_notes([result])
        if too_few := result.get("too_few"):
            counts = ", ".join(f"{language} ({count})" for language, count in too_few.items())
            table.notes.append(f"left out, with fewer than {FEWEST_PAIRS} pairs without repetitions: {counts}")
        tables.append(table)
    return tables

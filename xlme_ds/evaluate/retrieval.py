"""Cross-lingual sentence retrieval: nearest neighbour by cosine, accuracy@1 in both directions, at every layer.

The sentences are the Tatoeba test set's (LASER's v1 files) or translation pairs that were kept out of training. A
`Group` is the test of one language: sentences in the pivot language and, in the same order, their translations.
"""

import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..cli import progress
from ..data.schema import EOS, LAYOUTS
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary
from ..models.dimensions import effective_rank
from ..models.text_encoder import EncoderName, TextEncoder
from .compared_models import Models, load_encoders, trained_on, trained_on_note
from .output import ResultTable, table_at_layer
from .text_lines import read_sentence_pairs, require_same_length, split_lines
from .vectors import sentence_vectors, unit_length

Group = tuple[list[np.ndarray], list[np.ndarray]]
Groups = Mapping[str, Group]

PIVOT = "en"
WAYS = {"en_xx": "en→xx", "xx_en": "xx→en"}
CENTRED = "_centred"  # suffix of a direction: each side's mean vector is subtracted first, which the papers do not do
FEWEST_PAIRS = 5  # pairs of a language that make its accuracy meaningful

# ISO 639-3 codes in file names -> the papers' codes, for XTREME's 36 languages. Others keep the code in the file name.
XTREME = {
    "afr": "af", "ara": "ar", "bul": "bg", "ben": "bn", "deu": "de", "ell": "el", "spa": "es", "est": "et", "eus": "eu",
    "pes": "fa", "fin": "fi", "fra": "fr", "heb": "he", "hin": "hi", "hun": "hu", "ind": "id", "ita": "it", "jpn": "ja",
    "jav": "jv", "kat": "ka", "kaz": "kk", "kor": "ko", "mal": "ml", "mar": "mr", "nld": "nl", "por": "pt", "rus": "ru",
    "swh": "sw", "tam": "ta", "tel": "te", "tha": "th", "tgl": "tl", "tur": "tr", "urd": "ur", "vie": "vi", "cmn": "zh",
}  # fmt: skip
SETS = {
    "14": ("ar", "bg", "de", "el", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh"),  # XNLI's languages
    "36": tuple(XTREME.values()),
}
_TATOEBA_FILE = re.compile(r"tatoeba\.(?P<code>[a-z]{3})-eng\.(eng|(?P=code))")
_HIDDEN = re.compile(r"__MACOSX/|(.*/)?\.")  # zip members that operating systems add
# A file of a corpus with English, X.en-de.en or X.en-de.de, or its archive en-de.txt.zip; `X.` may be absent.
_PAIR_FILE = re.compile(rf"(.*\.)?({PIVOT}-(?P<after>[^.]+)|(?P<before>[^.]+)-{PIVOT})(\.txt\.zip|\.(?P<side>[^.]+))")


def tatoeba(
    models: Models,
    data: Path | str,
    *,
    layer: int | None = None,
    which: EncoderName | None = None,
    random: bool = False,
) -> dict[str, Any]:
    """Sentence retrieval on the Tatoeba test set: `data` has LASER's files, tatoeba.xxx-eng.xxx and
    tatoeba.xxx-eng.eng."""
    compared, text = load_encoders(models, layer, random, which), read_tatoeba(Path(data))
    scored = []
    for model in compared:
        encode = model.vocabulary.encode
        groups = {
            language: ([encode(line) for line in ours], [encode(line) for line in theirs])
            for language, (ours, theirs) in text.items()
        }
        scored.append(model.description | retrieval_scores(model.encoder, groups, model.name))
    return {"test": "tatoeba", "models": scored}


def pairs(
    models: Models,
    data: Path | str,
    *,
    limit: int = 1000,
    layer: int | None = None,
    which: EncoderName | None = None,
    random: bool = False,
) -> dict[str, Any]:
    """Sentence retrieval on translation pairs kept out of training: `data` is a data folder that holds para/, or has
    line-aligned text, X.en-de.en with X.en-de.de or en-de.txt.zip; `limit` pairs of a language are read."""
    if limit < FEWEST_PAIRS:
        raise ValueError(f"--limit {limit} leaves too few pairs for an accuracy: it must be at least {FEWEST_PAIRS}")
    scored = []
    for model in load_encoders(models, layer, random, which):
        all_groups = group_by_language(heldout_pairs(Path(data), model.vocabulary), smallest=1)
        groups = {code: (a[:limit], b[:limit]) for code, (a, b) in all_groups.items() if len(a) >= FEWEST_PAIRS}
        if not groups:
            raise ValueError(f"{data} has no language with {FEWEST_PAIRS} pairs or more: an accuracy needs candidates")
        too_few = {code: len(a) for code, (a, _) in all_groups.items() if code not in groups}
        note_of_training = trained_on(model, RowStore(Path(data) / "para")) if (Path(data) / "para").is_dir() else {}
        scores = retrieval_scores(model.encoder, groups, model.name)
        scored.append(model.description | note_of_training | scores | {"too_few": too_few})
    return {"test": "pairs", "models": scored}


def read_tatoeba(folder: Path) -> dict[str, tuple[list[str], list[str]]]:
    """(English sentences, their translations) by language, from files tatoeba.xxx-eng.eng and tatoeba.xxx-eng.xxx.

    Raises ValueError, naming file and line, on damaged files, and on a folder that has none.
    """
    matches = [_TATOEBA_FILE.fullmatch(path.name) for path in folder.glob("tatoeba.*")]
    codes = {match["code"] for match in matches if match}
    if not codes:
        raise ValueError(
            f"{folder} holds no file named tatoeba.xxx-eng.xxx: name the folder of LASER's Tatoeba v1 files"
        )
    return {
        language: read_sentence_pairs(folder / f"tatoeba.{code}-eng.eng", folder / f"tatoeba.{code}-eng.{code}")
        for language, code in sorted((XTREME.get(code, code), code) for code in codes)
    }


class TranslationPair(NamedTuple):
    """Both sides' ids without special tokens, and their language codes."""

    first: np.ndarray
    second: np.ndarray
    first_language: str
    second_language: str


def heldout_pairs(folder: Path, vocabulary: Vocabulary) -> Iterator[TranslationPair]:
    """The pairs of a mixed data folder, or of the line-aligned files in `folder`: X.en-de.en with X.en-de.de,
    en-de.txt.zip.

    Raises ValueError on another vocabulary's data, damaged files, and a folder without pairs.
    """
    if (folder / "para").is_dir():
        store = RowStore(folder / "para")
        if store.manifest.vocabulary_sha256 != vocabulary.sha256:
            raise ValueError(
                f"{folder} was encoded with another vocabulary than {vocabulary.path}: "
                "name a data folder of the run, or text"
            )
        yield from packed_pairs(store)
    else:
        yield from _text_pairs(folder, vocabulary)


def packed_pairs(store: RowStore) -> Iterator[TranslationPair]:
    """The pairs of a store of the task para."""
    codes, separators = store.languages, len(LAYOUTS[store.manifest.layout].between)
    for start in range(0, store.rows, 256):
        rows = store.read(np.arange(start, min(start + 256, store.rows)))
        languages, lengths = iter(rows.languages), iter(rows.lengths)
        for tokens, items in zip(rows.tokens, rows.items, strict=True):
            at = 0
            for _ in range(items):
                length = int(next(lengths))
                ids = tokens[at : at + length]
                middle = 1 + int(np.flatnonzero(ids[1:] == EOS)[0])
                first, second = codes[next(languages)], codes[next(languages)]
                yield TranslationPair(ids[1:middle], ids[middle + separators : -1], first, second)
                at += length


def _text_pairs(folder: Path, vocabulary: Vocabulary) -> Iterator[TranslationPair]:
    """The pairs of line-aligned files. Raises ValueError on damaged ones, and on a folder without any."""
    any_pairs = False
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _PAIR_FILE.fullmatch(path.name)
        language = (match["after"] or match["before"]) if match else ""
        if not match or match["side"] not in (None, PIVOT, language):
            continue
        if match["side"] is None:
            sides = _zipped_sides(path, language)
        else:
            paths = [path.with_suffix(f".{code}") for code in (PIVOT, language)]
            for side in paths:
                if not side.exists():
                    raise ValueError(f"{path} has no other side: put {side.name} next to it")
            if match["side"] != PIVOT:
                continue  # read with its English side
            sides = [(str(side), side.read_bytes()) for side in paths]
        any_pairs = True
        (our_name, our_lines), (their_name, their_lines) = ((name, split_lines(data, name)) for name, data in sides)
        require_same_length(our_lines, our_name, their_lines, their_name)
        for a, b in zip(our_lines, their_lines, strict=True):
            if a.strip() and b.strip():  # corpora write a sentence without a translation as an empty line
                yield TranslationPair(vocabulary.encode(a), vocabulary.encode(b), PIVOT, language)
    if not any_pairs:
        raise ValueError(
            f"{folder} holds no pairs with {PIVOT}: put X.{PIVOT}-de.{PIVOT} and X.{PIVOT}-de.de or {PIVOT}-de.txt.zip "
            "there, or name a data folder that has para/"
        )


def _zipped_sides(path: Path, language: str) -> list[tuple[str, bytes]]:
    """(name, content) of the English side and of the other. Raises ValueError on an archive without them."""
    sides = []
    try:
        with zipfile.ZipFile(path) as archive:
            for code in (PIVOT, language):
                listed = (name for name in archive.namelist() if not _HIDDEN.match(name))
                names = [name for name in listed if name.rpartition(".")[2] == code]
                if not names:
                    raise ValueError(f"{path} holds no file that ends in .{code}: fetch it again")
                if len(names) > 1:
                    raise ValueError(f"{path} holds {', '.join(names)}: put each corpus into an archive of its own")
                sides.append((f"{path}:{names[0]}", archive.read(names[0])))
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # the last: encrypted, or unknown packing
        raise ValueError(
            f"{path} cannot be read ({error}): it is damaged, encrypted or in an unknown compression, fetch it again"
        ) from None
    return sides


def group_by_language(translation_pairs: Iterable[TranslationPair], smallest: int = FEWEST_PAIRS) -> dict[str, Group]:
    """Group the pairs with English on one side by the other language: (English sentences, translations).

    Languages with fewer than `smallest` pairs are left out, and so are pairs with a sentence of an earlier pair: no
    ranking can distinguish equal candidates.
    """
    groups: dict[str, dict[bytes, tuple[np.ndarray, np.ndarray]]] = defaultdict(dict)
    theirs_of: dict[str, set[bytes]] = defaultdict(set)
    for first, second, *languages in translation_pairs:
        if PIVOT not in languages or languages[0] == languages[1]:
            continue
        forward = languages[0] == PIVOT
        ours, theirs = (first, second) if forward else (second, first)
        language = languages[forward]
        if ours.tobytes() not in groups[language] and theirs.tobytes() not in theirs_of[language]:
            groups[language][ours.tobytes()] = (ours, theirs)
            theirs_of[language].add(theirs.tobytes())
    return {
        language: ([a for a, _ in group.values()], [b for _, b in group.values()])
        for language, group in sorted(groups.items())
        if len(group) >= smallest
    }


def accuracies(ours: np.ndarray, theirs: np.ndarray, block: int = 1024) -> tuple[float, float]:
    """Share of rows of `ours` [N, D] whose nearest row of `theirs` [N, D] by cosine is their own, and the reverse.

    `block` rows of the N × N cosines exist at a time. Of equally near rows the first counts as the nearest.
    """
    a, b = unit_length(ours), unit_length(theirs)
    own = np.arange(len(a))
    forward = np.empty(len(a), dtype=np.int64)
    backward, best = np.zeros(len(a), dtype=np.int64), np.full(len(a), -np.inf)
    for start in range(0, len(a), block):
        cosines = a[start : start + block] @ b.T
        forward[start : start + block] = cosines.argmax(1)
        rows = cosines.argmax(0)
        values = cosines[rows, own]
        backward[values > best] = (start + rows)[values > best]
        best = np.maximum(best, values)
    return float((forward == own).mean()), float((backward == own).mean())


def retrieve(model: TextEncoder, groups: Groups, centred: bool = False, name: str = "") -> dict[str, Any]:
    """Accuracies by layer, for each language and averaged over the languages; lines of progress begin with `name`.

    `centred` adds the accuracies of centred vectors, and as `dimensions` their effective rank by layer.
    """
    vectors = (
        (language, sentence_vectors(model, [*a, *b], languages=[PIVOT] * len(a) + [language] * len(b)))
        for language, (a, b) in progress(groups.items(), len(groups), "languages", name)
    )
    return scores_of_vectors(vectors, centred)


def scores_of_vectors(vectors: Iterable[tuple[str, np.ndarray]], centred: bool = False) -> dict[str, Any]:
    """The result of `retrieve`, from each language's vectors [layers, 2N, D], English sentences first."""
    languages: dict[str, dict[str, list[float]]] = {}
    products: list[np.ndarray] = []  # by layer, the sum of x xᵀ over all centred vectors x: [D, D]
    for language, vectors_LND in vectors:
        half = vectors_LND.shape[1] // 2
        variants = {"": [(layer[:half], layer[half:]) for layer in vectors_LND]}
        if centred:
            variants[CENTRED] = [(a - a.mean(0), b - b.mean(0)) for a, b in variants[""]]
            new_products = [a.T @ a + b.T @ b for a, b in variants[CENTRED]]
            products = list(map(np.add, products, new_products)) if products else new_products
        languages[language] = {}
        for suffix, sides in variants.items():
            by_way = zip(*(accuracies(a, b) for a, b in sides), strict=True)
            languages[language] |= {way + suffix: list(by_layer) for way, by_layer in zip(WAYS, by_way, strict=True)}
    scores = {"overall": mean_over(languages, list(languages)), "languages": languages}
    return scores | ({"dimensions": [effective_rank(sum_DD) for sum_DD in products]} if centred else {})


def mean_over(languages: Mapping[str, Mapping[str, Sequence[float]]], chosen: Sequence[str]) -> dict[str, list[float]]:
    """The unweighted mean of the scores of the `chosen` languages, by way and layer."""
    return {
        way: np.mean([languages[language][way] for language in chosen], axis=0).tolist() for way in languages[chosen[0]]
    }


def retrieval_scores(model: TextEncoder, groups: Groups, name: str) -> dict[str, Any]:
    """Accuracies of one model, also over the papers' sets of languages, and how many sentences were cut."""
    scores = retrieve(model, groups, True, name)
    longest = model.cfg.max_positions - 2
    cut = sum(len(sentence) > longest for group in groups.values() for side in group for sentence in side)
    tested = {name: [code for code in codes if code in groups] for name, codes in SETS.items()}
    sets = {
        name: mean_over(scores["languages"], codes) | {"found": len(codes), "of": len(SETS[name])}
        for name, codes in tested.items()
        if codes
    }
    return scores | {"sets": sets, "cut": cut, "pairs": {language: len(ours) for language, (ours, _) in groups.items()}}


def both_ways(model: Mapping[str, Any], centred: bool = False) -> list[float]:
    """The mean accuracy of both directions by layer, over the papers' 36 languages if the test has them all, else over
    the languages that it has."""
    scores = complete_sets(model).get("36", model["overall"])
    return [(a + b) / 2 for a, b in zip(*(scores[way + CENTRED * centred] for way in WAYS), strict=True)]


def complete_sets(model: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of those of the papers' sets of languages that the test covers completely."""
    return {name: scores for name, scores in model["sets"].items() if scores["found"] == scores["of"]}


def retrieval_tables(results: Mapping[str, Any]) -> list[ResultTable]:
    """A table of accuracies by language for every model, at its chosen layer."""
    tables = []
    ways = WAYS | {way + CENTRED: f"{title} centred*" for way, title in WAYS.items()}
    note = "the mean vector of each side of a language subtracted"
    cut = "sentences were cut: they are longer than the model's longest item"
    for model in results["models"]:
        means = {f"mean of the papers' {name}": scores for name, scores in complete_sets(model).items()}
        table = table_at_layer(model, "accuracy@1 (%)", "language", ways, means, note, cut)
        if "dimensions" in model:
            ranks = ", ".join(f"{rank:.0f}" for rank in model["dimensions"])
            table.notes.append(f"dimensions in which the centred vectors vary (effective rank), by layer: {ranks}")
        table.notes += trained_on_note([model])
        if too_few := model.get("too_few"):
            counts = ", ".join(f"{code} ({count})" for code, count in too_few.items())
            table.notes.append(f"left out, with fewer than {FEWEST_PAIRS} pairs without repetitions: {counts}")
        tables.append(table)
    return tables

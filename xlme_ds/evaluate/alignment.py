"""Word alignment by optimal transport between the subword vectors of one layer (XLM-Align section 3.1; XLM-E section
4.6), and its error rate against links made by hand (Och and Ney 2003; XLM-E equation 10).

Sizes of arrays: S source subwords and T target subwords of a pair, D width.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..cli import note, progress
from ..config import EncoderName
from ..data.rows import LAYOUTS, batches_by_length
from ..data.vocabulary import Vocabulary
from ..io.argument_types import check_argument_types
from ..io.folders import require_folder
from ..models.text_encoder import TextEncoder
from .compared_models import Models, load_encoders, require_languages
from .output import ResultTable, table_at_layer
from .text_lines import read_sentence_pairs, split_lines
from .vectors import hidden_states, unit_vectors

Links = set[tuple[int, int]]  # (source word, target word), both from 0

_LINK_FILES = ("alignv2.txt", "align.txt")  # the first is preferred: it tells sure links from possible ones
_LINK = re.compile(r"(-?\d+)\s+(-?\d+)\s+(-?\d+)(?:\s+([SP]))?")
# Largest share of links of words that their sentences lack. Published files have single ones; many mean that the
# folder's name has the languages in the wrong order.
_MOST_IMPOSSIBLE = 0.001
_MEASURES = {  # key in the results -> title in tables
    "aer": "AER",
    "precision": "precision",
    "recall": "recall",
    "aer_cosine": "AER, cosines*",  # *: the note in `alignment_tables` explains it
}


class GoldPair(NamedTuple):
    """The words of a sentence pair, and their links made by hand. The possible links include the sure ones."""

    source: list[str]
    target: list[str]
    sure: Links
    possible: Links


class _LinkLine(NamedTuple):
    """A line of a file of links."""

    number: int  # of the line, from 1
    sentence: int  # from 0 or from 1
    source_word: int  # from 1, as in the file
    target_word: int
    certainty: str | None  # "S", "P", or None for a sure link


class Subwords(NamedTuple):
    """The subwords of a sentence."""

    ids: np.ndarray
    words: np.ndarray  # index of the word that each subword belongs to

    def first(self, size: int) -> "Subwords":
        """The first `size` subwords."""
        return Subwords(self.ids[:size], self.words[:size])


@check_argument_types
def align(
    models: Models,
    data: Path | str,
    *,
    apart: bool = False,
    layer: int | None = None,
    which: EncoderName | None = None,
    random: bool = False,
) -> dict[str, Any]:
    """Word alignment, scored against links made by hand. `data` has folders named a-b, each with test.a, test.b and
    alignv2.txt or align.txt, or is such a folder. `apart`: each sentence is an input of its own, instead of both in
    one. `help(xlme.evaluate)` explains the other arguments, the errors and what is returned."""
    tests = read_gold_alignments(Path(data))
    compared = load_encoders(models, layer, random, which)
    require_languages(compared, {code for test_name in tests for code in test_name.split("-", 1)})
    return {
        "test": "align",
        "reading": "each sentence read alone" if apart else "a pair read as one item",
        "models": [
            model.layerwise_metadata | score_all_tests(model.encoder, model.vocabulary, tests, apart, model.name)
            for model in compared
        ],
    }


def read_gold_alignments(folder: Path) -> dict[str, list[GoldPair]]:
    """The pairs of each test, by the test's name a-b. A test is a folder a-b with test.a, test.b and alignv2.txt or
    align.txt: `folder` itself, or a folder in it.

    Raises ValueError for a damaged file, whose name and line the message gives, and for a folder without tests.
    """
    tests = {}
    require_folder(folder, "name a folder of word alignments")
    # abspath, because the folder "." has no name.
    for path in [Path(os.path.abspath(folder)), *sorted(folder.iterdir())]:
        source, dash, target = path.name.partition("-")
        sides = path / f"test.{source}", path / f"test.{target}"
        links_file = next((path / name for name in _LINK_FILES if (path / name).is_file()), None)
        if links_file is None:
            if dash and any(side.is_file() for side in sides):
                raise ValueError(
                    f"{path} has sentences but no {' or '.join(_LINK_FILES)}: put it there, or remove the folder"
                )
            continue
        if not dash:
            raise ValueError(
                f"{path} has no name like de-en: name it after its languages, the source first, because the links are "
                "read in that order"
            )
        tests[path.name] = _read_test(links_file, *read_sentence_pairs(*sides))
    if not tests:
        raise ValueError(
            f"{folder} holds no word alignments: it must have folders like de-en with test.de, test.en, align.txt"
        )
    return tests


def _read_test(links_file: Path, source_lines: list[str], target_lines: list[str]) -> list[GoldPair]:
    """The pairs with their links."""
    # Not line.split(): a no-break space is part of a word.
    split_sides = ([re.findall(r"[^ \t]+", line) for line in side] for side in (source_lines, target_lines))
    pairs = [GoldPair(source, target, set(), set()) for source, target in zip(*split_sides, strict=True)]
    links = _read_links(links_file)
    first = _first_sentence(links, pairs, links_file)
    numbers = sorted({link.sentence for link in links})
    if len(numbers) != len(pairs):  # some sentences have no links; if all have, numbers may be missing between them
        numbers = list(range(first, first + len(pairs)))
    pair_of = dict(zip(numbers, pairs, strict=True))
    impossible_links: list[str] = []  # a message for each link of a word that its sentence lacks
    for line_number, sentence, source_word, target_word, certainty in links:
        if sentence not in pair_of:
            raise ValueError(
                f"{links_file} line {line_number} links words of sentence {sentence}, but there are only {len(pairs)} "
                f"sentences, counted from {first}: fetch the links that belong to these sentences"
            )
        pair = pair_of[sentence]
        messages = [
            f"{links_file} line {line_number} has {side} word {word}, but sentence {sentence} has {len(words)} {side} "
            "words, counted from 1"
            for word, words, side in ((source_word, pair.source, "source"), (target_word, pair.target, "target"))
            if word == 0 or word > len(words)
        ]
        impossible_links += messages[:1]
        if not messages and source_word > 0 and target_word > 0:  # a negative number marks a missing partner
            pair.possible.add((source_word - 1, target_word - 1))
            if certainty != "P":
                pair.sure.add((source_word - 1, target_word - 1))
    if len(impossible_links) > _MOST_IMPOSSIBLE * len(links):
        raise ValueError(f"{impossible_links[0]}: name the folder after the source language first")
    if impossible_links:
        note(f"{impossible_links[0]}: {len(impossible_links)} of {len(links)} links are left out for such words")
    if not any(pair.sure for pair in pairs):
        raise ValueError(f"{links_file} has no sure link, which an error rate needs: fetch the file again")
    return pairs


def _read_links(links_file: Path) -> list[_LinkLine]:
    """The lines of a file in NAACL's format, `sentence source-word target-word [S|P]`, with words counted from 1; a
    link without S or P is sure."""
    links = []
    for line_number, line in enumerate(split_lines(links_file.read_bytes(), links_file), start=1):
        link = _LINK.fullmatch(line.strip())
        if link is not None:
            links.append(_LinkLine(line_number, int(link[1]), int(link[2]), int(link[3]), link[4]))
        elif line.strip():
            raise ValueError(
                f"{links_file} line {line_number} is {line.strip()!r}: it must be sentence, source word, target word, "
                "and S or P or nothing"
            )
    return links


def _first_sentence(links: Sequence[_LinkLine], pairs: Sequence[GoldPair], links_file: Path) -> int:
    """The number that `links` give the first sentence, 0 or 1.

    In NAACL's format sentences are counted from 1, but some published files count them from 0. A file is read as
    counted from 0 if it has a link of sentence 0, or if the words of all links exist only when counted from 0. If they
    exist either way, the file is read as counted from 1, and a note says so.
    """
    possible_firsts = [
        first
        for first in (0, 1)
        if all(
            0 <= link.sentence - first < len(pairs)
            and link.source_word <= len(pairs[link.sentence - first].source)
            and link.target_word <= len(pairs[link.sentence - first].target)
            for link in links
        )
    ]
    if possible_firsts == [0, 1]:
        note(f"{links_file} has no link of sentence 0 or {len(pairs)}: its sentences are taken as counted from 1")
    has_zero = any(link.sentence == 0 for link in links)
    return 0 if has_zero or possible_firsts == [0] else 1


def score_all_tests(
    encoder: TextEncoder, vocabulary: Vocabulary, tests: Mapping[str, list[GoldPair]], apart: bool, name: str
) -> dict[str, Any]:
    """Part of a model's entry in the results: the scores of every test, their means, the number of pairs of every
    test, and how many pairs were cut. Lines of progress begin with `name`."""
    scores_by_test = {
        test_name: score_test(encoder, vocabulary, gold, apart, tuple(test_name.split("-", 1)))
        for test_name, gold in progress(tests.items(), len(tests), "tests", name)
    }
    cut = sum(scores.pop("cut") for scores in scores_by_test.values())
    return {
        "overall": {
            measure: np.mean([scores[measure] for scores in scores_by_test.values()], axis=0).tolist()
            for measure in _MEASURES
        },
        "tests": scores_by_test,
        "cut": cut,
        "pairs": {test_name: len(gold) for test_name, gold in tests.items()},
    }


def score_test(
    encoder: TextEncoder,
    vocabulary: Vocabulary,
    gold: list[GoldPair],
    apart: bool = False,
    languages: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Returns a dict: for each of `_MEASURES` a list of scores, one per layer, and `cut`, the number of pairs that were
    too long for the model.

    A pair is read as one item, as in training on pairs: `<s> source </s> target </s>` in the layout xlme. With `apart`,
    it is read as two items. `languages`: codes of source and target, for models with language embeddings.
    """
    whole_pairs = [(tokenize_words(pair.source, vocabulary), tokenize_words(pair.target, vocabulary)) for pair in gold]
    if apart:
        room = encoder.cfg.max_positions - 2  # without <s> and </s>
        pairs = [(source.first(room), target.first(room)) for source, target in whole_pairs]
    else:
        room = encoder.cfg.max_positions - LAYOUTS[encoder.cfg.layout].pair_specials
        pairs = [truncate_pair(source, target, room) for source, target in whole_pairs]
    # For each layer, the links of every pair, from dot products and from cosines.
    links_by_layer: list[tuple[list[Links], list[Links]]] = [
        ([set() for _ in gold], [set() for _ in gold]) for _ in range(encoder.cfg.discriminator_layers + 1)
    ]
    for index, layer, source_SD, target_TD in _subword_vectors(encoder, pairs, apart, languages):
        source_words, target_words = (side.words for side in pairs[index])
        by_product, by_cosine = links_by_layer[layer]
        by_product[index] = align_words(source_SD, target_TD, source_words, target_words)
        by_cosine[index] = align_words(unit_vectors(source_SD), unit_vectors(target_TD), source_words, target_words)
    scores_by_layer = [
        error_rates(by_product, gold) | {"aer_cosine": error_rates(by_cosine, gold)["aer"]}
        for by_product, by_cosine in links_by_layer
    ]
    cut = sum(_size(pair) < _size(whole) for pair, whole in zip(pairs, whole_pairs, strict=True))
    return {measure: [scores[measure] for scores in scores_by_layer] for measure in _MEASURES} | {"cut": cut}


def tokenize_words(words: list[str], vocabulary: Vocabulary) -> Subwords:
    """The subwords of `words`, each word tokenized by itself."""
    ids, sizes = vocabulary.encode_lines(words)
    return Subwords(ids, np.repeat(np.arange(len(words)), sizes))


def truncate_pair(source: Subwords, target: Subwords, room: int) -> tuple[Subwords, Subwords]:
    """`source` and `target` cut to `room` subwords in total: half for each, or more for one if the other needs less."""
    source_size = min(len(source.ids), max(room // 2, room - len(target.ids)))
    return source.first(source_size), target.first(room - source_size)


def _size(pair: tuple[Subwords, Subwords]) -> int:
    return len(pair[0].ids) + len(pair[1].ids)


def _subword_vectors(
    encoder: TextEncoder,
    pairs: list[tuple[Subwords, Subwords]],
    apart: bool,
    languages: tuple[str, ...],
    batch_size: int = 64,
) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Yield (pair index, layer, source vectors [S, D], target vectors [T, D]), float32, of every pair and layer."""
    layout = LAYOUTS[encoder.cfg.layout]
    for indices in batches_by_length([_size(pair) for pair in pairs], batch_size):
        if apart:  # the batch's sources, then its targets
            items = [layout.item(pairs[index][side].ids) for side in (0, 1) for index in indices]
            codes: list[tuple[str, ...]] = [(code,) for code in languages for _ in indices]
        else:
            items = [layout.item(pairs[index][0].ids, pairs[index][1].ids) for index in indices]
            codes = [languages] * len(indices) if languages else []
        states: dict[int, list[np.ndarray]] = {}  # by item, the states [tokens, D] of every layer
        for item_indices, _, layers in hidden_states(encoder, items, batch_size, codes):
            arrays = [state_BTD.cpu().numpy() for state_BTD in layers]
            states |= {item: [array[row] for array in arrays] for row, item in enumerate(item_indices)}
        for source_item, index in enumerate(indices):
            source_size, target_size = (len(side.ids) for side in pairs[index])
            source_end = 1 + source_size  # the source begins at position 1, after the start token
            target_item = source_item + len(indices) if apart else source_item
            target_start = 1 if apart else source_end + len(layout.between)
            states_by_layer = zip(states[source_item], states[target_item], strict=True)
            for layer, (source_states, target_states) in enumerate(states_by_layer):
                target_TD = target_states[target_start : target_start + target_size]
                yield index, layer, source_states[1:source_end], target_TD


def align_words(
    source_SD: np.ndarray, target_TD: np.ndarray, source_words: np.ndarray, target_words: np.ndarray
) -> Links:
    """Links between words: two words are linked if a subword of one and a subword of the other are each other's most
    probable partner. `source_SD` and `target_TD`: the vector of each subword; `source_words` and `target_words`: the
    index of each subword's word."""
    similarity_ST = source_SD @ target_TD.T
    if not similarity_ST.size:
        return set()
    rows_ST, columns_ST = sinkhorn(similarity_ST)
    target_of, source_of = rows_ST.argmax(1), columns_ST.argmax(0)  # the most probable partner of each subword
    mutual = np.flatnonzero(source_of[target_of] == np.arange(len(target_of)))  # source subwords
    return set(zip(source_words[mutual].tolist(), target_words[target_of[mutual]].tolist(), strict=True))


def sinkhorn(similarity_ST: np.ndarray, iterations: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Sinkhorn's algorithm: divide by column sums and by row sums in turn. Returns two transport plans, float64 [S, T]:
    in the first the rows sum to 1, in the second the columns.

    As in XLM-Align's code, the iteration starts from the similarity itself, not from its exponential; values that are
    not positive become 1e-6.
    """
    rows_ST = columns_ST = np.where(similarity_ST > 0, similarity_ST, 1e-6).astype(np.float64)
    for _ in range(iterations):
        columns_ST = rows_ST / rows_ST.sum(0, keepdims=True)
        rows_ST = columns_ST / columns_ST.sum(1, keepdims=True)
    return rows_ST, columns_ST


def error_rates(predicted: list[Links], gold: list[GoldPair]) -> dict[str, float]:
    """Alignment error rate (`aer`), `precision` (0 if nothing was predicted) and `recall`, over all pairs of a test.
    `predicted` has the predicted links of each pair of `gold`."""
    pairs = list(zip(predicted, gold, strict=True))
    predicted_count = sum(len(links) for links in predicted)
    sure_count = sum(len(pair.sure) for pair in gold)
    predicted_sure = sum(len(links & pair.sure) for links, pair in pairs)
    predicted_possible = sum(len(links & pair.possible) for links, pair in pairs)
    return {
        "aer": 1 - (predicted_sure + predicted_possible) / (predicted_count + sure_count),
        "precision": predicted_possible / predicted_count if predicted_count else 0.0,
        "recall": predicted_sure / sure_count,
    }


def alignment_tables(results: Mapping[str, Any]) -> list[ResultTable]:
    """One table per model: the tests' scores at the layer that the model's entry names."""
    return [
        table_at_layer(
            model,
            "word alignment (%), AER: less is better",
            "test",
            _MEASURES,
            {},
            note=f"cosines in place of dot products; {results['reading']}",
            cut_note="pairs were cut: words beyond the model's maximum length have no link",
        )
        for model in results["models"]
    ]

"""Command line: `python -m xlme_ds.evaluate tatoeba|pairs|align|perplexity|words --model DIR --data DIR`.

Sentence retrieval and word alignment with the vectors of every layer, perplexity by language, and the words of the
lookup table, for one model or several side by side.
"""

from pathlib import Path
from typing import Annotated, Any

import tyro

from ..cli import fail, program
from ..config import refuse
from ..trained import TrainedEncoder
from .alignment import alignment_tables, read_gold, score_tests
from .compared_models import ComparedEncoder, load_encoders, load_predictors
from .output import CommonOptions, EncoderOptions, LayerOptions
from .perplexity import (
    mean_costs,
    open_text,
    perplexities,
    perplexity_tables,
    require_readable,
    text_facts,
    unigram_costs_by_language,
)
from .retrieval import (
    SMALLEST,
    both_ways,
    complete_sets,
    group_by_language,
    heldout_pairs,
    read_tatoeba,
    retrieval_scores,
    retrieval_tables,
)
from .words import read_word_tests, similarity, translations, word_tables

OfAll = Annotated[CommonOptions, tyro.conf.arg(name="")]
OfEncoder = Annotated[EncoderOptions, tyro.conf.arg(name="")]
OfLayers = Annotated[LayerOptions, tyro.conf.arg(name="")]


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {test.__name__: test for test in (tatoeba, pairs, align, perplexity, words)},
            prog=program("evaluate"),
            description=__doc__,
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except (ValueError, OSError) as error:
        fail("xlme_ds.evaluate", error)


def tatoeba(options: OfLayers) -> None:
    """Sentence retrieval on the Tatoeba test set, English with every language that `--data` has.

    `--data`: folder of LASER's v1 files, tatoeba.xxx-eng.xxx and tatoeba.xxx-eng.eng.
    """
    compared, text = _encoders(options), read_tatoeba(options.data)
    scored = []
    for model in compared:
        encode = model.vocabulary.encode
        groups = {
            language: ([encode(line) for line in ours], [encode(line) for line in theirs])
            for language, (ours, theirs) in text.items()
        }
        scored.append(_facts(model) | retrieval_scores(model.encoder, groups))
    _deliver_retrieval("tatoeba", scored, options)


def pairs(options: OfLayers, limit: int = 1000) -> None:
    """Sentence retrieval on translation pairs kept out of training.

    `--data`: data folder that holds para/, or folder of line-aligned text: X.en-de.en with X.en-de.de, or
    en-de.txt.zip.

    Args:
        limit: Pairs of a language that are read, from the start; repetitions are left out.
    """
    if limit < 1:
        raise ValueError(f"--limit {limit} leaves no pair: it must be at least 1")
    scored = []
    for model in _encoders(options):
        every = group_by_language(heldout_pairs(options.data, model.vocabulary), smallest=1)
        groups = {code: (a[:limit], b[:limit]) for code, (a, b) in every.items() if len(a) >= SMALLEST}
        if not groups:
            raise ValueError(
                f"{options.data} has no language with {SMALLEST} pairs or more: an accuracy needs candidates"
            )
        few = {code: len(a) for code, (a, _) in every.items() if code not in groups}
        scored.append(_facts(model) | retrieval_scores(model.encoder, groups) | {"too_few": few})
    _deliver_retrieval("pairs", scored, options)


def align(options: OfLayers, apart: bool = False) -> None:
    """Word alignment by optimal transport, scored against links made by hand.

    `--data`: folder of tests named a-b, each with test.a, test.b and alignv2.txt or align.txt; or one such folder.

    Args:
        apart: Read both sentences of a pair as items of their own instead of one.
    """
    compared, gold = _encoders(options), read_gold(options.data)
    scored = [_facts(model) | score_tests(model.encoder, model.vocabulary, gold, apart) for model in compared]
    reading = "each sentence read alone" if apart else "a pair read as one item"
    results = {"test": "align", "reading": reading, "models": scored}
    curves = [(model["model"], model["overall"]["aer"], False) for model in scored]
    options.deliver(
        results, alignment_tables(results), curves, "mean alignment error rate (%)", f"mean over {', '.join(gold)}"
    )


def perplexity(
    options: OfAll, passes: int = 1, seed: int = 1, limit: int | None = None, unigram: Path | None = None
) -> None:
    """Perplexity by language of the tokens that a model predicts in monolingual text: masked ones, or all of them.

    `--data`: data folder that holds mono/, encoded with the models' vocabulary.

    Args:
        passes: How often the rows are read, each time with other masks; the same ones for every model.
        seed: Of the masks.
        limit: The first so many rows of a language; by default all.
        unigram: Data folder that holds mono/, of training: a unigram model counted there has a column, too.
    """
    refuse(
        (value is None or value >= 1, f"--{name} {value} leaves nothing to read: it must be at least 1")
        for name, value in (("passes", passes), ("limit", limit))
    )
    predictors, store = load_predictors(options.models, options.random), open_text(options.data)
    for model in predictors:
        require_readable(model, store)
    rows, tokens_per_character = text_facts(store, predictors[0].vocabulary, limit)
    counted = None if unigram is None else unigram_costs_by_language(open_text(unigram), store, limit)
    scored = []
    for model in predictors:
        costs = mean_costs(model, open_text(options.data, model.cfg.language_embeddings), seed, passes, limit)
        facts = {"model": model.name, "folder": str(model.folder), "term": model.objective.terms[0]}
        scored.append(facts | perplexities(costs, tokens_per_character))
    if counted is not None:
        facts = {"model": "unigram", "folder": str(unigram), "term": "counted"}
        scored.append(facts | perplexities(counted, tokens_per_character))
    results = {"test": "perplexity", "seed": seed, "passes": passes, "rows": rows, "models": scored}
    options.deliver(results, perplexity_tables(results))


def words(options: OfEncoder) -> None:
    """Words and their translations in the lookup table: cosine, distance, and agreement with what people find alike.

    `--data`: folder with SemEval-2017's en-de.test.data.txt and en-de.test.gold.txt, or dictionaries like en-de.txt,
    also below it.
    """
    compared = load_encoders(options.models, None, options.random, options.which)
    judged, dictionaries = read_word_tests(options.data)
    scored = []
    for model in compared:
        saved = TrainedEncoder(model.encoder, model.vocabulary)
        scored.append(
            {
                "model": model.name,
                "folder": str(model.folder),
                "similarity": {name: similarity(saved, test) for name, test in judged.items()},
                "dictionaries": {name: translations(saved, test) for name, test in dictionaries.items()},
            }
        )
    results = {"test": "words", "models": scored}
    options.deliver(results, word_tables(results))


def _encoders(options: LayerOptions) -> list[ComparedEncoder]:
    return load_encoders(options.models, options.layer, options.random, options.which)


def _facts(model: ComparedEncoder) -> dict[str, Any]:
    return {
        "model": model.name,
        "folder": str(model.folder),
        "depth": model.cfg.discriminator_layers,
        "layer": model.layer,
    }


def _deliver_retrieval(test: str, scored: list[dict[str, Any]], options: LayerOptions) -> None:
    results = {"test": test, "models": scored}
    curves = [(model["model"], both_ways(model, centred), centred) for model in scored for centred in (False, True)]
    over = "the papers' 36" if "36" in complete_sets(scored[0]) else str(len(scored[0]["languages"]))
    label, note = "accuracy@1, mean of both directions (%)", f"mean over {over} languages"
    options.deliver(results, retrieval_tables(results), curves, label, note)


if __name__ == "__main__":
    main()

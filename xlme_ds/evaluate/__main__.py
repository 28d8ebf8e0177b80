"""Score models without fine-tuning: `xlme evaluate TEST --model PATH --data PATH`.

The tests are sentence retrieval and word alignment with the vectors of every layer, losses and perplexity on held-out
text by language, and a comparison of words' input embeddings with those of their translations. Several models are
compared side by side. The models run on the GPU if there is one.
"""

# Each function imports its test's module itself: the module loads torch, and --help should not.

from pathlib import Path
from typing import Annotated, Any

import tyro

from ..cli import program, run_subcommand
from .output import CommonOptions, EncoderOptions, LayerOptions

_Common = Annotated[CommonOptions, tyro.conf.arg(name="")]
_Encoder = Annotated[EncoderOptions, tyro.conf.arg(name="")]
_Layers = Annotated[LayerOptions, tyro.conf.arg(name="")]


def main(arguments: list[str] | None = None) -> None:
    """Run the command. A user's mistake ends it with one sentence and exit code 2."""
    tests = {test.__name__: test for test in (tatoeba, pairs, align, losses, perplexity, words)}
    run_subcommand(program("evaluate"), tests, "test", arguments, description=__doc__)


def tatoeba(options: _Layers) -> None:
    """Sentence retrieval on the Tatoeba test set, English with every language that `--data` has.

    Its `--data` is a folder of LASER's v1 files, tatoeba.xxx-eng.xxx and tatoeba.xxx-eng.eng.
    """
    from . import retrieval

    _write_and_print_retrieval(retrieval.tatoeba(**options.arguments()), options)


def pairs(options: _Layers, limit: int = 1000) -> None:
    """Sentence retrieval on translation pairs kept out of training.

    Its `--data` is a data folder that holds para/, or a folder of line-aligned text: X.en-de.en with X.en-de.de, or
    en-de.txt.zip.

    Args:
        limit: How many sentence pairs of each language are scored: the first that repeat no earlier sentence.
    """
    from . import retrieval

    _write_and_print_retrieval(retrieval.pairs(**options.arguments(), limit=limit), options)


def align(options: _Layers, apart: bool = False) -> None:
    """Word alignment by optimal transport, scored against links made by hand.

    Its `--data` is a folder named a-b that has test.a, test.b and alignv2.txt or align.txt, or a folder of those.

    Args:
        apart: Give the model the two sentences of a pair as two inputs instead of joined in one.
    """
    from . import alignment

    results = alignment.align(**options.arguments(), apart=apart)
    curves = {model["model"]: [model["overall"]["aer"]] for model in results["models"]}
    note = f"mean over {', '.join(results['models'][0]['tests'])}"
    options.write_and_print(results, alignment.alignment_tables, curves, "mean alignment error rate (%)", note)


def losses(options: _Common, rows: int = 512, seed: int = 1) -> None:
    """The losses of pre-training on held-out text, overall and by language, under the same masks for every model.

    Its `--data` is a data folder that holds mono/ or para/ or both, encoded with the models' vocabulary.

    Args:
        rows: How many rows of each task are read, from the start.
        seed: Seed of the masks.
    """
    from . import heldout_text

    results = heldout_text.losses(**options.arguments(), rows=rows, seed=seed)
    options.write_and_print(results, heldout_text.loss_tables)


def perplexity(
    options: _Common, passes: int = 1, seed: int = 1, limit: int | None = None, unigram: Path | None = None
) -> None:
    """Perplexity by language on monolingual text. The mean is over the tokens that a model's objective predicts: the
    masked tokens, or all tokens.

    Its `--data` is a data folder that holds mono/, encoded with the models' vocabulary.

    Args:
        passes: How often the rows are read, each time with other masks, which are the same for every model.
        seed: Seed of the masks.
        limit: How many rows of each language are read, from the start; by default all.
        unigram: Folder of training data that holds mono/. Adds a column for a unigram model counted on this folder.
    """
    from . import heldout_text

    results = heldout_text.perplexity(**options.arguments(), passes=passes, seed=seed, limit=limit, unigram=unigram)
    options.write_and_print(results, heldout_text.perplexity_tables)


def words(options: _Encoder) -> None:
    """Compare the input embeddings of words with those of their translations: cosine, distance, and correlation with
    human scores.

    Its `--data` is a folder with SemEval-2017's en-de.test.data.txt and en-de.test.gold.txt, or with dictionaries like
    en-de.txt. Subfolders are searched too.
    """
    from . import lookup_table

    options.write_and_print(lookup_table.words(**options.arguments()), lookup_table.word_tables)


def _write_and_print_retrieval(results: dict[str, Any], options: LayerOptions) -> None:
    from . import retrieval

    models = results["models"]
    curves = {
        model["model"]: [retrieval.mean_of_directions(model, centred) for centred in (False, True)] for model in models
    }
    # all models are tested on the same languages
    languages = "the papers' 36" if "36" in retrieval.complete_sets(models[0]) else str(len(models[0]["languages"]))
    options.write_and_print(
        results,
        retrieval.retrieval_tables,
        curves,
        "accuracy@1, mean of both directions (%)",
        f"mean over {languages} languages",
    )


if __name__ == "__main__":
    main()

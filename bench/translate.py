"""Translations a second: the search of `xlme translate` and Hugging Face's `generate` on the export of the same run.

Both decode the same batches of sources, in turns, in float32 and with all their caches; `--source` is text, a sentence
a line; without it sources are random tokens. tokens/s counts the tokens of the translations.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import xlme_ds as xlme
from xlme_ds.data.schema import PAD, UNK
from xlme_ds.translate.decoding import longest_source, source_side, translate
from xlme_ds.translate.model import TranslationModel
from xlme_ds.translate.text import Translator, load_translator, read_lines

Found = list[list[int]]


def exported(run: Path, device: torch.device) -> Any:
    """The run's export as transformers loads it, in evaluation mode."""
    from transformers import AutoModelForSeq2SeqLM

    with tempfile.TemporaryDirectory() as folder:
        xlme.export.run(run, Path(folder) / "export")
        return AutoModelForSeq2SeqLM.from_pretrained(Path(folder) / "export", trust_remote_code=True).to(device)


def batches(translator: Translator, source: Path | None, sentences: int, rows: int) -> list[list[np.ndarray]]:
    """Sources by length, so that both searches read the same padding."""
    longest, rng = longest_source(translator.model), np.random.default_rng(0)
    if source is None:
        sizes = rng.integers(1, min(longest, 40) + 1, sentences)
        found = [rng.integers(UNK + 1, translator.vocabulary.size - 1, size) for size in sizes]
    else:
        found = [translator.vocabulary.encode(line)[:longest] for line in read_lines(source)[:sentences]]
    found = sorted((one for one in found if len(one)), key=len)
    return [found[first : first + rows] for first in range(0, len(found), rows)]


def ordinary(rows: Tensor) -> Found:
    """The tokens of generated rows without special ones."""
    return [[token for token in row if token > UNK] for row in rows.tolist()]


def race(
    model: TranslationModel, theirs: Any, sources: Sequence[list[np.ndarray]], beam: int, times: int
) -> dict[str, Any]:
    """Medians over `times` of the tokens/s of both, from the first language into the last, and the share of
    translations that are the same."""
    pair = 0, len(model.cfg.language_embeddings) - 1
    sides = [source_side(model, batch, pair[0]).tokens for batch in sources]
    codes = {"source_language": theirs.config.languages[0], "target_language": theirs.config.languages[-1]}

    def ours() -> Found:
        return [one for batch in sources for one in translate(model, batch, pair, beam)]

    def generated() -> Found:
        rows = [theirs.generate(side, attention_mask=(side != PAD).long(), num_beams=beam, **codes) for side in sides]
        return [one for each in rows for one in ordinary(each)]

    first = ours(), generated()  # also warms up
    rates: list[list[float]] = [[], []]
    for _ in range(times):
        for name, (search, found) in enumerate(zip((ours, generated), first, strict=True)):
            rates[name].append(sum(map(len, found)) / _seconds(search))
    mine, other = map(statistics.median, rates)
    alike = sum(one == two for one, two in zip(*first, strict=True)) / len(first[0])
    ratio = statistics.median(one / two for one, two in zip(*rates, strict=True))
    return {"beam": beam, "xlme_tokens_per_s": mine, "hf_tokens_per_s": other, "ratio": ratio, "alike": alike}


def _seconds(search: Callable[[], Found]) -> float:
    begin = time.perf_counter()
    search()  # its tokens are lists, so a GPU has finished
    return time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> None:
    """Print a line for greedy search and one for 4 beams."""
    parser = argparse.ArgumentParser(prog="python -m bench.translate", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a translating run")
    parser.add_argument("--source", type=Path, help="text to translate; random tokens without it")
    parser.add_argument("--sentences", type=int, default=128, help="sentences to read at most")
    parser.add_argument("--rows", type=int, default=32, help="sentences of a batch")
    parser.add_argument("--repeats", type=int, default=5, help="times each search runs, the two in turns")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        translator = load_translator(options.model)
    except ValueError as error:
        sys.exit(f"error: {error}")
    sources = batches(translator, options.source, options.sentences, options.rows)
    theirs = exported(options.model, translator.model.table[0].device)
    for beam in (1, 4):
        found = race(translator.model, theirs, sources, beam, options.repeats)
        line = "beam {beam}: xlme {xlme_tokens_per_s:,.0f} tokens/s, generate {hf_tokens_per_s:,.0f}, ratio {ratio:.2f}"
        print(json.dumps(found) if options.json else (line + ", {alike:.0%} alike").format(**found))


if __name__ == "__main__":
    main()

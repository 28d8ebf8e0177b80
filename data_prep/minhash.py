"""Removes near duplicates among the documents of each language, with datatrove's MinHash. The extra `minhash` installs
datatrove.

    OUT/mono/<lang>.jsonl.gz    the documents that are kept, for `encode --mono OUT/mono`
    OUT/manifest.json           written when all languages are written

Each language is one task of the stage. The task reads the language's documents twice: first to compute their
signatures, then to write the documents that are kept.
"""

import contextlib
import gzip
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from data_prep.filters.clean import Counts, text_warnings
from data_prep.progress import print_stdout, warn
from data_prep.readers import Input, documents, find_documents
from data_prep.store import Stage, new_file, written_files
from xlme_ds.data.schema import Manifest, write_manifest
from xlme_ds.io.files import real_path
from xlme_ds.io.folders import make_folder

# Languages that are written without spaces. In these, each character counts as a word.
_NO_SPACES = ("ja", "km", "lo", "my", "my_zaw", "th", "zh-Hans", "zh-Hant")
_WORK = ".work"  # folder in OUT for datatrove's files; hidden, because it is not for users


@dataclass(frozen=True)
class MinhashConfig:
    """Remove documents that differ little from another document of their language.

    For each document, datatrove computes 112 MinHashes of its 5-word sequences, in 14 buckets of 8. Two documents are
    near duplicates if all 8 hashes of a bucket agree. This is likely if they share three quarters of their sequences.
    """

    mono: Path
    """Folder of <lang>.txt[.xz|.gz|.bz2|.zst] (a paragraph per line, an empty line between documents), <lang>.jsonl[…]
    or <lang>.parquet (a document per record, its text in the field `text`)."""
    out: Path
    """Folder to write: mono/<lang>.jsonl.gz."""
    processes: int = 1
    """Worker processes on this machine; each works on one language at a time. Under MPI the ranks are the workers."""


def run(config: MinhashConfig) -> None:
    """Write the languages that are not written yet. Raises ValueError if datatrove is missing, or for bad input."""
    stage, languages = _plan(config)
    with stage.open():
        for name, inputs in languages.items():
            stage.check_sizes(stage.read_marker(name), _files(inputs), "its documents were written into")
        finished = stage.check_finished(config.processes)
        sizes = [sum(source.size for source in inputs) for inputs in languages.values()]
        write = partial(_write_language, stage)
        results = stage.run_unfinished(write, languages, sizes, config.processes, "minhash")
        shutil.rmtree(stage.folder / _WORK, ignore_errors=True)
        by_language = dict(zip(languages, results, strict=True))
        if not finished:
            files = tuple(file for result in results for file in written_files(result))
            counts = {
                name: {key: result[key] for key in ("documents", "removed")} for name, result in by_language.items()
            }
            manifest = Manifest(stage.name, stage.settings, 0, "", tuple(languages), files, {"by_language": counts})
            write_manifest(stage.folder, manifest)  # `encode` refuses a folder without it
    for name, result in by_language.items():
        print_stdout(f"{name}: {result['documents']:,} documents, {result['removed']:,} of them removed")


def _plan(config: MinhashConfig) -> tuple[Stage, dict[str, list[Input]]]:
    """Returns (the stage, the inputs of each language)."""
    try:
        import datatrove.pipeline.dedup  # noqa: F401
    except ImportError as error:
        raise ValueError(f"minhash needs the package datatrove ({error}): pip install 'xlme-ds[minhash]'") from None
    out = real_path(config.out / "mono")
    sources = find_documents(config.mono)
    for source in sources:
        for path in source.paths:
            if path.is_pipe:
                raise ValueError(f"{path} is a named pipe, but documents are read twice: store it as a file")
            if path.local_path and out in real_path(path.local_path).parents:
                raise ValueError(f"{path} is in {config.out / 'mono'}, where the documents go: choose another --out")
    is_ours = any((config.out / name).exists() for name in ("settings.json", "manifest.json"))
    if not is_ours and out.exists() and any(out.iterdir()):
        raise ValueError(f"{config.out / 'mono'} has files that minhash did not write: choose another --out")
    languages = {name: list(inputs) for name, inputs in groupby(sources, lambda source: source.name)}
    settings = {
        "datatrove": version("datatrove"),
        "inputs": [[source.name, source.paths[0].name] for source in sources],
    }
    return Stage(config.out, "minhash", settings), languages


def _write_language(stage: Stage, inputs: Sequence[Input]) -> dict[str, Any]:
    """Write the kept documents of one language. Returns the task's result: `inputs` (`_files`), `files`
    (the written file), `documents` (how many were read) and `removed` (how many of them were left out as near
    duplicates)."""
    name = inputs[0].name
    work = stage.folder / _WORK / name
    shutil.rmtree(work, ignore_errors=True)
    make_folder(work)
    counts = Counts("documents")
    path = stage.folder / "mono" / f"{name}.jsonl.gz"
    written = 0
    with new_file(path) as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressed:
        for text in _without_near_duplicates(name, inputs, work, counts):
            compressed.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
            written += 1
    for warning in text_warnings(counts.paragraphs_in, counts.repaired):
        warn(f"{' and '.join(str(source.paths[0]) for source in inputs)}: {warning}")
    shard = asdict(file.shard(path, stage.folder))
    shutil.rmtree(work)
    return {
        "inputs": _files(inputs),
        "files": [shard],
        "documents": counts.units_in,
        "removed": counts.units_in - written,
    }


def _files(inputs: Sequence[Input]) -> list[tuple[str, int]]:
    """Name and size of every file of a language."""
    return [file for source in inputs for file in source.files]


def _without_near_duplicates(language: str, inputs: Sequence[Input], work: Path, counts: Counts) -> Iterator[str]:
    """Yield the texts of the documents that are kept, in input order: those without near duplicates, and one of each
    cluster of near duplicates. Counts all documents in `counts`, and writes intermediate files to the folder `work`."""
    from datatrove.data import Document
    from datatrove.pipeline.dedup import minhash
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.word_tokenizers import WhitespaceTokenizer
    from loguru import logger

    logger.disable("datatrove")

    class WordTokenizer(WhitespaceTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return list("".join(text.split())) if language in _NO_SPACES else text.split()

    def read(read_counts: Counts) -> Iterator[Document]:
        for source in inputs:
            for i, paragraphs in enumerate(documents(source, read_counts)):
                yield Document("\n".join(paragraphs), str(i))

    signatures, buckets, removals = (str(work / part) for part in ("signatures", "buckets", "remove"))
    datatrove_config = minhash.MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))
    # The counts of this first reading are dropped; the second reading adds to `counts`.
    minhash.MinhashDedupSignature(signatures, datatrove_config, WordTokenizer())(read(Counts("documents")))
    for bucket in range(datatrove_config.num_buckets):
        finder = minhash.MinhashDedupBuckets(signatures, buckets, config=datatrove_config)
        finder(None, bucket, datatrove_config.num_buckets)  # None: the finder reads signatures, not documents
    with contextlib.redirect_stderr(io.StringIO()):  # hides tqdm's progress bar
        minhash.MinhashDedupCluster(buckets, removals, datatrove_config)(None)
    for document in minhash.MinhashDedupFilter(removals)(read(counts)):
        yield document.text

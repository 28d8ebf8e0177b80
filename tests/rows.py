"""Small mixed data folders, written straight from the contract, for tests of what reads them; and files of records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import sentencepiece as spm
from pyarrow import parquet

from xlme_ds.data.schema import BOS, EOS, PAD, UNK, Manifest, Shard, row_schema, write_manifest
from xlme_ds.data.shards import INDEX_SUFFIX, group_checksums, index_bytes
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary
from xlme_ds.io.files import file_sha256

LANGUAGES = ("de", "en", "fr")


def random_row(
    rng: np.random.Generator, task: str, row_tokens: int, vocabulary: int, layout: str = "xlme"
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, item lengths and languages of one row; ids follow a Zipf-like law, so that there is something to
    learn."""

    def words(count: int) -> list[int]:
        return [int(4 + (vocabulary - 5) * u**3) for u in rng.random(count)]

    start, between = {"xlme": (BOS, [EOS]), "xlm": (EOS, [EOS, EOS])}[layout]
    if task == "mono":
        tokens = [start, *words(row_tokens - 2 - int(rng.integers(0, 3))), EOS]
        return tokens, [len(tokens)], [int(rng.integers(0, 3))]
    tokens, lengths, languages = [], [], []
    while True:
        source, target = int(rng.integers(1, row_tokens // 3)), int(rng.integers(1, row_tokens // 3))
        if len(tokens) + source + target + 2 + len(between) > row_tokens:
            return (tokens, lengths, languages) if tokens else random_row(rng, task, row_tokens, vocabulary, layout)
        tokens += [start, *words(source), *between, *words(target), EOS]
        lengths.append(source + target + 2 + len(between))
        languages += [1, 0] if rng.random() < 0.5 else [2, 1]


def write_data(
    folder: Path,
    rows: int,
    row_tokens: int = 32,
    vocabulary: int = 200,
    rows_per_shard: int = 16,
    rows_per_batch: int = 8,
    seed: int = 0,
    sha256: str = "0" * 64,
    unknown: str = "",
    layout: str = "xlme",
    documents: bool = False,
) -> Path:
    """A data folder of both tasks with `rows` rows each; of the language `unknown` the vocabulary knows no word. With
    `documents`, monolingual rows have the end of a document inside."""
    for task in ("mono", "para"):
        rng = np.random.default_rng([seed, task == "para"])
        made = [random_row(rng, task, row_tokens, vocabulary, layout) for _ in range(rows)]
        for tokens, _, languages in made if task == "mono" else []:
            if LANGUAGES[languages[0]] == unknown:
                tokens[1:-1] = [UNK] * (len(tokens) - 2)
            if documents:
                tokens[9] = EOS
        shards = []
        (folder / task).mkdir(parents=True)
        for first in range(0, rows, rows_per_shard):
            name = f"{first // rows_per_shard:05d}.arrow"
            schema = row_schema(row_tokens)
            with pa.OSFile(str(folder / task / name), "wb") as file, pa.ipc.new_file(file, schema) as writer:
                for start in range(first, min(first + rows_per_shard, rows), rows_per_batch):
                    part = made[start : min(start + rows_per_batch, first + rows_per_shard, rows)]
                    flat = np.full((len(part), row_tokens), PAD, dtype=np.int32)
                    for i, (tokens, _, _) in enumerate(part):
                        flat[i, : len(tokens)] = tokens
                    writer.write_batch(
                        pa.record_batch(
                            [
                                pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), row_tokens),
                                pa.array([row[1] for row in part], pa.list_(pa.int16())),
                                pa.array([row[2] for row in part], pa.list_(pa.int16())),
                            ],
                            schema=schema,
                        )
                    )
            path = folder / task / name
            shards.append(Shard(name, min(rows_per_shard, rows - first), path.stat().st_size, file_sha256(path)))
            write_index(path)
        settings = {
            "row_tokens": row_tokens,
            "layout": layout,
            "rows": rows,
            "rows_per_shard": rows_per_shard,
            "alpha": 0.7,
            "seed": seed,
        }
        write_manifest(
            folder / task, Manifest("mix", settings, vocabulary, sha256, LANGUAGES, tuple(shards), {"by_language": {}})
        )
    return folder


def write_index(path: Path) -> None:
    """Write the index of a shard next to it."""
    with pa.memory_map(str(path)) as mapped:
        reader = pa.ipc.open_file(mapped)
        checks = [group_checksums(reader.get_batch(number)) for number in range(reader.num_record_batches)]
    path.with_suffix(INDEX_SUFFIX).write_bytes(index_bytes(path, file_sha256(path), checks))


def train_vocabulary(folder: Path, size: int = 120) -> Vocabulary:
    """A real SentencePiece model of `size` ids in `folder`, trained on made-up words."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    syllables = ["ka", "lo", "mi", "ter", "un", "ve", "sa", "dor", "in", "pe"]
    sentences = [" ".join("".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(8)) for _ in range(500)]
    prefix = folder / Path(MODEL_FILE).stem
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_prefix=str(prefix),
        vocab_size=size - 2,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    prefix.with_suffix(".vocab").unlink()
    return Vocabulary(folder)


def write_records(path: Path, rows: list[dict[str, Any]]) -> str:
    """A file of records of the kind that its name says, in parts of two rows; its name."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path.name

"""The contract between data preparation and training: Arrow schemas, special token ids, rows, and manifests.

`data_prep` may import only these parts of `xlme_ds`: most of `io` and, from `data`, this module, `shards`,
`vocabulary`, `masking` and `compiled` (`tests/test_imports.py`). This module needs no library except pyarrow and numpy.

There are three kinds of shard. All are uncompressed Arrow IPC files, which can be read through a memory map:

* documents, written by `xlme prep encode`: a record is the token ids of one document, with `</s>` as the last. So the
  records, one after the other, are a stream of tokens. Unless `mix` packs rows, it cuts the rows from this stream.
* pairs, written by `xlme prep encode`: a record is a translation pair, both sides without special tokens.
* rows, written by `xlme prep mix`: a record is a training row, in training order.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from ..io.files import FORMAT_VERSION, fsync, read_checksummed, write_checksummed
from ..io.folders import require_folder
from .rows import BOS, EOS, LAYOUTS, PAD, TASKS, UNK, Layout, Rows  # noqa: F401  re-exported: part of the contract

DOCUMENTS = pa.schema([pa.field("tokens", pa.list_(pa.int32()), nullable=False)])
PAIRS = pa.schema(
    [
        pa.field("source", pa.list_(pa.int32()), nullable=False),
        pa.field("target", pa.list_(pa.int32()), nullable=False),
    ]
)


def row_schema(row_tokens: int) -> pa.Schema:
    """Schema of a training row.

    `tokens`: `row_tokens` ids, padded with `PAD` after the last item. `lengths`: the number of tokens of each item,
    special tokens included. In the layout xlme an item of the task mono is `<s> text </s>`, one per row unless packed,
    and an item of the task para is `<s> source </s> target </s>`, several per row. The manifest's setting `layout`
    names the layout of its rows, one of `LAYOUTS`. `languages`: indices into the manifest's `languages`, one for each
    item (mono) or two (para).
    """
    return pa.schema(
        [
            pa.field("tokens", pa.list_(pa.int32(), row_tokens), nullable=False),
            pa.field("lengths", pa.list_(pa.int16()), nullable=False),
            pa.field("languages", pa.list_(pa.int16()), nullable=False),
        ]
    )


@dataclass(frozen=True)
class Shard:
    """One file that a stage of data_prep wrote, usually an Arrow file."""

    name: str  # path relative to the manifest
    rows: int  # number of records
    bytes: int  # size of the file
    sha256: str  # checksum of the file


@dataclass(frozen=True)
class Manifest:
    """Settings, counts and files of a stage of data_prep. The stage is finished when `manifest.json` exists: it is
    written last."""

    stage: str
    settings: dict[str, Any]  # everything that the files' bytes depend on
    vocabulary_size: int
    vocabulary_sha256: str
    languages: tuple[str, ...]  # codes; rows hold indices into them
    shards: tuple[Shard, ...]
    counts: dict[str, Any]
    format: int = FORMAT_VERSION

    @property
    def rows(self) -> int:
        """The number of records in all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def layout(self) -> str:
        """Name of the layout of the rows that `mix` wrote."""
        return str(self.settings["layout"])

    @property
    def packed_unit(self) -> str:
        """`sentences` or `documents` if `mix` packed several of these into each monolingual row; empty if a row is a
        slice of text."""
        return next((unit for unit in ("sentences", "documents") if self.settings.get(unit)), "")

    def shares_text(self, other: "Manifest") -> bool:
        """Whether this manifest's files and the other's were mixed from the same encoded text, or include a shard with
        the same bytes."""
        encoded, checksums = self.settings.get("encoded"), {shard.sha256 for shard in self.shards}
        is_same_encoding = encoded is not None and encoded == other.settings.get("encoded")
        return is_same_encoding or any(shard.sha256 in checksums for shard in other.shards)

    def fingerprint(self) -> str:
        """SHA-256 of the manifest's canonical JSON: equal exactly when all fields are equal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


_MANIFEST_TYPES = {"stage": str, "settings": dict, "vocabulary_size": int, "vocabulary_sha256": str, "languages": list,
                   "shards": list, "counts": dict}  # fmt: skip
_SHARD_TYPES = {"name": str, "rows": int, "bytes": int, "sha256": str}
_MIX_COUNTS = ("share_before", "share_after", "repeat")  # numbers that mix writes into the manifest for each language
_TYPE_WORDS = {str: "a string", dict: "an object", list: "a list", int: "a whole number"}


def _require_manifest(fields: Any) -> None:
    """Raise ValueError if `fields`, read from JSON, lacks a field of a manifest, or has one of a wrong type or
    value."""
    _require_types("it", fields, _MANIFEST_TYPES)
    for index, shard in enumerate(fields["shards"]):
        _require_types(f"shard {index}", shard, _SHARD_TYPES)
        name = PurePosixPath(shard["name"])
        if name.is_absolute() or ".." in name.parts:
            raise ValueError(f"shard {index} is {shard['name']!r}, outside of the folder")
    codes = fields["languages"]
    if not all(type(code) is str for code in codes) or len(set(codes)) != len(codes):
        raise ValueError("its languages are not a list of distinct codes")
    by_language = fields["counts"].get("by_language", {})
    if type(by_language) is not dict or not all(type(counts) is dict for counts in by_language.values()):
        raise ValueError("its counts by language are not JSON objects")
    if fields["stage"] == "mix":
        _require_types("settings", fields["settings"], {"row_tokens": int, "layout": str})
        _require_types("counts", fields["counts"], {"by_language": dict})
        if fields["settings"]["layout"] not in LAYOUTS:
            raise ValueError(f"no layout is called {fields['settings']['layout']}")
        if fields["settings"]["row_tokens"] >= 2**31:
            raise ValueError("settings has row_tokens of 2³¹ or more")
        mix_counts = [counts.get(name) for counts in by_language.values() for name in _MIX_COUNTS]
        if not all(type(count) in (int, float) for count in mix_counts):
            raise ValueError(f"its counts by language lack {', '.join(_MIX_COUNTS)}")


def _require_types(subject: str, values: Any, types: Mapping[str, type]) -> None:
    """Raise ValueError unless `values` is a dict that has each name in `types`, with a value of that type; integers
    must be 0 or more. `subject`: the dict's name in the error."""
    if type(values) is not dict:
        raise ValueError(f"{subject} is not a JSON object")
    for name, expected in types.items():
        value: Any = values.get(name)
        fits = isinstance(value, expected) and not isinstance(value, bool)  # a bool is an int in Python
        if not fits or (expected is int and value < 0):
            raise ValueError(f"{subject} has {name} {value!r:.80}, not {_TYPE_WORDS[expected]}")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Flush the directory entries of the shards to the disk, then write the manifest: it marks `folder` as complete."""
    for parent in sorted({(folder / shard.name).parent for shard in manifest.shards}):
        fsync(parent)
    write_checksummed(folder / "manifest.json", asdict(manifest))


def read_manifest(folder: Path, writer: str = "`xlme prep mix`") -> Manifest:
    """The manifest of a finished stage folder. Errors name `writer` as the command that writes such a folder.

    Raises ValueError if the folder has no manifest (the stage did not finish), or if the manifest is damaged or of
    another format.
    """
    path = Path(folder) / "manifest.json"
    if not path.exists():
        require_folder(parent := Path(folder).parent, f"name the folder that {writer} wrote")
        if not Path(folder).exists():
            near = next(iter(sorted(parent.glob(f"*/{Path(folder).name}/manifest.json"))), None)
            advice = f", such as {near.parents[1]}" if near else ""
            raise ValueError(f"{parent} has no {Path(folder).name}/: name the folder that {writer} wrote{advice}")
        raise ValueError(f"{path} does not exist: name the folder that {writer} wrote, or let that command finish")
    try:
        fields = read_checksummed(path)
        _require_manifest(fields)
        fields["languages"] = tuple(fields["languages"])
        fields["shards"] = tuple(Shard(**shard) for shard in fields["shards"])
        return Manifest(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is not a readable manifest ({error}): delete it and give the command that wrote {folder} again"
        ) from None

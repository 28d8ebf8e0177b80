"""The contract between data preparation and training: Arrow schemas, special token ids, rows, and manifests.

Of `xlme_ds`, `data_prep` imports only this module, `shards`, `vocabulary`, `corrupt`, `compiled` and `xlme_ds.io`. This
module needs no library except pyarrow.

Three kinds of shard exist, all uncompressed Arrow IPC files, so that reading is a memory map:

* documents - written by `xlme prep encode`, one record a document, its token ids ending in `</s>`. The values buffer of
  the column is therefore the language's token stream, and a training row is a slice of it.
* pairs - written by `xlme prep encode`, one record a translation pair, both sides without special tokens.
* rows - written by `xlme prep mix` in training order; what training reads.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from ..io.files import FORMAT, read_signed, to_disk, write_signed
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

    `tokens`: `row_tokens` ids, padded with `PAD` after the last item. `lengths`: tokens of each packed item, specials
    included. In the layout xlme (the manifest's setting `layout`; see `LAYOUTS`) an item is `<s> text </s>` (task mono,
    one per row unless packed) or `<s> e </s> f </s>` (task para, several per row).
    `languages`: indices into the manifest's `languages`, one for each side of each item, in order: one for a mono item,
    two for a pair.
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
    """One Arrow file of a stage: its path relative to the manifest, records, bytes, and SHA-256 of the file."""

    name: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The settings, counts and files of a finished stage. `manifest.json` is written last, as the stage's marker.

    `settings` holds every setting that shaped the bytes; `counts` the stage's counts (JSON values);
    `languages` the language codes; row shards hold indices into them.
    """

    stage: str
    settings: dict[str, Any]
    vocabulary_size: int
    vocabulary_sha256: str
    languages: tuple[str, ...]
    shards: tuple[Shard, ...]
    counts: dict[str, Any]
    format: int = FORMAT

    @property
    def rows(self) -> int:
        """Records over all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def layout(self) -> str:
        """Name of the layout of the rows that `mix` wrote."""
        return str(self.settings["layout"])

    @property
    def packed(self) -> str:
        """The unit of which `mix` packed several into a monolingual row, `sentences` or `documents`; empty if a row is
        a slice of text."""
        return next((unit for unit in ("sentences", "documents") if self.settings.get(unit)), "")

    def shares_text(self, other: "Manifest") -> bool:
        """Whether both were mixed from the same encoded text, or have a shard with the same bytes."""
        encoded, theirs = self.settings.get("encoded"), other.settings.get("encoded")
        common = {shard.sha256 for shard in self.shards} & {shard.sha256 for shard in other.shards}
        return bool(common) or (encoded is not None and encoded == theirs)

    def fingerprint(self) -> str:
        """SHA-256 of the manifest's canonical JSON: equal exactly when settings, counts and every shard are equal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


_MANIFEST_TYPES = {"stage": str, "settings": dict, "vocabulary_size": int, "vocabulary_sha256": str, "languages": list,
                   "shards": list, "counts": dict}  # fmt: skip
_SHARD_TYPES = {"name": str, "rows": int, "bytes": int, "sha256": str}
_SHARES = ("share_before", "share_after", "repeat")
_TYPE_WORDS = {str: "a text", dict: "an object", list: "a list", int: "a whole number"}


def _require_manifest(fields: Any) -> None:
    """Raise ValueError if the JSON object `fields` lacks a manifest's field, or one has a wrong type or value."""
    _require_types("it", fields, _MANIFEST_TYPES)
    for number, shard in enumerate(fields["shards"]):
        _require_types(f"shard {number}", shard, _SHARD_TYPES)
        name = PurePosixPath(shard["name"])
        if name.is_absolute() or ".." in name.parts:
            raise ValueError(f"shard {number} is {shard['name']!r}, outside of the folder")
    codes = fields["languages"]
    if not all(type(code) is str for code in codes) or len(set(codes)) != len(codes):
        raise ValueError("its languages are not different codes")
    by_language = fields["counts"].get("by_language", {})
    if type(by_language) is not dict or not all(type(counts) is dict for counts in by_language.values()):
        raise ValueError("its counts by language are no objects")
    if fields["stage"] == "mix":
        _require_types("settings", fields["settings"], {"row_tokens": int, "layout": str})
        _require_types("counts", fields["counts"], {"by_language": dict})
        if fields["settings"]["layout"] not in LAYOUTS:
            raise ValueError(f"no layout is called {fields['settings']['layout']}")
        if fields["settings"]["row_tokens"] >= 2**31:
            raise ValueError("settings has rows of 2³¹ tokens or more")
        shares = [counts.get(name) for counts in by_language.values() for name in _SHARES]
        if not all(type(share) in (int, float) for share in shares):
            raise ValueError(f"its counts by language lack {', '.join(_SHARES)}")


def _require_types(subject: str, values: Any, kinds: Mapping[str, type]) -> None:
    """Raise ValueError unless `values` is an object with a value of each name and type in `kinds`."""
    if type(values) is not dict:
        raise ValueError(f"{subject} is no object")
    for name, kind in kinds.items():
        value: Any = values.get(name)
        fits = isinstance(value, kind) and not isinstance(value, bool)
        if not fits or (kind is int and value < 0):
            raise ValueError(f"{subject} has {name} {value!r:.80}, not {_TYPE_WORDS[kind]}")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Mark `folder` complete, after flushing the directory entries of its shards to the disk."""
    for parent in sorted({(folder / shard.name).parent for shard in manifest.shards}):
        to_disk(parent)
    write_signed(folder / "manifest.json", asdict(manifest))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished stage folder.

    Raises ValueError when the folder has none (the stage did not finish), or it is damaged or of another format.
    """
    path = Path(folder) / "manifest.json"
    if not path.exists():
        raise ValueError(f"{path} does not exist: run the data_prep stage that writes {folder} to its end first")
    try:
        fields = read_signed(path)
        _require_manifest(fields)
        fields["languages"] = tuple(fields["languages"])
        fields["shards"] = tuple(Shard(**shard) for shard in fields["shards"])
        manifest = Manifest(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is not a readable manifest ({error}): delete it and give the command that wrote {folder} again"
        ) from None
    return manifest

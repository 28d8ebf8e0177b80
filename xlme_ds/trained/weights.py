"""Files of weights: safetensors with a checksum of the tensors, in one file or in shards."""

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..io.files import read_json

WEIGHTS_FILE = "model.safetensors"
REPLACED_HEAD_FILE = "replaced_head.safetensors"  # the discriminator's head: transformers has no class for it
# Keys in the metadata of a weights file. The values are the checksum of its tensors, and the model's settings as JSON.
_CHECKSUM_KEY = "crc32"
SETTINGS_KEY = "settings"
FETCH_EXPORTED = "copy it from the folder that `xlme export` wrote"  # remedy for a missing file of an export
_REMEDY = "copy it again, or write it anew (for a run, start its command again)"


def save_weights(state: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with a checksum of its tensors and the usual permissions of a new file."""
    path.touch()  # safetensors makes files that only their owner can read
    mode = path.stat().st_mode
    save_file(dict(state), path, {**(metadata or {}), _CHECKSUM_KEY: _checksum(state)})
    _order_header(path)
    path.chmod(mode)


def _order_header(path: Path) -> None:
    """Sort the metadata, which the library writes in random order, so that equal weights give equal files."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, "a longer header would overwrite the tensors"
        file.seek(8)
        file.write(text.ljust(size))


def _checksum(state: Mapping[str, Tensor]) -> str:
    """CRC-32 of the names, types, shapes and values of all tensors, in the order of their names."""
    crc = 0
    for name, value in sorted(state.items()):
        crc = zlib.crc32(f"{name} {value.dtype} {list(value.shape)}".encode(), crc)
        crc = zlib.crc32(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file. Raises ValueError for a file of another format."""
    path.open("rb").close()  # raises the error of the system; safe_open calls every file missing that it cannot open
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error}): {_REMEDY}") from None


def require_same_settings(path: Path, settings: Mapping[str, Any], source: Path) -> None:
    """Raise ValueError if one of the `settings`, read from the file `source`, differs from the setting stored with the
    weights at `path`. Weights that another library wrote have no settings to compare."""
    for name, value in json.loads(read_metadata(path).get(SETTINGS_KEY, "{}")).items():
        if name in settings and settings[name] != value:
            raise ValueError(
                f"{source} has {name} {settings[name]!r}, and {path.name} was written with {value!r}: restore the file"
            )


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises ValueError if the file has another format, if its tensors do not match the checksum in the file (every file
    that `save_weights` writes has one), or if a weight is not finite.
    """
    stored_checksum = read_metadata(path).get(_CHECKSUM_KEY)
    try:
        state = load_file(path)
    except SafetensorError as error:  # a type that torch does not have
        raise ValueError(f"{path} is not a safetensors file that torch reads ({error}): {_REMEDY}") from None
    if stored_checksum not in (None, _checksum(state)):
        raise ValueError(f"{path} has changed since it was written (checksum): {_REMEDY}")
    require_finite(state, path)
    return state


def has_intact_weights(path: Path) -> bool:
    """Whether `path` is a file of weights that `read_weights` reads."""
    try:
        read_weights(path)
    except (ValueError, OSError):
        return False
    return True


def read_model_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of an export's weights at `path`, in one safetensors file or in shards. Raises ValueError if a file
    is missing or damaged."""
    shards = shards_of(path)
    if not shards:
        raise ValueError(f"{path.parent} has no {path.name}: {FETCH_EXPORTED}")
    return {name: value for shard in shards for name, value in read_weights(shard).items()}


def shards_of(path: Path) -> list[Path]:
    """The weights file at `path`, or the shards into which transformers splits a large one; empty if there is neither.

    Raises ValueError if the index of the shards is damaged or a shard is missing.
    """
    index = path.with_name(f"{path.name}.index.json")
    if path.exists() or not index.exists():
        return [path] if path.exists() else []
    try:
        names = sorted({str(name) for name in read_json(index, dict)["weight_map"].values()})
    except (KeyError, AttributeError):
        raise ValueError(f"{index} has no weight_map: fetch the file again") from None
    shards = [path.with_name(Path(name).name) for name in names]  # in this folder, even if the index names another
    for shard in shards:
        if not shard.exists():
            raise ValueError(f"{path.parent} lacks {shard.name}, which {index.name} names: fetch it")
    return shards


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 of a model's parameters. It identifies the model even if its folder is renamed or other files change."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def require_finite(state: Mapping[str, Tensor], path: Path) -> None:
    """Raise ValueError, naming the parameter, if a weight is infinite or not a number."""
    for name, value in state.items():
        if not value.isfinite().all():
            raise ValueError(
                f"{path}: {name} is not finite, because the training diverged: name an earlier checkpoint's weights"
            )

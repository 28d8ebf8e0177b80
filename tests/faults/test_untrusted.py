"""Checkpoints, data and archives from elsewhere: read without executing anything, refused in one sentence, and nowhere
else."""

import ast
import json
import os
import tempfile
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from bench.roofline import fake_cuda
from data_prep.filters.clean import Counts
from data_prep.readers import find_pairs
from tests.data_prep.conftest import pairs
from tests.launch import ROOT
from xlme_ds.checkpoint.checkpoints import complete
from xlme_ds.checkpoint.state_files import StateReader, StateWriter, checkpoint_fault, read_state, state_file
from xlme_ds.io.folders import private_folder


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    writer = StateWriter(folder / state_file(0, 1), 0)
    writer.begin({f"w/{kind}/0": 6 for kind in ("fp32", "exp_avg", "exp_avg_sq")}, 4)
    for _ in range(3):
        writer.put(torch.arange(6.0))
    writer.end()
    writer.result()
    return folder / state_file(0, 1)


def header_of(path: Path) -> tuple[dict, bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def test_the_file_written_here_is_read(tmp_path: Path) -> None:
    checkpoint(tmp_path / "c")
    out = torch.empty(6)
    StateReader([tmp_path / "c" / state_file(0, 1)]).read([("w", "fp32", 0, out)])
    assert out.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [0, 1 << 40], "shape": [1 << 38]},
        {"data_offsets": [-24, 0]},
        {"data_offsets": [24, 0]},
        {"data_offsets": [0, 12]},
        {"data_offsets": [0]},
        {"shape": [2, 3]},
        {"shape": ["6"]},
        {"dtype": "F64"},
        {"data_offsets": [60, 84]},
    ],
)
def test_wild_headers(tmp_path: Path, entry: dict) -> None:
    path = checkpoint(tmp_path / "c")
    header, data = header_of(path)
    header["w/fp32/0"] |= entry
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(ValueError, match=r"state_00000_of_00001\.safetensors is no state file .*resume from another"):
        StateReader([tmp_path / "c" / state_file(0, 1)])


@pytest.mark.parametrize(("start", "refused"), [(0, False), (-1, True), ((1 << 40) - 1, False), (1 << 40, True)])
def test_wild_places_of_a_part(tmp_path: Path, start: int, refused: bool) -> None:
    path = checkpoint(tmp_path / "c")
    header, data = header_of(path)
    header[f"w/fp32/{start}"] = header.pop("w/fp32/0")
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(ValueError, match=f"w/fp32/{start} begins at element") if refused else nullcontext():
        StateReader([path])


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\xff" * 200, (4).to_bytes(8, "little") + b"[1]x", b"\x80\x04]" * 9]
)
def test_files_of_another_kind(tmp_path: Path, content: bytes) -> None:
    path = checkpoint(tmp_path / "c")
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no state file"):
        StateReader([tmp_path / "c" / state_file(0, 1)])


def test_a_checkpoint_names_files_of_its_own_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    partial = tmp_path / "step_00000001.partial"
    partial.mkdir()
    folder = complete(partial, {"step": 1, "world": 1, "probe": 1.0}, {})
    assert checkpoint_fault(folder) is None
    entries = json.loads((folder / "complete.json").read_text())
    (folder / "complete.json").write_text(json.dumps(entries | {"../secret": {"bytes": 1, "crc32": 2363233923}}))
    assert checkpoint_fault(folder) == "complete.json is missing or damaged"
    (folder / "complete.json").write_text(
        json.dumps({name: of for name, of in entries.items() if name != "state.json"})
    )
    assert checkpoint_fault(folder) == "complete.json is missing or damaged", "it vouches for no state"


SOUND = {"format": 1, "step": 1, "world": 1, "probe": 1.0, "settings": {}, "records": {}, "guard": {}, "tokens": 0}
STATES = ["[]", "{", "null", *(json.dumps(SOUND | {name: []}) for name in SOUND)]
STATES += [json.dumps({name: value for name, value in SOUND.items() if name != gone}) for gone in list(SOUND)[:4]]


@pytest.mark.parametrize("state", STATES)
def test_damaged_state(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(json.dumps(SOUND))
    assert read_state(tmp_path)["step"] == 1
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(ValueError, match=r"state\.json is damaged .* resume from another checkpoint"):
        read_state(tmp_path)


# Names of what runs code out of a file, and who may use it: between processes of one run.
EXECUTING = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
ALLOWED = {"data_prep/encode/shared_work.py"}


@pytest.mark.parametrize("package", ["xlme_ds", "data_prep"])
def test_nothing_that_is_loaded_is_executed(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert where in ALLOWED or not EXECUTING & {name.split(".")[0] for name in names}, where
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert called not in ("eval", "exec"), where
                assert called != "torch.load" or keywords.get("weights_only") == "True", where
                assert keywords.get("allow_pickle", "False") == "False", where
                assert keywords.get("trust_remote_code", "False") == "False", where
                assert called.split(".")[-1] not in ("extractall", "extract"), (
                    f"{where}: members of archives are streams here"
                )


@pytest.mark.parametrize("name", ["../../x", "/abs/x", "a/../../x"])
def test_paths_inside_an_archive_lead_nowhere(tmp_path: Path, name: str) -> None:
    """Moses archives are read as streams: a member's name is looked at, never opened as a path."""
    folder = tmp_path / "para"
    folder.mkdir()
    with zipfile.ZipFile(folder / "de-en.txt.zip", "w") as archive:
        for language in ("de", "en"):
            archive.writestr(f"{name}.de-en.{language}", f"a line in {language}\n" * 3)
    before = sorted(tmp_path.rglob("*"))
    (source,) = find_pairs(folder)
    assert list(pairs(source, Counts("pairs"))) == [("a line in en", "a line in de")] * 3
    assert sorted(tmp_path.rglob("*")) == before and not (tmp_path.parent / "x.de-en.de").exists()


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770, 0o707])
def test_a_cache_that_others_can_write_is_not_read(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    os.chmod(folder, mode)
    taken = private_folder(folder)
    assert (taken == folder) == (mode in (0o700, 0o755))
    assert taken.parent == tmp_path and not taken.stat().st_mode & 0o022


def test_a_library_that_another_user_planted_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a bench compiles into a folder of the machine. With a program in the compiler's place."""
    (tmp_path / "g++").write_text('#!/bin/bash\nwhile [ "$1" != -o ]; do shift; done\necho ours >"$2"\n')
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = fake_cuda._compiled(Path("torch"))
    assert first.read_text() == "ours\n" and fake_cuda._compiled(Path("torch")) == first
    first.write_text("planted\n")
    first.parent.chmod(0o777)
    again = fake_cuda._compiled(Path("torch"))
    assert again.read_text() == "ours\n" and not again.parent.stat().st_mode & 0o022

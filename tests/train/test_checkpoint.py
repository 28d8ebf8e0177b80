"""Checkpoints and the run folder, with the plain engine on one process."""

import dataclasses
import errno
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from tests.engine.worker import tiny
from tests.faults.forked import obey_permissions
from tests.launch import python, run_ranks
from tests.rows import write_data
from tests.small import lively
from xlme_ds.checkpoint import __main__ as commands
from xlme_ds.checkpoint import state_files
from xlme_ds.checkpoint.checkpoints import PROBE_TOLERANCE, Checkpoints, complete, write_state_and_marker
from xlme_ds.checkpoint.state_files import StateWriter, read_state, state_file
from xlme_ds.config import RunConfig
from xlme_ds.data.loader import Loader
from xlme_ds.data.rows import PAD
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.engine import Engine
from xlme_ds.engine.ranks import SharedError
from xlme_ds.io.files import read_versioned
from xlme_ds.models.text_encoder import LanguageModel
from xlme_ds.objectives import objective_of
from xlme_ds.train.opening import pretraining_info
from xlme_ds.train.run import Trainer
from xlme_ds.train.run_folder import RunFolder
from xlme_ds.train.stop import StopRequest, Watchdog

KINDS = ("fp32", "exp_avg", "exp_avg_sq")
PLAIN = dict(engine=dict(kind="plain"), micro_batch=8)
XLM = dict(objective="mlm", language_embeddings=("de", "en", "fr"), dropout=0.1, alternate=True)
TEMPERED = dict(
    generator_temperature=0.7, generator_keep_fraction=0.15, z_loss=1e-2, random_fakes=("0:1", "5:0"),
    discriminator_rate=0.3,
)  # fmt: skip
BTMLM = tiny(**PLAIN, objective="btmlm", para_rows=0, pseudo_fractions=(0.5,), language_embeddings=("de", "en", "fr"))  # type: ignore[arg-type]
BACK_TRANSLATION = tiny(
    **PLAIN,
    objective="mt",
    para_rows=0,
    denoising=("0:1",),
    back_translation=("0:1",),
    language_embeddings=("de", "en", "fr"),  # type: ignore[arg-type]
)
STATE_FILE = "state_00000_of_00001.safetensors"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "mixed", rows=96)


def engine(data: Path, config: RunConfig | None = None) -> Engine:
    config = config or tiny(**PLAIN)
    read = config.seed, config.objective.mask_fraction, 0, 1, config.model.language_embeddings
    return build_engine(config, Loader(data, config.data, *read, objective_of(config.objective)), None)


_ENGINE: dict[Path, Engine] = {}


def engine_once(data: Path) -> Engine:
    if data not in _ENGINE:
        _ENGINE[data] = engine(data)
    return _ENGINE[data]


def save(checkpoints: Checkpoints, engine: Engine, step: int, state: dict | None = None) -> Path:
    checkpoints.save(engine, step, state or {})
    checkpoints.wait(engine)
    return checkpoints.folder / f"step_{step:08d}"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        XLM,
        dict(objective="clm"),
        dict(objective="rts"),
        dict(objective="all_tokens"),
        dict(objective="corrective"),
        TEMPERED,
    ],
)
def test_resumed_run_continues_exactly(data: Path, tmp_path: Path, settings: dict) -> None:
    config = tiny(**PLAIN, **settings)
    straight = engine(data, config)
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=0)
    for step in range(6):
        straight.train_batch(step, 1e-3, False)
        if step == 2:
            checkpoints.save(straight, 3, {"fingerprints": {"mono": "f"}})
        if step == 4:  # it was written beside two steps, and holds the state before them
            assert checkpoints.newest() == (None, [])
            checkpoints.wait(straight)
    resumed = engine(data, config)
    newest, complaints = checkpoints.newest()
    assert newest is not None and not complaints
    assert checkpoints.load(resumed, newest, {"fingerprints": {"mono": "f"}}, tolerance=0) == 3
    for step in range(3, 6):
        resumed.train_batch(step, 1e-3, False)
    ours, theirs = resumed.full_state(), straight.full_state()
    assert all((ours[name] == theirs[name]).all() for name in theirs)


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 3), (12, 1), (1, 12)])  # 10 comes after 2, not before
def test_a_run_goes_on_with_the_vocabulary_in_other_blocks(data: Path, tmp_path: Path, before: int, after: int) -> None:
    config = tiny(**PLAIN, embedding_sharing="gdes", vocabulary_blocks=before)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary_blocks=after))
    straight, resumed = engine(data, config), engine(data, other)
    for step in range(2):
        straight.train_batch(step, 1e-3, False)
    folder = save(Checkpoints(tmp_path, keep_last=1, keep_every=0), straight, 2)
    Checkpoints(tmp_path, keep_last=1, keep_every=0).load(resumed, folder, {}, 1e-6)
    moved = resumed.optimizer.state, dict(resumed.named_parameters())
    kept = straight.optimizer.state, dict(straight.named_parameters())
    for table in ("embedding", "difference"):
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            ours, theirs = (
                torch.cat([p if kind == "weights" else states[p][kind] for p in blocks])
                for states, parameters in (moved, kept)
                for blocks in [[p for name, p in parameters.items() if name.startswith(table)]]
            )
            assert len(ours) == config.model.vocabulary and torch.equal(ours, theirs) and ours.any(), (table, kind)
    for step in (2, 3):
        ours, theirs = (each.train_batch(step, 1e-3, True) for each in (resumed, straight))
        assert ours.metrics["loss"] == pytest.approx(theirs.metrics["loss"], rel=1e-6)
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-5)


def shares(size: int, rank: int, world: int) -> slice:
    """ZeRO-3's: equal parts, the last ranks' shorter or empty."""
    each = -(-size // world)
    return slice(min(each * rank, size), min(each * (rank + 1), size))


def test_a_rank_opens_the_files_that_hold_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of 512 ranks: all headers are read once, by the ranks together."""
    sizes, world = {"embedding_0": 3000, "embedding_1": 2000, "layers.0.bias": 100, "layers.0.weight": 5000}, 512
    whole = {(name, kind): np.random.default_rng(len(name)).standard_normal(size, np.float32) + k
             for name, size in sizes.items() for k, kind in enumerate(KINDS)}  # fmt: skip
    files = [tmp_path / state_file(rank, world) for rank in range(world)]
    for rank, path in enumerate(files):
        mine = {(name, kind): values[shares(len(values), rank, world)] for (name, kind), values in whole.items()}
        starts = {name: shares(size, rank, world).start for name, size in sizes.items()}
        written = {f"{name}/{kind}/{starts[name]}": part for (name, kind), part in mine.items() if len(part)}
        safetensors.numpy.save_file(written, path, {"step": "7"})
    opened: list[Path] = []

    def counted(path: Path, mode: str) -> IO[bytes]:
        opened.append(path)
        return open(path, mode)

    monkeypatch.setattr(state_files, "open", counted, raising=False)
    headers = [state_files.read_headers(files, rank, world) for rank in range(world)]
    assert opened == files
    reader = state_files.StateReader(files, headers)
    assert opened == files and reader.step == 7 and reader.sizes == sizes
    in_one = {"embedding_0": 5000, "layers.0.bias": 100, "layers.0.weight": 5000}
    table = {kind: np.concatenate([whole["embedding_0", kind], whole["embedding_1", kind]]) for kind in KINDS}
    for ranks, asked in ((512, sizes), (256, sizes), (384, in_one), (1, sizes)):
        for rank in {0, ranks // 3, ranks - 1}:
            opened.clear()
            parts = [(name, kind, shares(size, rank, ranks)) for name, size in asked.items() for kind in KINDS]
            outs = [torch.empty(part.stop - part.start) for *_, part in parts]
            asking = zip(parts, outs, strict=True)
            reader.read(((name, kind, part.start, out) for (name, kind, part), out in asking), asked)
            needed = set()  # of every element the file that it is in
            for (name, kind, part), out in zip(parts, outs, strict=True):
                moved = asked is in_one and name == "embedding_0"
                assert np.array_equal(out.numpy(), (table[kind] if moved else whole[name, kind])[part]), (name, kind)
                for element in range(part.start, part.stop):
                    second = moved and element >= 3000
                    size = 2000 if second else sizes[name]
                    needed.add(files[(element - 3000 * second) // -(-size // world)])
            assert sorted(opened) == sorted(needed), (ranks, rank)
        assert len(needed) < 8 or ranks == 1


def test_what_is_written_is_the_state_at_the_time_of_the_save(data: Path, tmp_path: Path) -> None:
    """The writer is held back by a pipe, which it cannot open before somebody reads it; training goes on meanwhile."""
    trained = engine(data)
    trained.train_batch(0, 1e-3, False)
    path = tmp_path / STATE_FILE
    os.mkfifo(path)
    writer = StateWriter(path, buffer_bytes=1 << 30)
    trained.save(writer)
    then = {name: value.clone() for name, value in trained.full_state().items()}
    trained.train_batch(1, 1e-2, False)
    assert not any(torch.equal(now, then[name]) for name, now in trained.full_state().items())
    written = safetensors.torch.load(path.read_bytes())
    for name, value in then.items():
        assert torch.equal(written[f"{name}/fp32/0"].view_as(value), value), name
    assert all(value.any() for name, value in written.items() if name.endswith("exp_avg/0"))


def test_a_quota_that_ends_when_the_file_is_flushed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As network file systems do; the thread has taken all blocks by then."""

    def full(_: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(state_files.os, "fsync", full)
    writer = StateWriter(tmp_path / STATE_FILE, buffer_bytes=0)
    writer.begin({"a/fp32/0": 4}, step=1)
    writer.put(torch.ones(4))
    writer.end()
    writer._thread.join(20)
    assert not writer._thread.is_alive()
    with pytest.raises(OSError, match=os.strerror(errno.EDQUOT)):
        writer.result()


def test_a_thread_without_memory_stops_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its check for finite numbers needs memory of its own."""

    def full(_: np.ndarray) -> np.ndarray:
        raise MemoryError

    writer = StateWriter(tmp_path / STATE_FILE, buffer_bytes=0)
    monkeypatch.setattr(state_files.np, "isfinite", full)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            pool.submit(writer.put, torch.ones(4)).result(20)
    writer.end()
    with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
        writer.result()


@pytest.mark.parametrize(("buffer_bytes", "fit"), [(0, 1), (63, 3), (64, 4)])
def test_copies_that_wait_take_no_more_memory_than_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int, fit: int
) -> None:
    """Ten pieces of 16 bytes, held back by a pipe; one alone always fits."""
    monkeypatch.setattr(state_files, "CHUNK", 4)
    path, waiting = tmp_path / STATE_FILE, list[int]()
    os.mkfifo(path)
    writer = StateWriter(path, buffer_bytes)

    def put() -> None:
        for _ in range(10):
            writer.put(torch.ones(4))
            waiting.append(writer._waiting)
        writer.end()

    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(put)
        while len(waiting) < fit:
            time.sleep(0.01)
        time.sleep(0.1)  # for one too many
        assert path.read_bytes() == np.ones(40, np.float32).tobytes()
        putting.result()
    assert waiting[:fit] == [16 * (n + 1) for n in range(fit)] and max(waiting) == 16 * fit


def test_what_is_not_finite_is_not_saved(data: Path, tmp_path: Path) -> None:
    """Neither moments, which no loss shows, nor weights with which the loss is no number; what was saved before
    stays."""
    trained, checkpoints = engine(data), Checkpoints(tmp_path, keep_last=1, keep_every=0)
    trained.train_batch(0, 1e-3, False)
    save(checkpoints, trained, 1)
    first = next(iter(trained.module.parameters()))  # all that is written after it is finite
    trained.optimizer.state[first]["exp_avg"].view(-1)[0] = np.inf
    with pytest.raises(SharedError, match="is not saved, because it would hold weights or moments that are not finite"):
        save(checkpoints, trained, 2)
    first.detach().fill_(np.nan)
    with pytest.raises(SharedError, match="after 3 steps the loss of the probe batch is nan, so nothing is saved any"):
        checkpoints.save(trained, 3, {})
    newest, complaints = checkpoints.newest()
    assert newest is not None and newest.name == "step_00000001" and not complaints


def test_state_is_the_same_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, read and merged in one piece or several, of which the last one may be smaller."""
    rng = np.random.default_rng(0)
    state = {f"{name}/{kind}": rng.normal(size=size) for name, size in (("a", 23), ("b", 7)) for kind in KINDS}
    state = {key: values.astype(np.float32) for key, values in state.items()}
    for chunk in (5, 7, 24):
        monkeypatch.setattr(state_files, "CHUNK", chunk)
        files = [tmp_path / f"{chunk}_{rank}" for rank in range(2)]
        for file, part in zip(files, (slice(0, 11), slice(11, None)), strict=True):  # of "a"; the second has all of "b"
            tensors = {f"{key}/{part.start}": values[part] for key, values in state.items() if key.startswith("a")}
            if part.start:
                tensors |= {f"{key}/0": values for key, values in state.items() if key.startswith("b")}
            writer = StateWriter(file, 4 * chunk)
            writer.begin({name: len(values) for name, values in tensors.items()}, 3)
            for values in tensors.values():
                writer.put(torch.from_numpy(values))
            writer.end()
            assert writer.result() == {"bytes": file.stat().st_size, "crc32": zlib.crc32(file.read_bytes())}
            assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0, "numbers begin where they may be mapped"
            found = safetensors.numpy.load_file(file)
            assert found.keys() == tensors.keys() and all((found[name] == tensors[name]).all() for name in tensors)
        reader = state_files.StateReader(files)
        for first, last in ((0, 23), (2, 21), (11, 17), (22, 23)):
            out = torch.empty(last - first)
            reader.read([("a", "exp_avg", first, out)])
            assert (out.numpy() == state["a/exp_avg"][first:last]).all()
        writer = StateWriter(tmp_path / f"{chunk}", 4 * chunk)
        state_files.merge_state(reader, writer)
        writer.result()
        merged = safetensors.numpy.load_file(tmp_path / f"{chunk}")
        assert merged.keys() == {f"{key}/0" for key in state}
        assert all((merged[f"{key}/0"] == values).all() for key, values in state.items())


def test_keeps_the_last_and_every_nth(data: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 10):
        checkpoints.save(engine_once(data), step, {})  # completes the one before
    checkpoints.wait(engine_once(data))
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == [
        "latest.json",
        "step_00000004",
        "step_00000008",
        "step_00000009",
    ]


@pytest.mark.parametrize("damage", ["marker", "truncated", "missing", "flipped bit"])
def test_damaged_checkpoint_is_named_and_the_one_before_taken(data: Path, tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3, keep_every=0)
    last = [save(checkpoints, engine_once(data), step) for step in (1, 2)][-1]
    content = bytearray((last / STATE_FILE).read_bytes())
    if damage == "marker":
        (last / "complete.json").unlink()
    elif damage == "truncated":
        (last / STATE_FILE).write_bytes(content[:-1])
    elif damage == "missing":
        (last / STATE_FILE).unlink()
    else:
        content[-5] ^= 4
        (last / STATE_FILE).write_bytes(content)
    newest, complaints = checkpoints.newest()
    assert newest is not None and newest.name == "step_00000001"
    assert len(complaints) == 1 and "step_00000002" in complaints[0]


def test_every_byte_of_a_large_file_is_checked(tmp_path: Path) -> None:
    """One that is read in several blocks."""
    partial, content = tmp_path / "checkpoints" / "step_00000001.partial", bytearray(range(256)) * (1 << 17)
    partial.mkdir(parents=True)
    (partial / STATE_FILE).write_bytes(content)
    files = {STATE_FILE: {"bytes": len(content), "crc32": zlib.crc32(content)}}
    whole = complete(partial, {"step": 1, "world": 1, "probe": 1.0}, files)
    assert state_files.checkpoint_fault(whole) is None
    for place in (0, len(content) // 2, -1):
        content[place] ^= 1
        (whole / STATE_FILE).write_bytes(content)
        content[place] ^= 1
        assert state_files.checkpoint_fault(whole) == f"{STATE_FILE} has changed since it was written (checksum)", place


def test_other_names_among_the_checkpoints_are_nobodys_business(data: Path, tmp_path: Path) -> None:
    checkpoints, elsewhere = Checkpoints(tmp_path, keep_last=1, keep_every=0), tmp_path / "elsewhere"
    folder = checkpoints.folder
    odd = ["old", "step-abc", "step_abcdefgh", "step-10 (copy)", "step_00000001 (copy)", "mine.partial"]
    for place in (elsewhere, *(folder / name for name in odd)):
        place.mkdir(parents=True)
        (place / "file").write_text("x")
    (folder / "notes.partial").write_text("x")
    (folder / "step_00000077").symlink_to("nowhere")
    (folder / "step_00000008.partial").symlink_to("nowhere")
    (folder / "step_00000002").symlink_to(elsewhere)
    (folder / "step_00000003").write_text("somebody's")
    (folder / "step_00000004").symlink_to("nowhere")
    for step in (1, 3, 4, 5):
        save(checkpoints, engine_once(data), step)
    assert checkpoints.newest() == (folder / "step_00000005", [])
    theirs = [*odd, "notes.partial", "step_00000077", "step_00000003.moved"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*theirs, "latest.json", "step_00000005"])
    assert all((place / "file").read_text() == "x" for place in (elsewhere, *(folder / name for name in odd)))
    assert (folder / "step_00000003.moved").read_text() == "somebody's"


def without_rights(function: Callable[[], None]) -> None:
    """Run it in a thread that is held to the permissions of files, also where the tests are root's."""
    with ThreadPoolExecutor(1, initializer=obey_permissions) as thread:
        thread.submit(function).result()


def test_an_old_checkpoint_that_cannot_be_deleted_stays(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_every=0)
    first = save(checkpoints, engine_once(data), 1)
    first.chmod(0o500)
    without_rights(lambda: [save(checkpoints, engine_once(data), step) for step in (2, 3)] and None)
    assert [path.name for path in checkpoints.all()] == ["step_00000001", "step_00000003"]
    assert f"{first} cannot be deleted and stays" in capsys.readouterr().err
    first.chmod(0)
    without_rights(lambda: print(checkpoints.newest()))
    assert "step_00000003'), [])" in capsys.readouterr().out
    checkpoints.folder.chmod(0)
    with pytest.raises(SharedError, match=r"checkpoints: Permission denied: give this user the permission"):
        without_rights(lambda: print(checkpoints.newest()))
    checkpoints.folder.chmod(0o700)


TWO = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from tests.faults.forked import obey_permissions
from xlme_ds.engine.ranks import exit_now
from xlme_ds.checkpoint.checkpoints import Checkpoints
obey_permissions()
dist.init_process_group("gloo")
newest, complaints = Checkpoints(Path(sys.argv[1]), 1, 0).newest(dist.get_rank(), 2)
print(newest.name, *complaints)
exit_now()
"""


def test_a_file_that_one_rank_cannot_read_is_told_by_both_and_the_checkpoint_before_taken(tmp_path: Path) -> None:
    for step in (1, 2):
        partial = tmp_path / "checkpoints" / f"step_{step:08d}.partial"
        partial.mkdir(parents=True)
        files = {}
        for name in ("state_00000_of_00002.safetensors", "state_00001_of_00002.safetensors"):
            (partial / name).write_bytes(b"x" * step)
            files[name] = {"bytes": step, "crc32": zlib.crc32(b"x" * step)}
        complete(partial, {"step": step, "world": 2, "probe": 1.0}, files)
    (tmp_path / "checkpoints/step_00000002/state_00001_of_00002.safetensors").chmod(0)
    for done in run_ranks(2, ["-c", TWO, str(tmp_path)], timeout=120):
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("step_00000001 ") and "Permission denied" in done.stdout
        assert "step_00000002 is left out: state_00001_of_00002.safetensors cannot be read" in done.stdout


def test_files_that_the_marker_does_not_list_are_not_read(data: Path, tmp_path: Path) -> None:
    trained, checkpoints = engine(data), Checkpoints(tmp_path, 3, 0)
    newest = save(checkpoints, trained, 1)
    (newest / "state_00001_of_00002.safetensors").write_bytes(b"of another layout")
    assert checkpoints.newest() == (newest, [])
    assert checkpoints.load(engine(data), newest, {}, tolerance=0) == 1
    commands.main(["convert", "--run", str(tmp_path), "--out", str(tmp_path / "converted")])
    commands.main(["convert", "--run", f"{tmp_path}@1", "--out", str(tmp_path / "named")])
    for name in ("converted", "named"):
        assert {path.name for path in (tmp_path / name).iterdir()} == {"complete.json", "state.json", STATE_FILE}


def test_half_written_checkpoint_is_not_seen(data: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3, keep_every=0)
    (checkpoints.folder / "step_00000002.partial").mkdir(parents=True)
    assert checkpoints.newest() == (None, [])
    save(checkpoints, engine_once(data), 1)
    assert not (checkpoints.folder / "step_00000002.partial").exists()


def test_other_data_is_refused(data: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3, keep_every=0)
    newest = save(checkpoints, engine_once(data), 1, {"fingerprints": {"mono": "a"}})
    with pytest.raises(SharedError, match=r"was saved with another --data \(mono\): resume with the data of"):
        checkpoints.load(engine_once(data), newest, {"fingerprints": {"mono": "b"}}, 1e-5)


def test_a_state_that_is_not_what_was_saved_is_refused(data: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3, keep_every=0)
    older, newer = engine(data), engine(data)
    newer.train_batch(0, 1e-3, False)
    first, second = save(checkpoints, older, 1), save(checkpoints, newer, 2)
    shutil.copy(first / STATE_FILE, second / STATE_FILE)  # sound files, of another step
    files = json.loads((second / "complete.json").read_text())
    files[STATE_FILE]["crc32"] = zlib.crc32((second / STATE_FILE).read_bytes())
    (second / "complete.json").write_text(json.dumps(files))
    assert checkpoints.newest() == (second, [])
    with pytest.raises(
        SharedError, match=r"probe batch was \S+ when \S+step_00000002 was saved and is \S+ after loading it"
    ):
        checkpoints.load(engine(data), second, {}, 1e-5)


def test_the_probe_does_not_hang_on_a_rounding(data: Path) -> None:
    """As another processor makes it: here of each weight, as a cast to bf16 does. Where the generator draws, its
    samples change with it, and with them the loss."""
    of = engine(data)
    module, batch = lively(of.module), of.loader.probe()
    uniforms = torch.rand(20, len(batch.uniforms_M), generator=torch.Generator().manual_seed(0))
    assert batch.uniforms_M.any(), "other objectives mask by them"
    drawn = [batch._replace(uniforms_M=each) for each in uniforms]
    before, of_drawn = of.probe_loss(), [module(each).corrupted_BT for each in drawn]
    for each in drawn[:3]:  # as another draw would have it
        of.loader.probe = lambda each=each: each  # type: ignore[method-assign]
        assert of.probe_loss() == before
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            noise = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(number)) - 0.5
            parameter.mul_(1 + 2**-8 * noise)
    assert any((module(each).corrupted_BT != found).any() for each, found in zip(drawn, of_drawn, strict=True))
    assert of.probe_loss() == pytest.approx(before, rel=PROBE_TOLERANCE["bf16"])


def test_no_probe_has_what_btmlm_writes(data: Path) -> None:
    """The most likely of its tokens may be another after a rounding; the probe's loss is one of given tokens."""
    of = engine(data, BTMLM)
    module, batch = lively(of.module), of.objective.as_probe(of.loader.probe())
    written = of.loader.micro_batches(0)[0]
    assert len(written.added["open_P"]) and not batch.added
    assert (written.tokens_BT[0] == PAD).sum() > (batch.tokens_BT[0] == PAD).sum() == (batch.segments_BT[0] == 0).sum()
    module.eval()
    plain = LanguageModel.forward(module, batch)  # a single pass
    assert of.probe_loss() == pytest.approx(plain.nll_M.mean().item(), rel=1e-6)


def test_a_wrong_probe_loss_is_an_error(data: Path, tmp_path: Path) -> None:
    of, checkpoints = engine(data, tiny(**PLAIN)), Checkpoints(tmp_path, keep_last=3, keep_every=0)
    newest = save(checkpoints, of, 1)
    assert checkpoints.load(of, newest, {}, 1e-5) == 1
    state = json.loads((newest / "state.json").read_text())
    (newest / "state.json").write_text(json.dumps(state | {"probe": 2 * state["probe"]}))
    with pytest.raises(SharedError, match=r"probe batch was \S+ when \S+ was saved and is \S+ after loading it"):
        checkpoints.load(of, newest, {}, 1e-5)


def test_another_model_is_refused(data: Path, tmp_path: Path) -> None:
    folder = save(Checkpoints(tmp_path, 3, 0), engine_once(data), 1)
    larger = engine(data, tiny(**PLAIN, feed_forward=80))
    with pytest.raises(SharedError, match="belongs to another model"):
        Checkpoints(tmp_path, 3, 0).load(larger, folder, {}, 1e-5)


WORKER = """
import os, resource, sys
from pathlib import Path
from tests.train.test_checkpoint import Checkpoints, engine, save
data, out, end = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
trained, checkpoints = engine(data), Checkpoints(out, 3, 0)
save(checkpoints, trained, 1)
if end == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # as a disk that fills up in the middle of a file
checkpoints.save(trained, 2, {})
if end == "killed":
    os.kill(os.getpid(), 9)
for step in range(2):
    trained.train_batch(step, 1e-3, False)
checkpoints.wait(trained)
"""


@pytest.mark.parametrize("end", ["killed", "full"])
def test_a_save_that_fails_leaves_the_one_before(data: Path, tmp_path: Path, end: str) -> None:
    done = python("-c", WORKER, str(data), str(tmp_path), end)
    assert done.returncode == (-9 if end == "killed" else 1), done.stderr
    if end == "full":
        assert "SharedError" in done.stderr and f"{STATE_FILE}: File too large" in done.stderr
    newest, complaints = Checkpoints(tmp_path, 3, 0).newest()
    assert newest is not None and newest.name == "step_00000001" and not complaints
    assert (tmp_path / "checkpoints" / "step_00000002.partial").exists()


def test_a_save_makes_no_second_run_folder_where_the_run_was(data: Path, tmp_path: Path) -> None:
    """A user moved it meanwhile."""
    checkpoints, engine = Checkpoints(tmp_path / "run", keep_last=1, keep_every=0), engine_once(data)
    (tmp_path / "run").mkdir()
    save(checkpoints, engine, 1)
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(SharedError, match="run is gone: if you moved it, start the run again with its new place"):
        save(checkpoints, engine, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_converted_checkpoint_is_read_like_any(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = engine(data)
    trained.train_batch(0, 1e-3, False)
    run, other = tmp_path / "run", Checkpoints(tmp_path / "other", 3, 0)
    run.mkdir()
    folder = save(Checkpoints(run, 3, 0), trained, 1)
    listed = read_versioned(folder / "complete.json")
    # As if two processes had saved.
    write_state_and_marker(folder, read_state(folder) | {"world": 2}, {STATE_FILE: listed[STATE_FILE]})
    commands.main(["convert", "--run", str(run), "--out", str(other.folder / folder.name)])
    assert other.newest() == (other.folder / folder.name, [])
    loaded = engine(data)
    assert other.load(loaded, other.folder / folder.name, {}, tolerance=0) == 1
    for each in (trained, loaded):
        each.train_batch(1, 1e-3, False)
    ours, theirs = loaded.full_state(), trained.full_state()
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    commands.main(["check", "--run", str(run)])
    commands.main(["list", "--run", str(tmp_path / "other")])
    listed = re.findall(r"step_00000001  ([\d.]+) MiB  saved by (\d) ", capsys.readouterr().out)
    assert [world for _, world in listed] == ["2", "1"]
    for (size, _), path in zip(listed, (folder, other.folder / folder.name), strict=True):
        assert float(size) == pytest.approx(sum(file.stat().st_size for file in path.iterdir()) / 2**20, abs=0.05)
    save(Checkpoints(run, 3, 0), trained, 2)
    (folder / STATE_FILE).write_bytes(b"")
    with pytest.raises(SystemExit) as end:  # although the newest is sound
        commands.main(["check", "--run", str(run)])
    assert end.value.code == 1 and "has 0 bytes instead of" in capsys.readouterr().out


def test_a_damaged_newer_checkpoint_does_not_cost_the_good_ones(data: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_every=0)
    save(checkpoints, engine_once(data), 9)
    (checkpoints.folder / "step_00000009" / "complete.json").write_text("[]")
    assert checkpoints.newest()[0] is None
    save(checkpoints, engine_once(data), 6)
    assert checkpoints.newest()[0] == checkpoints.folder / "step_00000006"
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["latest.json", "step_00000006"]


@pytest.mark.parametrize(
    ("there", "steps", "is_lost"),
    [
        ((), 0, False),
        ((), 1, True),  # the folder of checkpoints, which a run makes before its first step, is gone
        (("checkpoints/",), 5, False),
        (("checkpoints/",), 6, True),
        (("checkpoints/step_00000005.partial/",), 6, False),
        (("checkpoints/latest.json",), 0, True),
        (("checkpoints/", "finished.json"), 0, True),
        (("checkpoints/", "model/model.safetensors"), 0, True),
        (("checkpoints/", "model/sentencepiece.model"), 5, False),
    ],
)
def test_what_tells_that_a_checkpoint_was_there(
    tmp_path: Path, there: tuple[str, ...], steps: int, is_lost: bool
) -> None:
    """Each alone, in a run that saves every five steps."""
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).mkdir(parents=True) if name.endswith("/") else (tmp_path / name).touch()
    assert Checkpoints(tmp_path, 1, 0).were_lost(steps, 5) == is_lost


def test_state_of_several_steps_or_of_a_file_that_shrinks_is_refused(tmp_path: Path) -> None:
    files = [tmp_path / state_file(rank, 2) for rank in range(2)]
    for rank, file in enumerate(files):
        values = np.arange(6, dtype=np.float32)
        tensors = {f"w/{kind}/{6 * rank}": values for kind in KINDS}
        safetensors.numpy.save_file(tensors, file, {"step": str(rank)})
    with pytest.raises(ValueError, match=r"holds state of steps \[0, 1\]: resume from another checkpoint"):
        state_files.StateReader(files)
    with pytest.raises(ValueError, match="the checkpoint lists no state files"):
        state_files.StateReader([])
    reader = state_files.StateReader(files[1:])
    files[1].write_bytes(files[1].read_bytes()[:-4])
    last = max(KINDS)  # by which the file ends
    with pytest.raises(ValueError, match=r"state_00001\S+ became shorter while it was read"):
        reader.read([("w", last, 6, torch.empty(6))])


def test_a_mean_has_the_type_of_the_first_models_tensors() -> None:
    """Exports may be in half precision."""
    tensors = {"a": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "b": torch.tensor([1.0, 3.0])}

    def read(path: Path) -> dict[str, torch.Tensor]:
        """The second model is in single precision."""
        return {k: v * int(str(path)) if str(path) == "1" else v.float() * 3 for k, v in tensors.items()}

    means, _ = commands._mean([Path("1"), Path("3")], read)
    assert {name: (mean.dtype, mean.tolist()) for name, mean in means.items()} == {
        "a": (torch.bfloat16, [2.0, 4.0]), "b": (torch.float32, [2.0, 6.0])
    }  # fmt: skip


def train_here(data: Path, config: RunConfig, folder: RunFolder, loader: Loader) -> bool:
    work = pretraining_info(config, loader, None, root=True)
    trainer = Trainer(engine(data, config), config, folder, work)
    return trainer.train(StopRequest(), Watchdog(0, rank=0))


def test_records_without_a_usable_checkpoint_are_not_overwritten(data: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(
        tiny(**PLAIN), train=dataclasses.replace(tiny(**PLAIN).train, save_every=5, log_every=1)
    )
    loader = Loader(data, config.data, config.seed, 0.15)
    folder = RunFolder(tmp_path / "run")
    assert train_here(data, config, folder, loader)
    shutil.rmtree(folder.path / "checkpoints")
    with pytest.raises(ValueError, match="has records but no usable checkpoint"):
        train_here(data, config, folder, loader)
    assert folder.last_logged_step() == config.train.steps
    (folder.path / "checkpoints").mkdir()  # emptied, with latest.json
    with pytest.raises(ValueError, match="has records but no usable checkpoint"):
        train_here(data, config, folder, loader)
    seldom = dataclasses.replace(config, train=dataclasses.replace(config.train, save_every=1000))
    (folder.path / "checkpoints/latest.json").unlink(missing_ok=True)
    for removed in (True, False):  # the whole folder, or what was in it; the run itself saved every 5 steps
        shutil.rmtree(folder.path / "checkpoints") if removed else (folder.path / "checkpoints").mkdir()
        with pytest.raises(ValueError, match="has records but no usable checkpoint"):
            train_here(data, seldom, folder, loader)
    folder.finish(config.train.steps)
    with pytest.raises(ValueError, match="has records but no usable checkpoint"):
        train_here(data, seldom, folder, loader)
    assert folder.last_logged_step() == config.train.steps


def test_a_run_that_ended_before_its_first_checkpoint_was_whole_starts_anew(data: Path, tmp_path: Path) -> None:
    """Writing goes on beside training: a kill or a full disk may come when more steps are done than lie between two
    saves."""
    config = dataclasses.replace(
        tiny(**PLAIN), train=dataclasses.replace(tiny(**PLAIN).train, save_every=2, log_every=1)
    )
    loader = Loader(data, config.data, config.seed, 0.15)
    assert train_here(data, config, RunFolder(tmp_path / "alone"), loader)
    folder = RunFolder(tmp_path / "run")
    (folder.path / "checkpoints" / "step_00000002.partial").mkdir(parents=True)
    recorded = "".join(f'{{"step": {step}}}\n' for step in range(1, 6))
    kinds = [f"{name}.jsonl" for name in ("metrics", "heldout", "heldout_languages", "dimensions", "faults")]
    for kind in kinds:
        (folder.path / kind).write_text(recorded)
    (folder.path / "metrics.jsonl.1").write_text("of the try before")
    assert train_here(data, config, folder, loader)
    (folder.path / "checkpoints" / "latest.json").stat()
    ours, theirs = ((path / "metrics.jsonl").read_text().splitlines() for path in (folder.path, tmp_path / "alone"))
    assert [json.loads(line)["loss"] for line in ours] == [json.loads(line)["loss"] for line in theirs]
    assert (folder.path / "metrics.jsonl.1").read_text() == "of the try before"
    aside = [folder.path / f"{kind}.{2 if kind == 'metrics.jsonl' else 1}" for kind in kinds]
    assert [path.read_text() for path in aside] == [recorded] * len(kinds)
    for whole in (folder.path / "checkpoints").glob("step_*"):
        shutil.rmtree(whole)
    with pytest.raises(ValueError, match="has records but no usable checkpoint"):
        train_here(data, config, folder, loader)

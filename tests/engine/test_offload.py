"""What cannot be offloaded is said; and the road of an XL step, with all state on the disk, on a model of toy size.

Offloading to the CPU's memory is in the matrix of test_parity.py.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder
from safetensors.numpy import load_file

from tests.engine.worker import tiny
from tests.launch import TIMED, python, run_ranks
from tests.rows import train_vocabulary, write_data
from xlme_ds.config import DataConfig, EngineConfig, ModelConfig, RunConfig
from xlme_ds.engine_file import CONFIG_FOLDER
from xlme_ds.io.folders import lock_folder
from xlme_ds.validate import validate


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"offload_optimizer": "nvme"}, "needs engine.nvme_folder"),
        ({"kind": "pipeline", "offload_optimizer": "cpu"}, "engine.kind pipeline offloads nothing"),
        ({"gradient_precision": "bf16", "precision": "fp32"}, "is for engine.kind deepspeed computing in bf16"),
    ],
)
def test_a_setting_that_no_engine_runs(engine: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny(engine, 8)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"offload_parameters": "cpu"}, "is ZeRO-1, which can offload only the optimizer and only to cpu"),
        ({"offload_optimizer": "nvme", "nvme_folder": "swap"}, "is ZeRO-1, which can offload only the optimizer"),
        (
            {"gradient_precision": "bf16", "precision": "bf16", "deepspeed": "zero2"},
            "bf16 needs ZeRO-1 or ZeRO-3: set engine.deepspeed to zero1",
        ),
        (
            {"gradient_precision": "bf16", "precision": "bf16", "offload_optimizer": "cpu"},
            "bf16 needs ZeRO-3 where engine.offload_optimizer is set",
        ),
    ],
)
def test_a_setting_that_needs_another_stage(engine: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run = tiny({}, 8)
        validate(replace(run, engine=replace(run.engine, **engine)))


def test_every_lever_is_a_legal_run(tmp_path: Path) -> None:
    """A run whose memory offloading, checkpointing and smaller batches reduce, and the same with one of them each."""
    model = ModelConfig(
        vocabulary=64_000, width=512, heads=8, feed_forward=2048, generator_layers=2, discriminator_layers=8,
        norm="pre", vocabulary_blocks=4,
    )  # fmt: skip
    engine = EngineConfig(deepspeed="zero3_offload", precision="bf16", gradient_precision="fp32")
    run = RunConfig("levers", model=model, data=DataConfig(4, 4, micro_batch=4), engine=engine)
    runs = [run, replace(run, data=replace(run.data, micro_batch=1))]
    for lever in ({"activation_checkpointing": True}, {"head_chunk": 1024}, {"embedding_sharing": "gdes"}):
        runs.append(replace(run, model=replace(model, **lever)))
    nvme = {"offload_optimizer": "nvme", "nvme_folder": str(tmp_path)}
    for place in ({"gradient_precision": "bf16"}, nvme):
        runs.append(replace(run, engine=replace(engine, **place)))
    for one in runs:
        validate(one)


@pytest.fixture(scope="module")
def async_io() -> None:
    """DeepSpeed's, compiled where it is not yet, which takes minutes."""
    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io needs libaio: apt-get install libaio-dev")
    load = (  # where runs look for it
        "from deepspeed.ops.op_builder import AsyncIOBuilder\n"
        "from xlme_ds.engine.deepspeed_compat import loading_extensions\n"
        "with loading_extensions(): AsyncIOBuilder().load(verbose=False)"
    )
    done = python("-c", load)
    assert done.returncode == 0, done.stderr


# No size is a multiple of anything: matrices of 7,951 × 69, which DeepSpeed swaps (from 1 MiB on), and smaller
# parameters.
ODD = dict(
    vocabulary=7951, width=69, heads=3, feed_forward=7951, head_chunk=1000, discriminator_layers=1, steps=3,
    micro_batch=4,
    embedding_sharing="gdes",
)  # fmt: skip
DISK = dict(offload_optimizer="nvme", offload_parameters="nvme")
PLACES: dict[int, dict[str, dict[str, str]]] = {
    1: {
        "optimizer on the disk": dict(offload_optimizer="nvme"),
        "parameters on the disk": dict(offload_optimizer="cpu", offload_parameters="nvme"),
        "all on the disk": DISK,
        "bf16": dict(precision="bf16"),
        "bf16, all on the disk": DISK | dict(precision="bf16"),
    },
    2: {"all on the disk, on 2": DISK},  # every partition is padded, and the settings ask for reading ahead
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, async_io: None) -> dict[str, dict]:
    """What every place gives, and the plain engine."""
    folder = tmp_path_factory.mktemp("odd")
    data = write_data(folder / "data", rows=32, vocabulary=ODD["vocabulary"])
    found: dict[str, dict] = {}
    for world, places in PLACES.items():
        settings = json.loads((CONFIG_FOLDER / f"{('zero3_offload', 'zero3')[world - 1]}.json").read_text())
        settings["zero_optimization"] |= dict(
            sub_group_size=1_000_003, offload_param=dict(buffer_size=550_001, buffer_count=12, max_in_cpu=0)
        )
        (folder / "zero3.json").write_text(json.dumps(settings))
        base = dict(
            kind="deepspeed", deepspeed=str(folder / "zero3.json"), precision="fp32", nvme_folder=str(folder / "swap")
        )
        cases: dict[str, dict] = {"plain": dict(engine=dict(kind="plain"), **ODD)} if world == 1 else {}
        cases |= {name: dict(engine=base | place, **ODD) for name, place in places.items()}
        (folder / "cases.json").write_text(json.dumps(cases))
        out = folder / str(world)
        worker = str(Path(__file__).with_name("worker.py"))
        results = run_ranks(world, [worker, str(folder / "cases.json"), str(data), str(out)])
        assert all(r.returncode == 0 for r in results), "\n".join(r.stderr[-3000:] for r in results)
        for name in cases:
            files = {kind: load_file(out / f"{name}.{kind}.safetensors") for kind in ("gradients0", "weights")}
            found[name] = json.loads((out / f"{name}.json").read_text()) | files
    return found


@pytest.mark.parametrize("name", [name for places in PLACES.values() for name in places if name != "bf16"])
def test_no_place_changes_a_step(odd: dict[str, dict], name: str) -> None:
    ours, theirs = odd[name], odd["bf16" if "bf16" in name else "plain"]
    # The gradient norm is summed in other groups; its last bit may move a weight over a border of bf16's rounding.
    rounding = 1e-4 if "bf16" in name else 1e-6
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=rounding)
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=10 * rounding)
    for kind in ("gradients0", "weights"):
        assert ours[kind].keys() == theirs[kind].keys()
    for key, value in theirs["gradients0"].items():  # of the first step, which starts from the same weights everywhere
        bound = 1e-5 * np.abs(value).max() + 1e-7
        np.testing.assert_allclose(ours["gradients0"][key], value, rtol=0, atol=bound, err_msg=key)
    for key, value in theirs["weights"].items() if "bf16" not in name else ():
        np.testing.assert_allclose(ours["weights"][key], value, rtol=0, atol=2e-6, err_msg=key)


def test_steps_with_all_state_on_the_disk(tmp_path: Path, async_io: None) -> None:
    """A branch from the checkpoint of step 2 takes the run's third step again."""
    vocabulary = train_vocabulary(tmp_path / "data" / "vocab")
    data = write_data(tmp_path / "data", rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    flags = (
        f"--model.vocabulary {vocabulary.size} --model.width 69 --model.heads 3 --model.feed-forward 7951 "
        "--model.generator-layers 1 --model.discriminator-layers 1 --model.max-positions 32 "
        "--model.vocabulary-blocks 1 --model.embedding-sharing gdes --data.mono-rows 1 --data.para-rows 1 "
        "--data.micro-batch 1 --engine.deepspeed zero3_offload --engine.precision bf16 "
        "--engine.gradient-precision bf16 --engine.offload-optimizer nvme --engine.offload-parameters nvme "
        "--optimizer.warmup-steps 0 --train.steps 3 --train.save-every 2 --train.log-every 1"
    )
    (tmp_path / "file").touch()
    words = ["-m", "xlme_ds.pretrain", "--data", str(data), "--recipe", "xl_zero3", *flags.split()]
    places = ["--out", str(tmp_path / "run"), "--engine.nvme-folder", str(tmp_path / "file")]
    for more in (["--dry-run"], []):
        checked = python(*words, *places, *more)
        assert (checked.returncode, "file cannot be written: name a folder" in checked.stderr) == (2, True), checked
    assert not (tmp_path / "run").exists()
    with lock_folder(tmp_path / "swap/rank0"):  # as another run does, whose files would have the same names
        refused = python(*words, "--out", str(tmp_path / "run"), "--engine.nvme-folder", str(tmp_path / "swap"))
    assert refused.returncode == 2 and "another process is still working in" in refused.stderr, refused.stderr
    steps = []
    for out, start in (
        ("run", ["--recipe", "xl_zero3", *flags.split()]),
        ("branch", ["--branch", f"{tmp_path / 'run'}@2"]),
    ):
        swap = ["--engine.nvme-folder", str(tmp_path / "swap")]
        done = python("-m", "xlme_ds.pretrain", "--data", str(data), "--out", str(tmp_path / out), *start, *swap)
        assert done.returncode == 0, done.stderr[-3000:]
        steps.append([json.loads(line) for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()])
    (*_, whole), (again,) = steps
    assert again["step"] == whole["step"] == 3
    untimed = whole.keys() - set(TIMED)
    assert {key: again[key] for key in untimed} == {key: whole[key] for key in untimed}


REQUIRE = """
import sys
from dataclasses import replace
from xlme_ds.config import EngineConfig, RunConfig
from xlme_ds.engine.build import require_engine
from xlme_ds.engine.ranks import SharedError, process_group

engine = EngineConfig(precision="fp32", offload_optimizer="nvme")
with process_group(engine) as (rank, _):
    try:
        require_engine(RunConfig("disk", engine=replace(engine, nvme_folder=sys.argv[1 + rank])))
    except SharedError as error:
        print(error)
"""


def test_a_folder_that_one_node_cannot_write_ends_all_ranks(tmp_path: Path, async_io: None) -> None:
    (tmp_path / "file").touch()
    for of_rank_1, says in (("new/swap", ""), ("file", "file cannot be written"), ("file/in", "file/in cannot be")):
        ranks = run_ranks(2, ["-c", REQUIRE, str(tmp_path / "new/swap"), str(tmp_path / of_rank_1)])
        assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
        assert all(says in rank.stdout and bool(rank.stdout) == bool(says) for rank in ranks), ranks
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "the check, which dry runs make too, writes nothing"

"""The planner's memory and communication against what real engines allocate and send, on the CPU, byte for byte."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.plan.measure import run_config
from tests.rows import write_data
from tests.small import MODERN
from xlme_ds.plan.layout import ParallelLayout
from xlme_ds.plan.memory import peak_memory
from xlme_ds.plan.speed import communication_bytes

TINY = dict(
    vocabulary=2000,
    width=64,
    heads=4,
    feed_forward=256,
    generator_layers=2,
    discriminator_layers=4,
    max_positions=64,
    head_chunk=64,
)
MIDDLE = dict(
    vocabulary=5000,
    width=128,
    heads=4,
    feed_forward=512,
    generator_layers=1,
    discriminator_layers=4,
    max_positions=64,
    head_chunk=64,
)
WORDY = dict(
    vocabulary=10000,
    width=64,
    heads=4,
    feed_forward=256,
    generator_layers=1,
    discriminator_layers=3,
    max_positions=64,
    head_chunk=64,
)
DEEP = TINY | dict(generator_layers=2, discriminator_layers=10)
LARGE_LIKE = MIDDLE | dict(norm="pre", vocabulary_blocks=4, activation_checkpointing=True)
MT = MIDDLE | dict(language_embeddings=("de", "en", "fr"))
SHORT = MT | dict(width=256, feed_forward=1024, max_positions=32)  # translations are written token by token
MODERN_LIKE = MIDDLE | MODERN | dict(local_window=16)
PIPE = dict(kind="pipeline", pipeline_stages=2)

# name: ranks, ZeRO stage, precision, rows of (mono, para, micro-batch), model, engine
CASES: dict[str, tuple[int, int, str, tuple[int, int, int], dict[str, Any], dict[str, Any]]] = {
    "tiny zero1 bf16": (1, 1, "bf16", (4, 4, 4), TINY, {}),
    "middle zero2 bf16": (1, 2, "bf16", (4, 4, 4), MIDDLE, {}),
    "middle zero3 fp32": (1, 3, "fp32", (4, 4, 4), MIDDLE, {}),
    "middle zero1 bf16, accumulating, on 2": (2, 1, "bf16", (8, 8, 2), MIDDLE, {}),
    "middle zero1 bf16 on 2": (2, 1, "bf16", (8, 8, 4), MIDDLE, {}),
    "middle zero1 bf16, bf16 sums, on 2": (2, 1, "bf16", (8, 8, 2), MIDDLE, dict(gradient_precision="bf16")),
    "middle zero2 bf16, accumulating, on 2": (2, 2, "bf16", (8, 8, 2), MIDDLE, {}),
    "middle zero3 bf16, accumulating, on 2": (2, 3, "bf16", (8, 8, 2), MIDDLE, {}),
    "middle zero3 bf16, pre-LN, blocks, checkpointing, on 2": (2, 3, "bf16", (8, 8, 4), LARGE_LIKE, {}),
    "deep zero3 bf16, few live, on 2": (2, 3, "bf16", (8, 8, 4), DEEP, {}),
    "middle zero2 bf16, GDES, plain bias, on 2": (
        2, 2, "bf16", (8, 8, 4), MIDDLE | dict(embedding_sharing="gdes", relative_bias="plain"), {}
    ),
    "wordy zero1 fp32 on 2": (2, 1, "fp32", (8, 8, 4), WORDY, {}),
    "middle pipeline bf16 on 2": (2, 1, "bf16", (8, 8, 2), MIDDLE, PIPE),
    "wordy pipeline fp32 on 2": (2, 1, "fp32", (8, 8, 2), WORDY, PIPE),
    "middle zero2 bf16, MLM": (1, 2, "bf16", (4, 4, 4), MIDDLE, {}),
    "wordy zero1 bf16, MLM, accumulating": (1, 1, "bf16", (8, 8, 2), WORDY, {}),
    "middle zero3 bf16, MLM, blocks, checkpointing, on 2": (2, 3, "bf16", (8, 8, 4), LARGE_LIKE, {}),
    "middle zero2 bf16, MLM, dropout, languages": (
        1, 2, "bf16", (4, 4, 4),
        MIDDLE | dict(dropout=0.1, attention_dropout=0.1, language_embeddings=("de", "en", "fr"), relative_bias="none"),
        {},
    ),
    "middle zero2 bf16, modern": (1, 2, "bf16", (4, 4, 4), MODERN_LIKE, {}),
    "middle zero3 bf16, modern, on 2": (2, 3, "bf16", (8, 8, 4), MODERN_LIKE, {}),
    "middle zero1 bf16, CLM": (1, 1, "bf16", (8, 0, 8), MIDDLE, {}),
    "middle zero2 bf16, MT": (1, 2, "bf16", (0, 8, 8), MT, {}),
    "middle zero2 bf16, MT, dropout": (
        1, 2, "bf16", (0, 8, 8), MT | dict(dropout=0.1, attention_dropout=0.1, relative_bias="none"), {}
    ),
    "middle zero2 bf16, MT, ae": (1, 2, "bf16", (8, 0, 8), MT, {}),
    "middle zero2 bf16, MT, ae bt": (1, 2, "bf16", (8, 0, 8), SHORT, {}),
    "middle zero1 bf16, MT, ae bt and pairs": (1, 1, "bf16", (4, 8, 8), SHORT, {}),
    "wordy zero1 fp32, MLM, on 2": (2, 1, "fp32", (8, 8, 4), WORDY, {}),
    "wordy pipeline bf16, MLM, on 2": (2, 1, "bf16", (8, 8, 2), WORDY, PIPE),
    "middle pipeline fp32, MLM, on 2": (2, 1, "fp32", (8, 8, 2), MIDDLE, PIPE),
    "middle zero3 bf16, BTMLM, on 2": (2, 3, "bf16", (16, 0, 4), MIDDLE, {}),
    "middle pipeline fp32, BTMLM, on 2": (2, 1, "fp32", (16, 0, 4), MIDDLE, PIPE),
    "middle zero2 bf16, RTS": (1, 2, "bf16", (4, 4, 4), MIDDLE, {}),
    "wordy zero1 fp32, RTS, on 2": (2, 1, "fp32", (8, 8, 4), WORDY, {}),
    "middle zero3 bf16, RTS, on 2": (2, 3, "bf16", (8, 8, 4), MIDDLE, {}),
    "middle zero2 bf16, all_tokens": (1, 2, "bf16", (4, 4, 4), MIDDLE, {}),
    "wordy zero1 fp32, all_tokens, on 2": (2, 1, "fp32", (8, 8, 4), WORDY, {}),
    "middle zero2 bf16, corrective": (1, 2, "bf16", (4, 4, 4), MIDDLE, {}),
    "middle pipeline fp32, all_tokens, on 2": (2, 1, "fp32", (8, 8, 2), MIDDLE, PIPE),
    "middle pipeline bf16, RTS, on 2": (2, 1, "bf16", (8, 8, 2), MIDDLE, PIPE),
}  # fmt: skip


def engine_file(folder: Path, stage: int, few: bool) -> str:
    """Buckets small enough that they do not hide everything else; `few`: half of the weights do not stay for the
    backward pass."""
    zero = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": 25_000, "stage3_param_persistence_threshold": 1000}
    if few:
        zero |= {"stage3_prefetch_bucket_size": 10_000, "stage3_max_live_parameters": 350_000}
        zero |= {"stage3_max_reuse_distance": 150_000}
    path = folder / f"zero{stage}{' few' * few}.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    return str(path)


def case(folder: Path, name: str) -> dict[str, Any]:
    _, stage, precision, data, model, engine = CASES[name]
    rows = folder / f"rows_{model['vocabulary']}_{model['max_positions']}"
    if not rows.exists():
        write_data(rows, rows=32, row_tokens=model["max_positions"], vocabulary=model["vocabulary"])
    engine = (
        dict(kind="deepspeed", deepspeed=engine_file(folder, stage, "few live" in name), precision=precision) | engine
    )
    kinds = "BTMLM", "MLM", "CLM", "RTS", "all_tokens", "corrective", "MT"
    objective = next((kind.lower() for kind in kinds if kind in name), "electra")
    terms = {term: ("0:1",) for term, word in (("denoising", " ae"), ("back_translation", " bt")) if word in name}
    return dict(engine=engine, data=data, model=model, objective=objective, terms=terms, folder=str(rows))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """By name: the case, and what each rank measured."""
    folder = tmp_path_factory.mktemp("plan")
    found = {}
    for world in sorted({case[0] for case in CASES.values()}):
        names = [name for name in CASES if CASES[name][0] == world]
        # Pipelines last: DeepSpeed 0.19.8 keeps a module of theirs for the process, and other engines then fail.
        cases = {name: case(folder, name) for name in sorted(names, key=lambda name: "pipeline" in name)}
        (folder / f"cases{world}.json").write_text(json.dumps(cases))
        out = folder / f"out{world}.json"
        worker = str(Path(__file__).with_name("measure.py"))
        results = run_ranks(world, [worker, str(folder / f"cases{world}.json"), str(out)], timeout=1800)
        assert all(result.returncode == 0 for result in results), "\n".join(result.stderr[-3000:] for result in results)
        ranks = [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(world)]
        found |= {name: (cases[name], [rank[name] for rank in ranks]) for name in cases}
    return found


def layout(name: str, case: dict[str, Any]) -> ParallelLayout:
    return ParallelLayout.of(
        run_config(case), CASES[name][0], CASES[name][2], case["model"]["max_positions"], on_gpu=False
    )


@pytest.mark.parametrize("name", CASES)
def test_peak_memory(measured: dict[str, Any], name: str) -> None:
    case, ranks = measured[name]
    moment, memory = peak_memory(layout(name, case))
    fullest = max(ranks, key=lambda rank: rank["peak"])
    # What is left out: copies that one operation makes for itself, and rows that are not full.
    assert sum(memory.values()) == pytest.approx(fullest["peak"], rel=0.1), (moment, memory, fullest)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][0] > 1])
def test_communication(measured: dict[str, Any], name: str) -> None:
    case, ranks = measured[name]
    of = layout(name, case)
    sent, share = ranks[0]["bytes"], (of.replicas - 1) / of.replicas
    expected = communication_bytes(of)
    gradients = 2 * sent.get("allreduce_", 0) + sent.get("_reduce_scatter_base_", 0)
    # Besides gradients the ranks reduce the counts and statistics of the batch: 16 KB here.
    assert gradients * share == pytest.approx(expected["gradients"], rel=0.01, abs=40_000)
    # Small parameters stay gathered under ZeRO-3 (stage3_param_persistence_threshold).
    assert sent.get("_allgather_base_", 0) * share == pytest.approx(expected["weights"], rel=0.01)
    assert max(rank["bytes"].get("send", 0) for rank in ranks) == pytest.approx(expected["stages"], rel=0.01)

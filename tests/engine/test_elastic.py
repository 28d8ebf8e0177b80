"""Checkpoints go from any engine, ZeRO stage and number of processes to any other, and the loss curve goes on."""

import json
from pathlib import Path

import pytest
import torch

from tests.engine.elastic_worker import STEPS
from tests.launch import run_ranks
from tests.rows import write_data
from xlme_ds.checkpoint.state_files import StateReader, state_files

KINDS = ("fp32", "exp_avg", "exp_avg_sq")

PIPE = dict(kind="pipeline", deepspeed="pipe_zero1", pipeline_stages=2)
DUAL = PIPE | dict(pipeline_schedule="dualpipev")
PLAIN = dict(kind="plain")
VARIANT = dict(norm="pre", embedding_norm=True, embedding_sharing="gdes", vocabulary_blocks=3)


def zero(stage: int, precision: str = "fp32") -> dict:
    return dict(deepspeed=f"zero{stage}", precision=precision)


MLM = dict(objective="mlm", vocabulary_blocks=3)
SENTENCES = dict(
    objective="mt", language_embeddings=("fr", "en", "de"), denoising=("0:1", "10:0"), back_translation=("0:0.5",)
)
BF16_PIPE = PIPE | dict(precision="bf16")
# The layouts of every chain, by the launch that runs them: (processes, links).
LAUNCHES = [
    (4, {"issue": [zero(3)], "all": [zero(2)], "bf16": [zero(1, "bf16")], "mlm": [PIPE]}),
    (
        2,
        {
            "issue": [zero(3), PIPE],
            "all": [zero(1), zero(2)],
            "bf16": [zero(3, "bf16"), BF16_PIPE],
            "mlm": [PIPE, DUAL],
        },
    ),
    (1, {"issue": [zero(1)], "all": [PLAIN], "bf16": [zero(2, "bf16")], "mlm": [PLAIN], "sentences": [PLAIN]}),
    (2, {"issue": [zero(3)], "all": [DUAL], "bf16": [zero(1, "bf16")], "mlm": [zero(3)], "sentences": [zero(1)]}),
]
LINKS = {"issue": 5, "all": 5, "bf16": 5, "mlm": 5, "sentences": 2}
# Never stopped: the same number of steps in one process, in the last launch's company.
ALONE = {"issue": PLAIN, "all": PLAIN, "bf16": zero(1, "bf16"), "mlm": PLAIN, "sentences": PLAIN}


def case(chain: str, engine: dict) -> dict:
    """The vocabulary is in other blocks from link to link."""
    found = dict(engine=engine, micro_batch=2) | {"all": VARIANT, "mlm": MLM, "sentences": SENTENCES}.get(chain, {})
    return found | ({"vocabulary_blocks": 1} if chain in ("all", "mlm") and engine in (zero(1), zero(3), DUAL) else {})


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    data = write_data(folder / "data", rows=200)
    for number, (world, chains) in enumerate(LAUNCHES):
        links = [[chain, case(chain, engine), STEPS] for chain, engines in chains.items() for engine in engines]
        links.sort(
            key=lambda link: link[1]["engine"].get("kind") == "pipeline"
        )  # DeepSpeed builds no other engine after one
        if world == 1:
            links += [[f"{chain} alone", case(chain, engine), LINKS[chain] * STEPS] for chain, engine in ALONE.items()]
        (folder / f"{number}.json").write_text(json.dumps(links))
        worker = str(Path(__file__).with_name("elastic_worker.py"))
        results = run_ranks(world, [worker, str(folder / f"{number}.json"), str(data), str(folder)])
        assert all(r.returncode == 0 for r in results), "\n".join(r.stdout[-500:] + r.stderr[-3000:] for r in results)
    return folder


def losses(folder: Path) -> list[float]:
    return [float(line) for line in (folder / "losses.jsonl").read_text().split()]


@pytest.mark.parametrize(("chain", "fall"), [("issue", 3), ("all", 3), ("mlm", 0.1), ("sentences", 0.1)])
def test_curve_goes_on(out: Path, chain: str, fall: float) -> None:
    ours = losses(out / chain)
    assert len(ours) == LINKS[chain] * STEPS and ours[-1] < ours[0] - fall
    assert ours == pytest.approx(losses(out / f"{chain} alone"), rel=1e-5)


def test_bf16_curve_goes_on(out: Path) -> None:
    assert losses(out / "bf16") == pytest.approx(losses(out / "bf16 alone"), rel=2e-2)


@pytest.mark.parametrize("chain", list(LINKS))
def test_every_load_brings_all_state_back_bitwise(out: Path, chain: str) -> None:
    for step in range(STEPS, LINKS[chain] * STEPS, STEPS):
        saved, copy = (
            StateReader(state_files(root / "checkpoints" / f"step_{step:08d}"))
            for root in (out / chain, out / chain / "copies")
        )
        assert saved.step == copy.step == step
        assert sum(saved.sizes.values()) == sum(copy.sizes.values())
        for name, size in saved.sizes.items():
            for kind in KINDS:
                ours, theirs = torch.empty(size), torch.empty(size)
                saved.read([(name, kind, 0, ours)])
                copy.read([(name, kind, 0, theirs)], saved.sizes)
                assert torch.equal(ours, theirs), (step, name, kind)
                assert kind == "fp32" or ours.any() or name.startswith("difference"), (step, name, kind)

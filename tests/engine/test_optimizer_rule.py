"""Another update rule in engine/optimizer.py is the rule of every engine, or all ranks raise the same error."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.rows import write_data

BF16 = dict(precision="bf16")
ENGINES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"plain": dict(kind="plain")},
    2: {
        "zero1": dict(deepspeed="zero1"),
        "zero1 bf16": dict(deepspeed="zero1", gradient_precision="fp32", **BF16),
        "zero1 bf16, gradients too": dict(deepspeed="zero1", gradient_precision="bf16", **BF16),
        "zero2": dict(deepspeed="zero2"),
        "zero3": dict(deepspeed="zero3"),
        "pipeline": dict(kind="pipeline", deepspeed="pipe_zero1", pipeline_stages=2),
    },
}
RULES = ("AdamW", "RAdam", "amsgrad", "Adafactor")
PARALLEL = list(ENGINES[2])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found; one process more has the plain engine's."""
    folder = tmp_path_factory.mktemp("rules")
    data = write_data(folder / "data", rows=96)
    worker = str(Path(__file__).with_name("rule_worker.py"))
    found: dict[int, list[dict[str, Any]]] = {}
    for world, engines in ENGINES.items():
        # DeepSpeed builds no other engine after a pipeline's.
        rules = RULES if world == 1 else RULES[1:]  # test_parity.py has AdamW under every engine
        cases = {f"{name}, {rule}": (rule, engine) for name, engine in engines.items() for rule in rules}
        (folder / f"{world}.json").write_text(json.dumps(cases))
        done = run_ranks(world, [worker, str(folder / f"{world}.json"), str(data), str(folder / f"out{world}")])
        assert all(one.returncode == 0 for one in done), "\n".join(one.stderr[-3000:] for one in done)
        found[world] = [json.loads((folder / f"out{world}.{rank}.json").read_text()) for rank in range(world)]
    return [found[1][0] | one for one in found[2]]


def test_the_rules_differ(ranks: list[dict[str, Any]]) -> None:
    """By more than bf16 rounds."""
    assert abs(ranks[0]["plain, RAdam"][-1] / ranks[0]["plain, AdamW"][-1] - 1) > 2e-2


@pytest.mark.parametrize("rule", RULES[1:3])
@pytest.mark.parametrize("engine", PARALLEL)
def test_every_engine_takes_it(ranks: list[dict[str, Any]], engine: str, rule: str) -> None:
    # bf16 has 8 bits of fraction, and the first steps of Adam take the sign of the smallest gradients, too.
    tolerance = 1e-2 if "bf16" in engine else 1e-5
    for rank in ranks:
        assert rank[f"{engine}, {rule}"] == pytest.approx(rank[f"plain, {rule}"], rel=tolerance)


@pytest.mark.parametrize("engine", ["plain", *PARALLEL])
def test_a_rule_that_checkpoints_cannot_hold_fails(ranks: list[dict[str, Any]], engine: str) -> None:
    message = ranks[0][f"{engine}, Adafactor"]
    assert message.startswith(
        "Adafactor keeps step, row_var, col_var of every parameter, but a checkpoint holds only the step"
    )
    assert ranks[1][f"{engine}, Adafactor"] == message

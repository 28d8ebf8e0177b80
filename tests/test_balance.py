"""The layers of a pipeline's parts: as even as whole layers allow, by counted operations."""

import itertools

import pytest

from xlme_ds.config import EngineConfig, ModelConfig, ObjectiveConfig
from xlme_ds.counting import flops_of
from xlme_ds.models.pipeline import Flops, describe_balance, part_costs, pipeline_balance, process_costs
from xlme_ds.objectives.electra import ElectraObjective
from xlme_ds.recipes import RECIPES
from xlme_ds.validate import validate

MODEL = ModelConfig(vocabulary=5000, width=64, heads=4, feed_forward=256, generator_layers=2, discriminator_layers=9)


def counted(model: ModelConfig) -> tuple[Flops, bool]:
    return ElectraObjective(ObjectiveConfig()).flops(model, 128), model.activation_checkpointing


def splits(layers: int, parts: int) -> list[tuple[int, ...]]:
    """Every way to give all parts but the first a layer at least."""
    return [s for s in itertools.product(range(layers + 1), repeat=parts) if sum(s) == layers and min(s[1:]) >= 1]


@pytest.mark.parametrize("vocabulary", [100, 5000, 100_000])
@pytest.mark.parametrize("schedule, stages", [("1f1b", 2), ("1f1b", 3), ("1f1b", 4), ("dualpipev", 2)])
def test_no_other_split_has_a_cheaper_busiest_process(vocabulary: int, schedule: str, stages: int) -> None:
    model = ModelConfig(**{**MODEL.__dict__, "vocabulary": vocabulary})
    engine = EngineConfig("pipeline", pipeline_stages=stages, pipeline_schedule=schedule)  # type: ignore[arg-type]

    def busiest(balance: tuple[int, ...]) -> float:
        flops, checkpointing = counted(model)
        return max(process_costs(part_costs(flops, balance, checkpointing), stages))

    ours = pipeline_balance(engine, *counted(model))
    assert sum(ours) == model.discriminator_layers
    best = min(busiest(split) for split in splits(model.discriminator_layers, engine.pipeline_parts))
    assert busiest(ours) == pytest.approx(best)


def test_costs_of_parts_by_hand() -> None:
    """Forward 1, backward 2; layers under checkpointing and the softmax of a masked head do their forward twice."""
    flops = Flops(3, 1, 10, 100, 1000, head=10_000, first_pass_layer=0.5, first_pass_softmax=50)
    assert part_costs(flops, (1, 2), False) == [3 + 0.5 + 30 + 400, 6 + 1 + 4000 + 30_000 + 50]
    assert part_costs(flops, (1, 2), True) == [4 + 0.5 + 40 + 400, 8 + 1 + 4000 + 30_000 + 50]
    assert process_costs([1, 10, 100, 1000], 2) == [1 + 1000, 10 + 100]  # DualPipeV: the parts go to and fro


def test_the_softmax_counts() -> None:
    engine = EngineConfig("pipeline", pipeline_stages=2)
    small, large = (
        pipeline_balance(engine, *counted(ModelConfig(**{**MODEL.__dict__, "vocabulary": v}))) for v in (100, 5000)
    )
    assert large[0] < small[0]


def test_a_given_balance_stands() -> None:
    engine = EngineConfig("pipeline", pipeline_stages=2, balance=(8, 1))
    assert pipeline_balance(engine, *counted(MODEL)) == (8, 1)
    line = describe_balance(engine, *counted(MODEL))
    assert "embedding, generator, layers 0-7 (" in line and "| layer 8 (" in line


@pytest.mark.parametrize(
    ("schedule", "balance", "processes"),
    [
        ("1f1b", (2, 4), "embedding, layers 0-1 (33%) | layers 2-5 (67%)"),
        ("1f1b", (0, 6), "embedding (0%) | layers 0-5 (100%)"),
        ("dualpipev", (1, 1, 1, 3), "embedding, layer 0, layers 3-5 (67%) | layer 1, layer 2 (33%)"),
    ],
)
def test_the_share_of_a_process_is_that_of_all_its_parts(
    schedule: str, balance: tuple[int, ...], processes: str
) -> None:
    engine = EngineConfig("pipeline", pipeline_schedule=schedule, balance=balance)  # type: ignore[arg-type]
    line = describe_balance(engine, Flops(layers=6, one_layer=5.0), False)
    assert line == f"pipeline ({schedule}), share of the operations: {processes}"
    with_generator = Flops(layers=6, one_layer=1.0, generator=6.0)
    assert "embedding, generator, layers 0-1 (67%) |" in describe_balance(
        EngineConfig("pipeline", balance=(2, 4)), with_generator, True
    )


@pytest.mark.parametrize("name", [name for name, run in RECIPES.items() if run.engine.kind == "pipeline"])
def test_recipes_are_balanced(name: str) -> None:
    run = validate(RECIPES[name])
    flops = flops_of(run, run.model.max_positions)
    balance = pipeline_balance(run.engine, flops, run.model.activation_checkpointing)
    costs = part_costs(flops, balance, run.model.activation_checkpointing)
    assert max(costs) < 1.15 * sum(costs) / len(costs)


@pytest.mark.parametrize(
    "engine, fault",
    [
        (dict(pipeline_stages=1), "at least 2"),
        (dict(pipeline_stages=11), "use fewer stages"),
        (dict(pipeline_stages=6, pipeline_schedule="dualpipev"), "12 parts"),
        (dict(balance=(4, 5, 0)), "2 numbers"),
        (dict(balance=(9, 0)), "leaves a part empty"),
        (dict(balance=(4, 4)), "adds up to 8"),
        (dict(kind="deepspeed", balance=(4, 5)), "leave it empty"),
    ],
)
def test_impossible_pipelines_are_refused(engine: dict[str, object], fault: str) -> None:
    from xlme_ds.config import RunConfig

    with pytest.raises(ValueError, match=fault):
        validate(RunConfig("test", model=MODEL, engine=EngineConfig(**{"kind": "pipeline"} | engine)))  # type: ignore[arg-type]

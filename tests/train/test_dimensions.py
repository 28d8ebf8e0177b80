"""In how many dimensions token states vary: against singular values, in the records, and the warning of a collapse."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.engine.worker import tiny
from tests.rows import write_data
from xlme_ds.config import TrainConfig
from xlme_ds.data.loader import Loader
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.engine import Engine, StepStats
from xlme_ds.models.attention import attention_bias
from xlme_ds.models.encoder import Encoder
from xlme_ds.train.console import Console
from xlme_ds.train.loop import Dimensions
from xlme_ds.train.records import MetricsLog


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("objective", ["electra", "mlm"])
def test_they_are_the_entropy_of_the_singular_values(tmp_path: Path, objective: str, norm: str) -> None:
    """Of the states that `Encoder.hidden_states` gives for what the first encoder reads, without padding."""
    folder = write_data(tmp_path, rows=5)
    config = tiny({"kind": "plain"}, 8, objective=objective, norm=norm)
    loaders = [Loader(folder, config.data, config.seed, 0.15) for _ in range(2)]
    engine = build_engine(config, *loaders, None)
    which = "discriminator" if objective == "electra" else "encoder"
    encoder = getattr(engine.module, which)
    assert isinstance(encoder, Encoder)
    read: list[torch.Tensor] = []
    encoder.layers["0"].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].detach()))
    found = engine.effective_ranks(3)
    batch = loaders[1].first_rows(3)
    assert len(batch.tokens_BT) == 6 and bool((batch.segments_BT == 0).any()), "some padding must be left out"
    states = [read[0]]
    with torch.no_grad():
        distances = encoder.bias_by_distance(batch.tokens_BT.shape[1])
        bias = attention_bias(config.model, batch.segments_BT, distances, torch.float32)
        for layer in encoder.layers.values():
            states.append(layer(states[-1], bias))
        if encoder.output_norm is not None:
            states[-1] = encoder.output_norm(states[-1])
    expected = []
    for state_BTD in states:
        x_ND = state_BTD[batch.segments_BT > 0].double().numpy()
        shares = np.linalg.svd(x_ND - x_ND.mean(0), compute_uv=False) ** 2
        shares = shares[shares > 1e-12 * shares[0]] / shares.sum()
        expected.append(np.exp(-(shares * np.log(shares)).sum()))
    assert found == pytest.approx(expected, rel=1e-4)
    assert not any(layer._forward_hooks for layer in encoder.layers.values()), "nothing stays in the model"


def dimensions_of(run: Path, engine: Engine, train: TrainConfig, start: int, began_at: int) -> Dimensions:
    return Dimensions(engine, train, began_at, Console(9, 0, None), [MetricsLog(run, "dimensions", start)])


def test_a_collapse_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the run resumes before the collapse, and after it was told; 8 rows of each task are read."""
    folder = write_data(tmp_path, rows=12)
    config = tiny({"kind": "plain"}, 8, steps=9)
    train = replace(config.train, eval_every=3)
    stats = StepStats({}, 1.0, 1e-3)
    engine = build_engine(config, *(Loader(folder, config.data, config.seed, 0.15) for _ in range(2)), None)
    for steps in (range(1, 4), range(4, 7), range(7, 10)):
        watching = dimensions_of(tmp_path, engine, train, steps[0] - 1, 0)
        for step in steps:
            if step > 3:  # all but one number of the last layer's states becomes the same for every token
                with torch.no_grad():
                    engine.module.get_parameter("discriminator.layers.2.feed_forward_norm.weight")[1:] = 0.0
            watching.after_step(step, stats)
        watching.close(steps[-1])
    told = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in told if "dimensions by layer" in line] == [
        f"step {n}/9" for n in (1, 3, 6, 9)
    ]
    warned = [line for line in told if "collapse" in line]
    assert len(warned) == 1 and warned[0].startswith("WARNING: step 6: ")
    assert "in 1.0 dimensions; at the start they varied in 2" in warned[0]
    lines = [json.loads(line) for line in (tmp_path / "dimensions.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3, 6, 9] and lines[-1]["layer_3"] == 1.0
    assert list(lines[-1].values())[1:] == pytest.approx(engine.effective_ranks(8), abs=0.006)
    events = EventAccumulator(str(tmp_path / "tensorboard/dimensions")).Reload().Scalars("layer_3")
    assert [(each.step, pytest.approx(each.value)) for each in events] == [(e["step"], e["layer_3"]) for e in lines]
    (tmp_path / "branch").mkdir()
    branch = dimensions_of(tmp_path / "branch", engine, replace(train, steps=11), 7, 7)
    for step in range(8, 12):
        branch.after_step(step, stats)
    branch.close(11)
    written = (tmp_path / "branch" / "dimensions.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in written] == [8, 9, 11], "the first step of a branch, too, and the last"
    (tmp_path / "dimensions.jsonl").write_text('{"step": 1}\n{"step": 3, "layer_0": 9.0, "layer_1": 50.0}\n')
    watching = dimensions_of(tmp_path, engine, train, 9, 0)  # at step 1 they were not finite
    told = [watching._new_warning({"step": 6, "layer_0": 9.0, "layer_1": last}) != "" for last in (5.0, 4.99, 1.0)]
    assert told == [False, True, False], "below a tenth of the first"
    (tmp_path / "new").mkdir()
    watching = dimensions_of(tmp_path / "new", engine, train, 0, 0)
    told = [watching._new_warning({"step": 1, "layer_1": last}) != "" for last in (float("nan"), 50.0, 4.99)]
    assert told == [False, False, True], "a first value that is no number is not the one to compare with"
    (tmp_path / "dimensions.jsonl").write_text('{"step": 1}\n{"step": 3, "layer_0": null}\n')
    with pytest.raises(ValueError, match=r"dimensions\.jsonl has no dimensions of step 3: restore or remove"):
        dimensions_of(tmp_path, engine, train, 9, 0)

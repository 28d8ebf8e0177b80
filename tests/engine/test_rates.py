"""A learning rate of its own for the discriminator: of one step of AdamW, against its formula."""

from pathlib import Path

import pytest
import torch

from tests.engine.worker import tiny
from tests.rows import write_data
from xlme_ds.data.loader import Loader
from xlme_ds.engine.build import build_engine

RATE, FACTOR = 1e-2, 0.25


@pytest.mark.parametrize("objective", ["electra", "all_tokens", "corrective"])
def test_what_only_the_discriminator_has_takes_smaller_steps(tmp_path: Path, objective: str) -> None:
    """Adam's first step is the rate times g / (|g| + ε); matrices also lose the rate times the decay."""
    sharing = "tied" if objective == "all_tokens" else "gdes"
    config = tiny({"kind": "plain"}, 8, objective=objective, discriminator_rate=FACTOR, embedding_sharing=sharing)
    engine = build_engine(config, Loader(write_data(tmp_path, rows=16), config.data, config.seed, 0.15), None)
    before = engine.full_state()
    stats = engine.train_batch(0, RATE, detailed=False)
    assert stats.learning_rate == RATE
    after, theirs = engine.full_state(), set()
    for name, parameter in engine.named_parameters():
        moment = engine.optimizer.state[parameter]["exp_avg"] / (1 - config.optimizer.beta1)
        own = name.split(".")[0] in ("discriminator", "replaced_head", "token_head") or name.startswith("difference_")
        theirs |= {own}
        rate = RATE * (FACTOR if own else 1.0)
        decay = config.optimizer.weight_decay if parameter.dim() >= 2 else 0.0
        expected = before[name] * (1 - rate * decay) - rate * moment / (moment.abs() + config.optimizer.epsilon)
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-7, msg=name)
    assert theirs == {True, False}

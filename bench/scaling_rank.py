"""One rank of a measured training step: for every line of standard input a step, or an all-reduce of so many bytes.

Answers with the seconds of the whole and of every collective in it, and the resident memory that the model took.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu_rows import SyntheticSource
from bench.head_memory import memory
from xlme_ds.config import DataConfig, EngineConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier")


@dataclass(frozen=True)
class Case:
    """A model and its rows: as many of text as of pairs."""

    layers: int = 4
    """Of the discriminator; the generator has a quarter of them."""
    width: int = 256
    tokens: int = 256
    """Of a row."""
    vocabulary: int = 16_000
    positions: int = 2048
    """Of a step and process."""
    world: int = 1

    @property
    def run(self) -> RunConfig:
        """Its configuration, ZeRO-1 in bf16."""
        model = ModelConfig(
            vocabulary=self.vocabulary, width=self.width, heads=max(self.width // 64, 1), feed_forward=4 * self.width,
            generator_layers=max(self.layers // 4, 1), discriminator_layers=self.layers, max_positions=self.tokens,
        )  # fmt: skip
        rows = self.positions // self.tokens // 2
        return RunConfig(
            "scaling", model=model, data=DataConfig(rows * self.world, rows * self.world, micro_batch=rows),
            engine=EngineConfig(deepspeed="zero1", precision="bf16"), optimizer=OptimizerConfig(warmup_steps=1),
            train=TrainConfig(steps=10),
        ).validate()  # fmt: skip

    def words(self) -> list[str]:
        """As an argument of this program."""
        return ["-m", "bench.scaling_rank", json.dumps(asdict(self))]


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """`function`, which returns when it is done, with its time noted."""

    def noted(*arguments: Any, **settings: Any) -> Any:
        begin = time.perf_counter()
        result = function(*arguments, **settings)
        seconds.append(time.perf_counter() - begin)
        return result

    return noted


def main() -> None:
    """Answer until the end of standard input."""
    answers = os.fdopen(os.dup(1), "w")  # what libraries print goes elsewhere
    os.dup2(2, 1)
    from xlme_ds.engine.build import build_engine
    from xlme_ds.engine.ranks import start_process_group

    case = Case(**json.loads(sys.argv[1]))
    start_process_group(case.run.engine)
    before = memory("VmRSS")
    # All ranks read the same rows: what they are is of no matter here.
    alone = DataConfig(case.run.data.micro_batch, case.run.data.micro_batch, case.run.data.micro_batch)
    source = SyntheticSource(RunConfig("rows", model=case.run.model, data=alone), case.tokens)
    engine = build_engine(case.run, source, None)  # type: ignore[arg-type]
    seconds: list[float] = []
    for name in COLLECTIVES:
        setattr(dist, name, timed(getattr(dist, name), seconds))
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        seconds.clear()
        begin = time.perf_counter()
        if asked is None:
            engine.train_batch(0, 1e-4, detailed=False)
        else:
            dist.all_reduce(torch.zeros(asked // 2, dtype=torch.bfloat16))
        whole = time.perf_counter() - begin
        print(
            json.dumps({"s": whole, "collectives": list(seconds), "memory": memory("VmHWM") - before}),
            file=answers,
            flush=True,
        )


if __name__ == "__main__":
    main()

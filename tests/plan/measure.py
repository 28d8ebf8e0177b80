"""One rank that measures what real engines allocate and send in a training step. Run by test_memory.py.

Every allocation and release is reported by torch's profiler, so the figures are exact and the same every time.
"""

import contextlib
import gc
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xlme_ds.config import DataConfig, EngineConfig, ModelConfig, ObjectiveConfig, RunConfig
from xlme_ds.data.loader import Loader
from xlme_ds.engine.build import build_engine
from xlme_ds.engine.ranks import start_process_group
from xlme_ds.objectives import objective_of
from xlme_ds.translate import model as translation_model
from xlme_ds.validate import validate

STEPS = 3  # the optimizer makes its moments in the first; a single process, without gloo, takes one fewer


def run_config(case: dict[str, Any]) -> RunConfig:
    """The run of a case: {engine, data, model}, each the settings of that section, and the name of the objective."""
    sections = EngineConfig(**case["engine"]), DataConfig(*case["data"]), ModelConfig(**case["model"])
    name = case["objective"]
    shares = dict(
        mask_fraction=1.0 if name in ("clm", "mt") else 0.15, pseudo_fractions=(0.1, 0.2) if name == "btmlm" else ()
    )
    objective = ObjectiveConfig(name, **shares, **{term: tuple(points) for term, points in case["terms"].items()})
    run = RunConfig("measured", engine=sections[0], data=sections[1], model=sections[2], objective=objective)
    return validate(run)


class Traffic(TorchDispatchMode):
    """Bytes of every kind of collective, counted whole: of a gather what comes out, of a scatter what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it if it is a collective."""
        kind = func.name().removeprefix("c10d::")
        if kind != func.name():
            operands = [arg for arg in tree_leaves(args[:2]) if isinstance(arg, torch.Tensor)]
            size = max((tensor.nbytes for tensor in operands), default=0)
            if kind in ("allreduce_", "send"):
                size = sum(tensor.nbytes for tensor in operands)
            self.bytes[kind] = self.bytes.get(kind, 0) + size
        return func(*args, **(kwargs or {}))


Allocation = tuple[int, int, int, tuple[str, ...]]


def allocations(roots: list[Any]) -> list[Allocation]:
    """(time, address, bytes, names of what was running) of every allocation and release by time, releases negative.

    What gloo allocates for a collective has no bytes: NCCL needs nothing of the kind.
    """
    found = []
    waiting: list[tuple[Any, tuple[str, ...], bool]] = [(root, (), False) for root in reversed(roots)]
    while waiting:
        event, above, in_gloo = waiting.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, 0 if in_gloo else fields.alloc_size, above))
        elif children := event.children:
            name = event.name
            below, in_gloo = (*above, name), in_gloo or name.startswith("c10d::")
            waiting += [(child, below, in_gloo) for child in reversed(children)]
    return sorted(found, key=lambda one: one[0])


def peak(found: list[Allocation], parts: Sequence[str]) -> dict[str, Any]:
    """The most bytes alive at once while each of `parts` ran, of those allocated since the start, and what they were:
    of the part that has the fewest."""
    alive: dict[int, tuple[int, tuple[str, ...]]] = {}

    def bytes_more(address: int, size: int, above: tuple[str, ...]) -> int:
        # A release by a thread of gloo's goes unreported: the address given out again tells of it.
        released = alive.pop(address, (0, ()))[0]
        if size <= 0:
            return -released
        alive[address] = size, above
        return size - released

    now, most = 0, {part: (0, 0, ("",)) for part in parts}  # bytes, allocations until then, what ran
    for number, (_, address, size, above) in enumerate(found, start=1):
        now += bytes_more(address, size, above)
        if above and above[0] in most and now > most[above[0]][0]:
            most[above[0]] = now, number, above
    size, end, running = min(most.values())
    alive.clear()
    for _, address, allocated, above in found[:end]:
        bytes_more(address, allocated, above)
    kinds: dict[str, int] = {}
    for allocated, above in alive.values():
        key = " > ".join(above[:1] + above[-3:])
        kinds[key] = kinds.get(key, 0) + allocated
    return {"peak": size, "running": " > ".join(running[-3:]), "kinds": kinds}


def measure(case: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Peak bytes of the last steps of a case, and what several processes send in one more."""
    config, steps = run_config(case), STEPS - (world == 1)
    replicas = world // config.engine.processes_per_replica
    gc.enable()
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage six times while it builds an engine
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        with record_function("build"), contextlib.redirect_stdout(io.StringIO()):
            objective, languages = config.objective, config.model.language_embeddings
            drawn = (
                config.seed,
                objective.mask_fraction,
                rank % replicas,
                replicas,
                languages,
                objective_of(objective),
            )
            loader = Loader(Path(case["folder"]), config.data, *drawn)
            engine = build_engine(config, loader, None)
            gc.collect()
        for step in range(steps):
            with record_function(f"step {step}"):
                engine.train_batch(step, 1e-3, True)
    with Traffic() as traffic:  # not in the measured step: passing through Python, tensors live a little longer
        if world > 1:
            engine.train_batch(steps, 1e-3, True)
    gc.disable()  # it would look through the records of the profiler, hundreds of thousands, again and again
    tree = profiled.profiler.kineto_results.experimental_event_tree()
    found = allocations(tree)
    # Of the steps the lowest: what a thread of gloo's released, and nobody took up again, counts in some of them.
    return peak(found, [f"step {step}" for step in range(1, steps)]) | {"bytes": traffic.bytes}


def main(cases: Path, out: Path) -> None:
    torch.set_num_threads(1)
    # an untrained model writes as much as it may
    translation_model.max_translation_tokens = lambda source_tokens: source_tokens
    found = {}
    for name, case in json.loads(cases.read_text()).items():
        rank, world = start_process_group(run_config(case).engine)
        found[name] = measure(case, rank, world)
        gc.collect()
    out.with_suffix(f".{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

"""The plan of a run as one dictionary: what the command prints."""

from typing import Any

from ..config import RunConfig
from ..counting import (
    count_parameters,
    flops_per_step,
    paper_forward_per_token,
    paper_training_flops,
    parameter_sizes,
    work_of,
)
from ..objectives import described, objective_of
from .communication import communication
from .hardware import GPU, GPUS
from .search import RESERVED, Candidate, candidate, search
from .speed import HOST, LINK_EFFICIENCY, UTILISATION

ACCOUNTING = (
    "discriminator = its encoder and head with the token embeddings, the figure that the paper publishes (279M, 840M, 2.2B; "
    "a vocabulary of 500K is taken as 2^19 = 524,288); generator = its encoder and masked head without the embedding it "
    "shares; trained_total counts every parameter once"
)
ACCOUNTING_OF_ONE = "encoder = it and its masked head with the token embeddings, which the head shares"
PAPER = (
    "as in the paper's Table 4: matrix products, backward = forward, no vocabulary softmax, 2^20 tokens taken as 1.0e6, "
    "pairs taken as half"
)
STANDARD = "matrix products, backward = 2 × forward, vocabulary softmax at the masked tokens, every token of every row"


def plan(
    run: RunConfig,
    gpus: int | None = None,
    gpu: GPU = GPUS["a100-80g"],
    utilisation: float = UTILISATION,
    layouts: int = 10,
) -> dict[str, Any]:
    """What `run` costs on rows of `model.max_positions` tokens, and the `layouts` best ways to run it.

    `gpus` is by default as few as hold one copy of the model. Raises ValueError where `run` is not legal on that many.
    """
    gpus = run.engine.processes_per_replica if gpus is None else gpus
    row_tokens = run.model.max_positions
    own = candidate(run, gpus, gpu, utilisation, row_tokens)
    ranked = search(run, gpus, gpu, utilisation, row_tokens)
    return {
        "recipe": run.name,
        "accounting": ACCOUNTING_OF_ONE if len(objective_of(run.objective).encoders) == 1 else ACCOUNTING,
        "objective": described(run.objective),
        "parameters": count_parameters(run) | {"components": components(run)},
        "tokens": {"per_row": row_tokens} | _tokens(run, row_tokens),
        "flops": operations(run, row_tokens),
        "hardware": {
            "gpus": gpus,
            "gpu": gpu.name,
            "memory_gib": gpu.memory_gib,
            "peak_tflops": gpu.tflops,
            "precision": gpu.precision,
            "source": gpu.source,
        },
        "assumptions": {
            "utilisation": utilisation,
            "link_efficiency": LINK_EFFICIENCY,
            "memory_reserved": RESERVED,
            "host_bytes_per_s": HOST,
        },
        **costs(own),
        "layouts": [costs(one) for one in ranked[:layouts]],
        "layouts_that_fit": len(ranked),
    }


def costs(of: Candidate) -> dict[str, Any]:
    """What a layout costs, rounded for people."""
    return {
        "settings": of.flags(),
        "rows_per_micro_batch": of.layout.rows,
        "accumulation": of.layout.accumulation,
        "memory_per_gpu_gib": {kind: round(size, 3) for kind, size in of.memory.gib().items()},
        "fullest_at": of.moment,
        "fits": of.fits,
        "communication_bytes_per_step": {
            kind: value if isinstance(value, bool) else round(value)
            for kind, value in communication(of.layout).as_dict().items()
        },
        "seconds_per_step": {
            kind: round(getattr(of.speed, kind), 4) for kind in ("compute", "bubble", "transfer", "offload", "step")
        },
        "tokens_per_s": round(of.speed.tokens_per_s),
        "tokens_per_s_per_gpu": round(of.speed.tokens_per_s / of.layout.gpus),
        "of_peak": round(of.speed.of_peak, 4),
        "days": round(of.speed.days, 2),
    }


def _tokens(run: RunConfig, row_tokens: int) -> dict[str, int]:
    mono, para = (int(rows * row_tokens * run.train.steps) for rows in run.data.mean_rows)
    return {"mono": mono, "para": para}


def operations(run: RunConfig, row_tokens: int) -> dict[str, Any]:
    """Floating-point operations of the whole run, by both conventions."""
    work = work_of(run, row_tokens)
    mono, para = (work.training * count for count in _tokens(run, row_tokens).values())
    return {
        "forward_per_token": work.forward,
        "per_step": flops_per_step(run, row_tokens),
        "standard": {"accounting": STANDARD, "mono": mono, "both": mono + para, "both_para_half": mono + para / 2},
        "paper_convention": {
            "accounting": PAPER,
            "forward_per_token": paper_forward_per_token(run, row_tokens),
            **paper_training_flops(run, row_tokens),
        },
    }


def components(run: RunConfig) -> dict[str, int]:
    """Parameters of every part of the model, in the order of the model; they add up to all."""
    sums: dict[str, int] = {}
    for name, size in parameter_sizes(run.objective, run.model).items():
        parts = name.split(".")
        if len(parts) == 1:
            key = parts[0].rsplit("_", 1)[0]  # the blocks of one table
        elif parts[0] in objective_of(run.objective).encoders:
            key = f"{parts[0]}.{parts[1]}"
        else:
            key = parts[0]
        sums[key] = sums.get(key, 0) + size
    return sums

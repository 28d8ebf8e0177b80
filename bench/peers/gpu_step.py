"""Other libraries' training steps of base size and ours on one GPU, in turns: Hugging Face's ELECTRA with SDPA and
logits at masked positions alone, the same compiled, and ModernBERT, whose generator does not exist, for scale."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu.steps import Device, Figures, built, run_config
from bench.step import HuggingFaceStep
from xlme_ds.config import ModelConfig, RunConfig


class MaskedPositions(HuggingFaceStep):
    """ELECTRA by Hugging Face's modules; logits at the masked positions alone."""

    def _build(self, cfg: ModelConfig) -> nn.Module:
        built = super()._build(cfg)
        self.generator.generator_lm_head.weight = self.generator.electra.embeddings.word_embeddings.weight
        return built

    def _generate(self, masked_BT: Tensor) -> tuple[Tensor, Tensor]:
        chosen_M = self.batch.masked_M
        hidden_MD = self.generator.electra(masked_BT).last_hidden_state.flatten(0, 1)[chosen_M]
        logits_MV = self.generator.generator_lm_head(self.generator.generator_predictions(hidden_MD))
        return logits_MV, F.cross_entropy(logits_MV.float(), self.batch.tokens_BT.flatten()[chosen_M])


class Compiled(MaskedPositions):
    """The same, with both encoders compiled."""

    def _build(self, cfg: ModelConfig) -> nn.Module:
        built = super()._build(cfg)
        for encoder in (self.generator.electra, self.discriminator.electra):
            encoder.compile()
        return built


class ModernBert(HuggingFaceStep):
    """ModernBERT's masked language model in its own size but for tests; logits at the masked positions alone."""

    def _build(self, cfg: ModelConfig) -> nn.Module:
        from transformers import ModernBertConfig, ModernBertForMaskedLM

        small: Any = {} if cfg.width == 768 else {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        settings = ModernBertConfig(attn_implementation="sdpa", sparse_prediction=True, **small)
        return ModernBertForMaskedLM(settings)

    def loss(self) -> Tensor:
        """Masked language modelling of the same rows, with ids of its own vocabulary."""
        ids_BT = self.batch.tokens_BT % 50_000
        masked_BT = ids_BT.flatten().index_fill(0, self.batch.masked_M, 50_284).view_as(ids_BT)
        labels_BT = torch.full_like(ids_BT, -100).flatten()
        labels_BT = labels_BT.index_copy(0, self.batch.masked_M, ids_BT.flatten()[self.batch.masked_M]).view_as(ids_BT)
        loss: Tensor = self.model(input_ids=masked_BT, labels=labels_BT).loss
        return loss


PEERS = {
    "Hugging Face's ELECTRA": MaskedPositions, "the same, compiled": Compiled, "ModernBERT, no generator": ModernBert,
}  # fmt: skip


def peers(device: Device, engine: str, rounds: int, quick: bool, seconds: float) -> Iterator[Figures]:
    """tokens/s of ours and each peer, one step of each in turn; what does not fit or fails says so, and the others go
    on."""
    torch.set_float32_matmul_precision("high")
    deadline = time.monotonic() + seconds
    micro_batch = 1 if quick else 32
    ours = run_config("base_zero1", 2 * micro_batch, micro_batch, quick)
    theirs = run_config("base_zero1", micro_batch, micro_batch, quick)

    def engine_step() -> Callable[[], object]:
        trained = built(ours, device, engine)
        return lambda: trained.train_batch(0, 1e-4, detailed=False)

    makers: dict[str, Callable[[], Callable[[], object]]] = {"ours, by default": engine_step}
    makers |= {name: lambda kind=kind: kind(theirs, device.torch).step for name, kind in PEERS.items()}  # type: ignore[misc]
    steps: dict[str, Callable[[], object]] = {}
    for name, make in makers.items():
        try:
            steps[name] = make()
            device.seconds(steps[name], rounds=1)  # compiles
        except Exception as error:
            steps.pop(name, None)
            yield {"step": name, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(2 * rounds):
        if turn and time.monotonic() > deadline:
            break
        for name, run in steps.items():
            turns[name].append(device.seconds(run, rounds=1, warm_up=0))
    rates = {name: _tokens(ours if name not in PEERS else theirs) / statistics.median(of) for name, of in turns.items()}
    for name, rate in rates.items():
        tokens = _tokens(ours if name not in PEERS else theirs)
        own = next(iter(rates.values()))
        yield {"step": name, "tokens_per_s": rate, "slowest": tokens / max(turns[name]), "ours_is_faster": own / rate}


def _tokens(run: RunConfig) -> int:
    return (run.data.mono_rows + run.data.para_rows) * run.model.max_positions

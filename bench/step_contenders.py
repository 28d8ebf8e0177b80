"""The training steps that `bench.step` compares: ours, one written with Hugging Face transformers, one with plain
torch.

All train generator and discriminator of one shape on the same rows, in bf16 with float32 master weights and AdamW.
B rows, T tokens, M masked positions, V vocabulary.
"""

import time
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu_rows import SyntheticSource
from xlme_ds.config import ModelConfig, RunConfig
from xlme_ds.data.batch import Batch

RATE = 1e-4


class Ours:
    """The engine of the run, DeepSpeed's ZeRO-1 on one process; notes what share of the passes the generator takes."""

    def __init__(self, run: RunConfig):
        from xlme_ds.engine.build import build_engine
        from xlme_ds.engine.ranks import start_process_group

        start_process_group(run.engine)
        source: Any = SyntheticSource(run, run.model.max_positions)
        self.engine: Any = build_engine(run, source, None)
        self.generator_share = 0.0
        self._times: list[float] = []
        self._watch(self.engine.engine.module)

    def _watch(self, model: Any) -> None:
        """Note when forward begins, is through with the generator, when backward is through with the discriminator, and
        ends."""
        embed, backward = model.embed_for_discriminator, self.engine._backward

        def note(*_: object) -> None:
            self._times.append(time.perf_counter())

        def embedded(ids_BT: Tensor) -> Tensor:
            note()
            found: Tensor = embed(ids_BT)
            found.register_hook(note)  # autograd goes back over the discriminator first, which came last
            return found

        def back(loss: Tensor) -> None:
            backward(loss)
            note()

        model.register_forward_pre_hook(note)
        model.embed_for_discriminator, self.engine._backward = embedded, back

    def step(self) -> None:
        """One optimizer step."""
        self._times.clear()
        self.engine.train_batch(0, RATE, detailed=False)
        begin, generated, discriminated, end = self._times
        self.generator_share = (generated - begin + end - discriminated) / (end - begin)


class Loop(ABC):
    """The customary loop: weights in float32, bf16 by autocast, torch's fused AdamW; λ and clipping as in the run."""

    def __init__(self, run: RunConfig):
        self.run = run
        self.batch: Batch = SyntheticSource(run, run.model.max_positions).batches[0]
        self.model = self.build(run.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.01, fused=True)

    @abstractmethod
    def build(self, cfg: ModelConfig) -> nn.Module:
        """Both networks, initialised."""

    @abstractmethod
    def loss(self, batch: Batch, masked_BT: Tensor) -> Tensor:
        """Generator's loss plus λ times the discriminator's; `masked_BT` has <mask> in place."""

    def step(self) -> None:
        """One optimizer step on all rows at once."""
        ids_BT = self.batch.tokens_BT
        masked_BT = ids_BT.flatten().index_fill(0, self.batch.masked_M, self.run.model.vocabulary - 1).view_as(ids_BT)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(self.batch, masked_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def discriminator_loss(self, logits_BT: Tensor, replaced_BT: Tensor) -> Tensor:
        """λ times the mean over all tokens."""
        weight = self.run.objective.discriminator_weight
        return weight * F.binary_cross_entropy_with_logits(logits_BT.float(), replaced_BT.float())


class HuggingFace(Loop):
    """`ElectraForMaskedLM` and `ElectraForPreTraining` with one embedding; its rows attend over their whole length."""

    def build(self, cfg: ModelConfig) -> nn.Module:
        """Both networks, initialised."""
        from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

        def settings(layers: int) -> Any:
            return ElectraConfig(
                vocab_size=cfg.vocabulary, embedding_size=cfg.width, hidden_size=cfg.width, num_hidden_layers=layers,
                num_attention_heads=cfg.heads, intermediate_size=cfg.feed_forward,
                max_position_embeddings=cfg.max_positions, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )  # fmt: skip

        self.generator = ElectraForMaskedLM(settings(cfg.generator_layers))
        self.discriminator = ElectraForPreTraining(settings(cfg.discriminator_layers))
        self.discriminator.electra.embeddings = self.generator.electra.embeddings
        return nn.ModuleList([self.generator, self.discriminator])

    def loss(self, batch: Batch, masked_BT: Tensor) -> Tensor:
        """Logits of all positions, as the library gives them; labels of −100 leave out the ones that are not masked."""
        ids_BT, chosen_M = batch.tokens_BT, batch.masked_M
        labels_BT = torch.full_like(ids_BT, -100).flatten().index_copy(0, chosen_M, ids_BT.flatten()[chosen_M])
        out = self.generator(input_ids=masked_BT, labels=labels_BT.view_as(ids_BT))
        with torch.no_grad():
            probabilities_MV = out.logits.flatten(0, 1)[chosen_M].float().softmax(-1)
            sample_M = torch.multinomial(probabilities_MV, 1).squeeze(1)
        corrupted_BT = ids_BT.flatten().index_copy(0, chosen_M, sample_M).view_as(ids_BT)
        logits_BT = self.discriminator(input_ids=corrupted_BT).logits
        return out.loss + self.discriminator_loss(logits_BT, corrupted_BT != ids_BT)


class PlainTorch(Loop):
    """`nn.TransformerEncoder` twice; logits at the masked positions only, all at once."""

    def build(self, cfg: ModelConfig) -> nn.Module:
        """Both networks, initialised."""

        def encoder(layers: int) -> nn.Module:
            layer = nn.TransformerEncoderLayer(
                cfg.width, cfg.heads, cfg.feed_forward, dropout=0.0, activation="gelu", batch_first=True
            )
            return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

        self.tokens, self.places = nn.Embedding(cfg.vocabulary, cfg.width), nn.Embedding(cfg.max_positions, cfg.width)
        self.generator, self.discriminator = encoder(cfg.generator_layers), encoder(cfg.discriminator_layers)
        self.features = nn.Sequential(nn.Linear(cfg.width, cfg.width), nn.GELU(), nn.LayerNorm(cfg.width))
        self.decision = nn.Sequential(nn.Linear(cfg.width, cfg.width), nn.GELU(), nn.Linear(cfg.width, 1))
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=cfg.init_std)
        parts = self.tokens, self.places, self.generator, self.discriminator, self.features, self.decision
        return nn.ModuleList(parts)

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Tokens and positions."""
        return self.tokens(ids_BT) + self.places.weight[: ids_BT.shape[1]]

    def loss(self, batch: Batch, masked_BT: Tensor) -> Tensor:
        """Generator's loss plus λ times the discriminator's."""
        ids_BT, chosen_M = batch.tokens_BT, batch.masked_M
        hidden_MD = self.generator(self.embed(masked_BT)).flatten(0, 1)[chosen_M]
        logits_MV = self.features(hidden_MD) @ self.tokens.weight.t()
        with torch.no_grad():
            sample_M = torch.multinomial(logits_MV.float().softmax(-1), 1).squeeze(1)
        corrupted_BT = ids_BT.flatten().index_copy(0, chosen_M, sample_M).view_as(ids_BT)
        logits_BT = self.decision(self.discriminator(self.embed(corrupted_BT))).squeeze(-1)
        generator = F.cross_entropy(logits_MV.float(), ids_BT.flatten()[chosen_M])
        return generator + self.discriminator_loss(logits_BT, corrupted_BT != ids_BT)


class MatrixProduct:
    """A bf16 product of 4096 x 4096 x 4096, whose rate stands for the peak."""

    def __init__(self, run: RunConfig):
        self.a, self.b = (torch.randn(4096, 4096).bfloat16() for _ in range(2))

    def step(self) -> None:
        """One product."""
        torch.mm(self.a, self.b)


CONTENDERS: dict[str, Any] = {
    "ours": Ours,
    "huggingface": HuggingFace,
    "plain_torch": PlainTorch,
    "matmul": MatrixProduct,
}

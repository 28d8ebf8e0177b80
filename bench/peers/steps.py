"""Training steps of other libraries: Hugging Face's ELECTRA and ModernBERT, and a Transformer of plain torch.

B rows, T tokens, M masked positions, D width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.synthetic import SyntheticSource
from xlme_ds.config import ModelConfig, RunConfig

RATE = 1e-4
CPU = torch.device("cpu")


class PeerStep:
    """The customary training step, with float32 weights, bf16 by autocast, and torch's fused AdamW. `run` sets the
    weight λ of the discriminator's loss and the limit of the gradient norm.

    A subclass has three methods: `_build` builds the networks with initial weights; `_generate`, from ids [B, T] with
    <mask> at the masked positions, returns (logits [M, V] of these positions, the generator's loss); `_discriminate`
    returns the discriminator's logits [B, T].
    """

    def __init__(self, run: RunConfig, device: torch.device = CPU):
        self.run, self.device = run, device
        self.batch = SyntheticSource(run, run.model.max_positions).batches[0].to(device)
        with device:
            self.model = self._build(run.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.01, fused=True)

    def loss(self) -> Tensor:
        """The generator's loss plus λ times the discriminator's loss."""
        ids_BT, chosen_M = self.batch.tokens_BT, self.batch.masked_M
        masked_BT = ids_BT.flatten().index_fill(0, chosen_M, self.run.model.vocabulary - 1).view_as(ids_BT)
        logits_MV, loss = self._generate(masked_BT)
        with torch.no_grad():
            sample_M = torch.multinomial(logits_MV.float().softmax(-1), 1).squeeze(1)
        corrupted_BT = ids_BT.flatten().index_copy(0, chosen_M, sample_M).view_as(ids_BT)
        logits_BT, replaced_BT = self._discriminate(corrupted_BT), corrupted_BT != ids_BT
        weight = self.run.objective.discriminator_weight
        return loss + weight * F.binary_cross_entropy_with_logits(logits_BT.float(), replaced_BT.float())

    def step(self) -> None:
        """Take an optimizer step on all rows of `batch` at once."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.run.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def electra_networks(cfg: ModelConfig, **settings: Any) -> tuple[Any, Any]:
    """transformers' generator and discriminator without dropout; both, and the generator's head, have one token
    embedding. `settings` are transformers'."""
    from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

    networks = []
    layers_of = {ElectraForMaskedLM: cfg.generator_layers, ElectraForPreTraining: cfg.discriminator_layers}
    for network, layers in layers_of.items():
        config = ElectraConfig(
            vocab_size=cfg.vocabulary, embedding_size=cfg.width, hidden_size=cfg.width, num_hidden_layers=layers,
            num_attention_heads=cfg.heads, intermediate_size=cfg.feed_forward,
            max_position_embeddings=cfg.max_positions, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            **settings,
        )  # fmt: skip
        networks.append(network(config))
    generator, discriminator = networks
    table = generator.electra.embeddings.word_embeddings.weight
    generator.generator_lm_head.weight = table
    discriminator.electra.embeddings.word_embeddings.weight = table
    return generator, discriminator


class HuggingFaceStep(PeerStep):
    """`ElectraForMaskedLM` and `ElectraForPreTraining`, with one embedding for both. A token attends to its whole row,
    and the library computes the logits of all positions."""

    def _build(self, cfg: ModelConfig) -> nn.Module:
        self.generator, self.discriminator = electra_networks(cfg)
        self.discriminator.electra.embeddings = self.generator.electra.embeddings
        return nn.ModuleList([self.generator, self.discriminator])

    def _generate(self, masked_BT: Tensor) -> tuple[Tensor, Tensor]:
        chosen_M, ids = self.batch.masked_M, self.batch.tokens_BT.flatten()
        labels_BT = torch.full_like(ids, -100).index_copy(0, chosen_M, ids[chosen_M]).view_as(masked_BT)
        out = self.generator(input_ids=masked_BT, labels=labels_BT)
        return out.logits.flatten(0, 1)[chosen_M], out.loss

    def _discriminate(self, ids_BT: Tensor) -> Tensor:
        return self.discriminator(input_ids=ids_BT).logits


class MaskedPositions(HuggingFaceStep):
    """Hugging Face's ELECTRA with logits only at the masked positions."""

    def _generate(self, masked_BT: Tensor) -> tuple[Tensor, Tensor]:
        chosen_M = self.batch.masked_M
        hidden_MD = self.generator.electra(masked_BT).last_hidden_state.flatten(0, 1)[chosen_M]
        logits_MV = self.generator.generator_lm_head(self.generator.generator_predictions(hidden_MD))
        return logits_MV, F.cross_entropy(logits_MV.float(), self.batch.tokens_BT.flatten()[chosen_M])


class Compiled(MaskedPositions):
    """`MaskedPositions` with both encoders compiled."""

    def _build(self, cfg: ModelConfig) -> nn.Module:
        networks = super()._build(cfg)
        for encoder in (self.generator.electra, self.discriminator.electra):
            encoder.compile()
        return networks


class ModernBert(HuggingFaceStep):
    """ModernBERT's masked language model: one network instead of two, with logits only at the masked positions."""

    def _build(self, cfg: ModelConfig) -> nn.Module:
        from transformers import ModernBertConfig, ModernBertForMaskedLM

        small: Any = {} if cfg.width == 768 else {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        settings = ModernBertConfig(attn_implementation="sdpa", sparse_prediction=True, **small)
        self.mask_id = settings.vocab_size - 1  # serves as <mask>; `loss` makes all other ids smaller
        return ModernBertForMaskedLM(settings)

    def loss(self) -> Tensor:
        """The loss of masked language modelling. Our ids are taken modulo `mask_id`, to fit ModernBERT's vocabulary."""
        ids, chosen_M = self.batch.tokens_BT.flatten() % self.mask_id, self.batch.masked_M
        masked = ids.index_fill(0, chosen_M, self.mask_id)
        labels = torch.full_like(ids, -100).index_copy(0, chosen_M, ids[chosen_M])
        shape = self.batch.tokens_BT.shape
        return self.model(input_ids=masked.view(shape), labels=labels.view(shape)).loss


class PlainTorchStep(PeerStep):
    """Two `nn.TransformerEncoder`. One matrix product gives the generator's logits, at the masked positions only."""

    def _build(self, cfg: ModelConfig) -> nn.Module:
        def encoder(layers: int) -> nn.Module:
            layer = nn.TransformerEncoderLayer(
                cfg.width, cfg.heads, cfg.feed_forward, dropout=0.0, activation="gelu", batch_first=True
            )
            return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

        self.tokens = nn.Embedding(cfg.vocabulary, cfg.width)
        self.positions = nn.Embedding(cfg.max_positions, cfg.width)
        self.generator, self.discriminator = encoder(cfg.generator_layers), encoder(cfg.discriminator_layers)
        self.features = nn.Sequential(nn.Linear(cfg.width, cfg.width), nn.GELU(), nn.LayerNorm(cfg.width))
        self.decision = nn.Sequential(nn.Linear(cfg.width, cfg.width), nn.GELU(), nn.Linear(cfg.width, 1))
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=cfg.init_std)
        parts = self.tokens, self.positions, self.generator, self.discriminator, self.features, self.decision
        return nn.ModuleList(parts)

    def _embed(self, ids_BT: Tensor) -> Tensor:
        return self.tokens(ids_BT) + self.positions.weight[: ids_BT.shape[1]]

    def _generate(self, masked_BT: Tensor) -> tuple[Tensor, Tensor]:
        chosen_M = self.batch.masked_M
        hidden_MD = self.generator(self._embed(masked_BT)).flatten(0, 1)[chosen_M]
        logits_MV = self.features(hidden_MD) @ self.tokens.weight.t()
        return logits_MV, F.cross_entropy(logits_MV.float(), self.batch.tokens_BT.flatten()[chosen_M])

    def _discriminate(self, ids_BT: Tensor) -> Tensor:
        return self.decision(self.discriminator(self._embed(ids_BT))).squeeze(-1)

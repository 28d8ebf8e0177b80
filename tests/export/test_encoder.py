"""An exported model computes what ours computes: encoder, heads, gradients, and after another round through the
disk."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from tests.small import encoder_of, language_model, lively, model, usual_batch
from xlme_ds.config import ModelConfig
from xlme_ds.data.schema import LAYOUTS
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.export.exported_folder import ExportedModel, write_folder
from xlme_ds.models.electra import Electra
from xlme_ds.models.text_encoder import languages_of, positions_and_segments
from xlme_ds.trained.encoders import load_encoder
from xlme_ds.trained.exports import EXPORTED_SETTINGS, read_heads
from xlme_ds.trained.runs import split_vocabulary_tables

TOKENS = torch.tensor([[0, 11, 12, 13, 17, 19, 2], [0, 21, 2, 1, 1, 1, 1], [0, 31, 32, 33, 34, 2, 1]])
SETTINGS: list[dict[str, Any]] = [
    {},
    {"norm": "pre", "relative_bias": "plain"},
    {"norm": "pre", "embedding_norm": True, "absolute_positions": False, "vocabulary_blocks": 3},
    {"relative_bias": "none", "embedding_sharing": "gdes"},
    {"absolute_positions": False, "embedding_sharing": "gdes", "vocabulary_blocks": 3},
]


def export(to: Path, vocabulary: Vocabulary, **changes: object) -> Electra:
    """A small lively model, exported to `to`."""
    whole = model(vocabulary=vocabulary.size, **changes)
    state = whole.state_dict()
    generator = ExportedModel(encoder_of(whole, "generator"), "XLMEForMaskedLM", state)
    write_folder(to, ExportedModel(encoder_of(whole), "XLMEForPreTraining", state), vocabulary, "", generator)
    return whole


def test_the_head_and_norms_of_xlm(vocabulary: Vocabulary, tmp_path: Path) -> None:
    """Embedding and bias on the last hidden states, whose norms have another epsilon; read by ours and by
    transformers."""
    changes = dict(norm_epsilon=1e-12, masked_head="linear", relative_bias="none")
    whole = language_model(vocabulary=vocabulary.size, **changes)
    exported = ExportedModel(encoder_of(whole, "encoder"), "XLMEForMaskedLM", whole.state_dict())
    write_folder(tmp_path / "x", exported, vocabulary, "")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert (config["layer_norm_eps"], config["masked_head"]) == (1e-12, "linear")
    back = load_encoder(tmp_path / "x").encoder
    assert (back.cfg.norm_epsilon, back.cfg.masked_head) == (1e-12, "linear")
    expected = back(TOKENS, *positions_and_segments(TOKENS)) @ whole.embedding_0.t() + whole.masked_head.bias
    found = load(AutoModelForMaskedLM, tmp_path / "x")
    torch.testing.assert_close(found(TOKENS).logits, expected, rtol=0, atol=1e-5)
    assert {one.eps for one in found.modules() if isinstance(one, torch.nn.LayerNorm)} == {1e-12}


def load(auto: Any, folder: Path, **settings: object) -> Any:
    return auto.from_pretrained(folder, trust_remote_code=True, **settings)


@pytest.fixture(scope="module")
def whole_and_folder(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> tuple[Electra, Path]:
    folder = tmp_path_factory.mktemp("export") / "folder"
    return export(folder, vocabulary, embedding_sharing="gdes"), folder


@pytest.fixture
def folder(whole_and_folder: tuple[Electra, Path]) -> Path:
    return whole_and_folder[1]


def test_languages_and_positions_that_restart(vocabulary: Vocabulary, tmp_path: Path) -> None:
    """XLM: texts and pairs in its layout, each side with its language's embedding."""
    codes = ("fr", "de", "en")
    whole = export(
        tmp_path / "x", vocabulary, layout="xlm", language_embeddings=codes, relative_bias="none", dropout=0.1
    )
    ours, theirs, tokenizer = encoder_of(whole), load(AutoModel, tmp_path / "x"), load(AutoTokenizer, tmp_path / "x")
    first, second = (vocabulary.encode(text) for text in ("Ein Text.", "One text."))
    sides = [(first, second), (second, None)]
    tokens = torch.ones(2, max(len(LAYOUTS["xlm"].item(*each)) for each in sides), dtype=torch.long)
    for row, each in zip(tokens, sides, strict=True):
        made = torch.from_numpy(LAYOUTS["xlm"].item(*each)).long()
        row[: len(made)] = made
    assert tokenizer("Ein Text.", "One text.")["input_ids"] == tokens[0].tolist()
    assert tokenizer("One text.")["input_ids"] == [each for each in tokens[1].tolist() if each != 1]
    languages = languages_of(ours.cfg, [("de", "en"), ("en",)], tokens)
    expected = ours(tokens, *positions_and_segments(tokens), languages)
    torch.testing.assert_close(theirs(tokens, language_ids=languages)[0], expected, rtol=0, atol=1e-5)
    assert theirs.config.languages == list(codes)

    alone = tokens[1:, : int((tokens[1] != 1).sum())]
    expected = ours(alone, *positions_and_segments(alone), torch.full_like(alone, 2))
    named = load(AutoModel, tmp_path / "x", language="en")
    for found in (named(alone)[0], theirs(alone, language_ids=torch.tensor([2]))[0]):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    sentences = SentenceTransformer(
        str(tmp_path / "x"), device="cpu", trust_remote_code=True, config_kwargs={"language": "en"}
    )
    vectors = sentences.encode(["One text."], convert_to_tensor=True)
    torch.testing.assert_close(vectors, expected.mean(1), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"give language_ids, or set config.language to one of fr de en"):
        theirs(alone)
    with pytest.raises(ValueError, match="give input_ids or position_ids"):
        named(inputs_embeds=torch.zeros(1, 3, ours.cfg.width))
    pair = tokens[:1]
    padded, expected_pair = F.pad(pair, (2, 0), value=1), theirs(pair, language_ids=torch.tensor([1]))[0]
    on_the_left = theirs(padded, language_ids=torch.tensor([1]))[0][:, 2:]
    torch.testing.assert_close(on_the_left, expected_pair, rtol=0, atol=1e-5)

    back = load_encoder(tmp_path / "x").encoder
    assert (back.cfg.layout, back.cfg.language_embeddings) == ("xlm", codes)
    assert torch.equal(back(alone, *positions_and_segments(alone), torch.full_like(alone, 2)), expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("changes", SETTINGS)
def test_hidden_states_are_ours(
    vocabulary: Vocabulary, tmp_path: Path, changes: dict[str, Any], attention: str
) -> None:
    whole = export(tmp_path / "x", vocabulary, **changes)
    for which, path in (("discriminator", tmp_path / "x"), ("generator", tmp_path / "x" / "generator")):
        theirs = load(AutoModel, path, attn_implementation=attention)
        assert theirs.config._attn_implementation == attention and not theirs.training
        ours = encoder_of(whole, which)  # type: ignore[arg-type]
        expected = ours.hidden_states(TOKENS, *positions_and_segments(TOKENS))
        for mask in (None, (TOKENS != 1).long()):
            found = theirs(TOKENS, mask, output_hidden_states=True)
            assert len(found.hidden_states) == len(expected) == ours.cfg.discriminator_layers + 1
            for state, wanted in zip(found.hidden_states, expected, strict=True):
                torch.testing.assert_close(state, wanted, rtol=0, atol=1e-5)
            torch.testing.assert_close(found.last_hidden_state, expected[-1], rtol=0, atol=1e-5)


def test_heads_are_ours_also_in_packed_rows(whole_and_folder: tuple[Electra, Path]) -> None:
    whole, folder = whole_and_folder
    batch = usual_batch()
    places = {"attention_mask": batch.segments_BT, "position_ids": batch.positions_BT}
    expected = whole(batch)
    found = load(AutoModelForPreTraining, folder)(expected.corrupted_BT, **places)
    torch.testing.assert_close(found.logits, expected.replaced_logits_BT, rtol=0, atol=1e-5)

    masked_BT = (
        batch.tokens_BT.flatten().index_fill(0, batch.masked_M, whole.cfg.vocabulary - 1).view_as(batch.tokens_BT)
    )
    for generator in (
        load(AutoModelForMaskedLM, folder / "generator"),
        load(AutoModelForMaskedLM, folder, subfolder="generator"),
    ):
        logits_MV = generator(masked_BT, **places).logits.flatten(0, 1)[batch.masked_M]
        nll_M = F.cross_entropy(logits_MV, batch.tokens_BT.flatten()[batch.masked_M], reduction="none")
        torch.testing.assert_close(nll_M, expected.nll_M, rtol=0, atol=1e-4)


def test_padding_on_the_left_changes_nothing(folder: Path) -> None:
    encoder = load(AutoModel, folder)
    row = torch.tensor([[0, 11, 12, 2]])
    left, right = F.pad(row, (3, 0), value=1), F.pad(row, (0, 3), value=1)
    torch.testing.assert_close(encoder(left)[0][:, 3:], encoder(right)[0][:, :4], rtol=0, atol=1e-5)
    torch.testing.assert_close(encoder(row)[0], encoder(right)[0][:, :4], rtol=0, atol=1e-5)
    embedded = encoder.get_input_embeddings()(row)
    torch.testing.assert_close(encoder(inputs_embeds=embedded)[0], encoder(row)[0], rtol=0, atol=0)


def test_attention_weights(folder: Path) -> None:
    found = load(AutoModel, folder)(TOKENS, output_attentions=True)
    assert [tuple(w.shape) for w in found.attentions] == [(3, 3, 7, 7)] * 2
    torch.testing.assert_close(found.attentions[0].sum(-1), torch.ones(3, 3, 7))
    assert found.attentions[0][1, :, 0, 3:].abs().max() == 0  # a token sees no padding
    torch.testing.assert_close(found[0], load(AutoModel, folder)(TOKENS)[0], rtol=0, atol=1e-5)


def gradients(loaded: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    loaded.train()
    loaded(**inputs).loss.backward()
    return {name: parameter.grad for name, parameter in loaded.named_parameters()}


TASKS: list[tuple[Any, str, dict[str, Tensor]]] = [
    (AutoModelForPreTraining, "", {"labels": (TOKENS % 2 == 0).long()}),
    (AutoModelForMaskedLM, "generator", {"labels": torch.where(TOKENS % 2 == 0, TOKENS, -100)}),
    (AutoModelForTokenClassification, "", {"labels": torch.where(TOKENS > 1, TOKENS % 3, -100)}),
    (AutoModelForSequenceClassification, "", {"labels": torch.tensor([0, 2, 1])}),
    (
        AutoModelForQuestionAnswering,
        "",
        {"start_positions": torch.tensor([1, 1, 2]), "end_positions": torch.tensor([2, 99, 3])},
    ),
]


@pytest.mark.parametrize("auto, part, labels", TASKS)
def test_gradient_reaches_every_parameter(folder: Path, auto: Any, part: str, labels: dict[str, Tensor]) -> None:
    inputs = {"input_ids": TOKENS, "attention_mask": (TOKENS != 1).long()} | labels
    settings: dict[str, Any] = {} if part or auto is AutoModelForPreTraining else {"num_labels": 3}
    by_kernel = []
    for attention in ("sdpa", "eager"):
        loaded = load(auto, folder / part, attn_implementation=attention, **settings)
        if settings:  # the head is new: the same one for both
            lively(loaded.head)
        by_kernel.append(gradients(loaded, inputs))
    if auto is AutoModelForQuestionAnswering:  # what is the same at all positions is nothing to a softmax over them
        for name in ("head.output.bias", "xlme.encoder.layers.1.feed_forward_norm.bias"):
            del by_kernel[0][name]
    for name, gradient in by_kernel[0].items():
        assert gradient is not None and gradient.abs().max() > 0, name
        scale = gradient.abs().max().item()
        torch.testing.assert_close(gradient, by_kernel[1][name], rtol=0, atol=1e-4 * scale)
    loaded.zero_grad()
    loaded.gradient_checkpointing_enable()
    assert loaded.is_gradient_checkpointing
    for name, gradient in gradients(loaded, inputs).items():
        torch.testing.assert_close(gradient, by_kernel[1][name], rtol=1e-5, atol=1e-6)


def test_losses(folder: Path) -> None:
    labels = torch.tensor([[0, 1, 0, 1, 0, 1, 0]] * 3)
    for mask in (None, (TOKENS != 1).long()):
        found = load(AutoModelForPreTraining, folder)(TOKENS, mask, labels)
        wanted = F.binary_cross_entropy_with_logits(found.logits, labels.float(), reduction="none")[TOKENS != 1].mean()
        torch.testing.assert_close(found.loss, wanted)
    regression = load(AutoModelForSequenceClassification, folder, num_labels=1)
    found = regression(TOKENS, labels=torch.tensor([0.5, -1.0, 2.0]))
    torch.testing.assert_close(found.loss, ((found.logits[:, 0] - torch.tensor([0.5, -1.0, 2.0])) ** 2).mean())
    answers = load(AutoModelForQuestionAnswering, folder)
    found = answers(TOKENS, start_positions=torch.tensor([1, 1, 2]), end_positions=torch.tensor([2, 99, 3]))
    starts = F.log_softmax(found.start_logits, -1)[torch.arange(3), torch.tensor([1, 1, 2])]
    ends = F.log_softmax(found.end_logits, -1)[torch.tensor([0, 2]), torch.tensor([2, 3])]
    torch.testing.assert_close(found.loss, -(starts.mean() + ends.mean()) / 2)


SCORES = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
# Settings, labels, and the loss written out for every number.
PROBLEMS: list[tuple[dict[str, Any], Tensor, Any]] = [
    ({"num_labels": 1}, SCORES[:, 0].long(), lambda x: (x - SCORES[:, :1]) ** 2),
    ({"num_labels": 1}, SCORES[:, :1], lambda x: (x - SCORES[:, :1]) ** 2),
    ({"num_labels": 2, "problem_type": "regression"}, SCORES, lambda x: (x - SCORES) ** 2),
    (
        {"num_labels": 2, "problem_type": "multi_label_classification"},
        SCORES.long(),
        lambda x: -torch.where(SCORES == 1, x.sigmoid(), 1 - x.sigmoid()).log(),
    ),
    ({"num_labels": 2}, SCORES, lambda x: -torch.where(SCORES == 1, x.sigmoid(), 1 - x.sigmoid()).log()),
    ({"num_labels": 2}, torch.tensor([1, 0, 1]), lambda x: -x.log_softmax(-1)[torch.arange(3), [1, 0, 1]]),
    (
        {"num_labels": 1, "problem_type": "multi_label_classification"},
        SCORES[:, :1],
        lambda x: -torch.where(SCORES[:, :1] == 1, x.sigmoid(), 1 - x.sigmoid()).log(),
    ),
]


@pytest.mark.parametrize(("settings", "labels", "loss"), PROBLEMS)
def test_problem_type_chooses_the_loss(folder: Path, settings: dict[str, Any], labels: Tensor, loss: Any) -> None:
    found = load(AutoModelForSequenceClassification, folder, **settings)(TOKENS, labels=labels)
    torch.testing.assert_close(found.loss, loss(found.logits).mean())
    found.loss.backward()


@pytest.mark.parametrize("part", ["", "generator"])
@pytest.mark.parametrize("change", [5, -7])
def test_the_vocabulary_may_be_resized(folder: Path, tmp_path: Path, part: str, change: int) -> None:
    """Old tokens keep their logits, through the disk too; new ones have some near the mean of the old."""
    auto = AutoModelForMaskedLM if part else AutoModelForPreTraining
    loaded = load(auto, folder / part)
    before, size = loaded(TOKENS).logits, loaded.config.vocab_size
    mask = loaded.config.mask_token_id
    loaded.resize_token_embeddings(size + change)
    loaded.save_pretrained(tmp_path / "resized")
    for found in (loaded, load(auto, tmp_path / "resized")):
        after = found(TOKENS, labels=TOKENS if part else None).logits
        kept = min(size, size + change) if part else None
        torch.testing.assert_close(after[..., :kept], before[..., :kept], rtol=0, atol=1e-5)
        assert found.config.vocab_size == size + change and found.config.mask_token_id == mask
        if part:
            assert after.shape[-1] == size + change
            if change > 0:
                torch.testing.assert_close(after[..., size:].mean(), before.mean(), rtol=0, atol=0.5)
                bias = found.masked_head.bias
                torch.testing.assert_close(bias[size:], bias[:size].mean().expand(change), rtol=0, atol=1e-6)


def test_dropout_is_a_setting(folder: Path) -> None:
    plain = load(AutoModel, folder).train()
    torch.testing.assert_close(plain(TOKENS)[0], plain(TOKENS)[0], rtol=0, atol=0)
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        dropping = load(AutoModel, folder, **{name: 0.5}).train()
        assert (dropping(TOKENS)[0] - dropping(TOKENS)[0]).abs().max() > 0.1, name
        dropping.eval()
        torch.testing.assert_close(dropping(TOKENS)[0], plain(TOKENS)[0], rtol=0, atol=0)
    eager = load(AutoModel, folder, attn_implementation="eager", attention_probs_dropout_prob=0.5).train()
    assert (eager(TOKENS)[0] - eager(TOKENS)[0]).abs().max() > 0.1
    # At rate 1 nothing is left of the embeddings, nor of what attention and feed-forward network of a layer add.
    nothing = load(AutoModel, folder, hidden_dropout_prob=1.0).train()
    states = nothing(TOKENS, output_hidden_states=True).hidden_states
    assert not states[0].any() and states[1].any()
    for layer, before, after in zip(nothing.encoder.layers, states, states[1:], strict=False):
        torch.testing.assert_close(after, layer.feed_forward_norm(layer.attention_norm(before)), rtol=0, atol=1e-6)


def test_the_heads_dropout_is_the_classifiers(folder: Path) -> None:
    """`classifier_dropout` where it is set, that of the layers where it is not."""
    for auto in (AutoModelForTokenClassification, AutoModelForSequenceClassification, AutoModelForQuestionAnswering):
        for settings, rate in (
            ({"classifier_dropout": 0.5}, 0.5),
            ({"classifier_dropout": 0.0, "hidden_dropout_prob": 0.5}, 0.0),
            ({"hidden_dropout_prob": 0.5}, 0.5),
        ):
            assert load(auto, folder, **settings).head.dropout.p == rate, (auto, settings)


def test_through_the_disk_once_more(
    whole_and_folder: tuple[Electra, Path], tmp_path: Path, vocabulary: Vocabulary
) -> None:
    whole, folder = whole_and_folder
    ours = encoder_of(whole)
    for auto in (AutoModel, AutoModelForPreTraining):  # the first saves names without a prefix
        target = tmp_path / auto.__name__
        loaded = load(auto, folder)
        loaded.save_pretrained(target)
        again = load(auto, target)
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in again.state_dict().items())
        # Products depend on where in memory the weights lie, which differs between two files.
        torch.testing.assert_close(again(TOKENS)[0], loaded(TOKENS)[0], rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match=r"has no sentencepiece\.bpe\.model: copy it from the folder"):
            load_encoder(target)
        (target / "sentencepiece.bpe.model").write_bytes(vocabulary.path.read_bytes())
        for path in (folder, target):
            read = load_encoder(path)
            assert read.vocabulary.sha256 == vocabulary.sha256
            assert all(torch.equal(value, read.encoder.state_dict()[name]) for name, value in ours.state_dict().items())
    generator = load_encoder(folder, "generator").encoder
    expected = encoder_of(whole, "generator").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in generator.state_dict().items())


def test_what_was_saved_in_shards_is_read(folder: Path, tmp_path: Path) -> None:
    loaded = load(AutoModelForPreTraining, folder)
    loaded.save_pretrained(tmp_path / "saved", max_shard_size="8KB")
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 2
    shutil.copy(folder / "sentencepiece.bpe.model", tmp_path / "saved")
    expected = load_encoder(folder).encoder.state_dict()
    found = load_encoder(tmp_path / "saved").encoder.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert read_heads(tmp_path / "saved").keys() == read_heads(folder).keys() != set()


def test_a_resized_vocabulary_is_refused_by_ours(folder: Path, tmp_path: Path) -> None:
    loaded = load(AutoModel, folder)
    size = loaded.config.vocab_size
    loaded.resize_token_embeddings(size + 8)
    loaded.save_pretrained(tmp_path / "saved")
    shutil.copy(folder / "sentencepiece.bpe.model", tmp_path / "saved")
    with pytest.raises(ValueError, match=rf"{size + 8} tokens, its vocabulary {size}: call resize_token_embeddings"):
        load_encoder(tmp_path / "saved")


def test_new_weights_follow_the_scheme(folder: Path) -> None:
    config = load(AutoModel, folder).config
    config.hidden_size, config.vocab_size, config.initializer_range = 240, 5000, 0.07  # no default
    config.relative_buckets = 64  # of the 24 numbers of 8 one draw in 1,500 deviates as much as is refused here
    for auto in (AutoModelForPreTraining, AutoModelForMaskedLM):
        code = load(auto, folder if auto is AutoModelForPreTraining else folder / "generator").__class__
        for name, parameter in code(config).named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "bias":
                assert (parameter == 0).all(), name
            elif leaf == "scale" or (leaf == "weight" and parameter.dim() == 1):
                assert (parameter == 1).all(), name
            else:
                assert parameter.std().item() == pytest.approx(0.07, rel=0.5), name


def test_bfloat16(folder: Path) -> None:
    expected = load(AutoModel, folder)(TOKENS)[0]
    for attention in ("sdpa", "eager"):
        half = load(AutoModel, folder, dtype=torch.bfloat16, attn_implementation=attention)(TOKENS)[0]
        assert half.dtype == torch.bfloat16
        assert F.cosine_similarity(half.float(), expected, dim=-1).min() > 0.99


def test_tuple_and_wrong_inputs(folder: Path) -> None:
    encoder = load(AutoModel, folder)
    assert torch.equal(encoder(TOKENS, return_dict=False)[0], encoder(TOKENS).last_hidden_state)
    with pytest.raises(ValueError, match="give either input_ids or inputs_embeds"):
        encoder()


def test_tables_take_the_number_of_blocks_that_the_settings_name() -> None:
    tables = {"embedding_": torch.arange(40.0).view(10, 4), "difference_": torch.arange(40.0, 80.0).view(10, 4)}
    two = {f"{name}{n}": block for name, table in tables.items() for n, block in enumerate(table.split(5))}
    three = split_vocabulary_tables(two, ModelConfig(vocabulary=10, vocabulary_blocks=3))
    assert len(three) == 6
    for name, table in tables.items():
        assert torch.equal(torch.cat([three[f"{name}{n}"] for n in range(3)]), table)


def test_every_setting_of_the_model_is_exported_or_is_none_of_an_encoder() -> None:
    others = {
        "generator_layers",
        "decoder",
        "decoder_layers",
        "embedding_sharing",
        "vocabulary_blocks",
        "kernels",
        "head_chunk",
        "activation_checkpointing",
    }
    others |= {"dropout", "attention_dropout", "compile"}  # of training alone
    others |= {"body", "local_window", "global_every", "rotary_base", "local_rotary_base"}  # of ModernBERT's form
    assert {field.name for field in fields(ModelConfig)} == EXPORTED_SETTINGS.keys() | others

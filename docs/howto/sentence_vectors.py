"""Train an export on translation pairs for sentence vectors, with sentence-transformers."""

import shutil
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss

english, other = [], []  # line n of X.en-de.en is translated by line n of X.en-de.de
for path in sorted(Path("pairs").glob("*.*-*.en")):  # X.de-en.en as well
    code = path.stem.rpartition(".")[2].removeprefix("en-").removesuffix("-en")
    for side, lines in ((path, english), (path.with_suffix(f".{code}"), other)):
        lines += side.read_text(encoding="utf-8").removesuffix("\n").split("\n")

model = SentenceTransformer("exports/base", trust_remote_code=True)
longest, model.max_seq_length = model.max_seq_length, 48  # tokens; longer ones are cut while it trains
settings = SentenceTransformerTrainingArguments(
    "exports/sentences",
    max_steps=300,
    warmup_steps=30,
    per_device_train_batch_size=64,
    learning_rate=1e-3,
    batch_sampler="no_duplicates",
    logging_steps=10,
    save_strategy="no",
    report_to="none",
)
pairs = Dataset.from_dict({"anchor": english, "positive": other})
trainer = SentenceTransformerTrainer(model, settings, pairs, loss=MultipleNegativesRankingLoss(model))
trainer.train()
model.max_seq_length = longest
model.save_pretrained("exports/sentences")
shutil.copy("exports/base/sentencepiece.bpe.model", "exports/sentences")  # so that xlme reads the folder, too

"""Remove near duplicates from text/<lang>/*.jsonl.gz (two files a language) with datatrove: deduplicated/<lang>/."""

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers.jsonl import JsonlWriter

FILES = 2  # of each language: a task each


def remove_near_duplicates(text: str, language: str, work: str, out: str) -> None:
    """Run MinHash over the documents in `text` and write those that stay to `out`."""
    config = MinhashConfig()  # 14 buckets of 8 hashes of 5-grams: documents that share about three quarters of them
    reader = JsonlReader(text)
    stages = [
        ([reader, MinhashDedupSignature(f"{work}/signatures", config, language)], FILES),
        ([MinhashDedupBuckets(f"{work}/signatures", f"{work}/buckets", config=config)], config.num_buckets),
        ([MinhashDedupCluster(f"{work}/buckets", f"{work}/remove", config)], 1),
        ([reader, MinhashDedupFilter(f"{work}/remove"), JsonlWriter(out)], FILES),
    ]
    for pipeline, tasks in stages:
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=2).run()


if __name__ == "__main__":
    for code, language in (("de", "deu_Latn"), ("fi", "fin_Latn"), ("sw", "swh_Latn")):
        remove_near_duplicates(f"text/{code}", language, f"work/{code}", f"deduplicated/{code}")

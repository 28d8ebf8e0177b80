"""What a start at a row in the middle costs, in a process of its own: `python -m bench.loader_resume FOLDER
ROWS_A_TASK`."""

import json
import sys
import time
from pathlib import Path

from bench.head_memory import memory
from xlme_ds.config import DataConfig
from xlme_ds.data.loader import Loader


def resume(folder: Path, a_task: int) -> dict[str, float]:
    """Seconds until the loader is there and until its first batch is, and MiB that both added to the process."""
    data = DataConfig(a_task, a_task, a_task)
    before = memory("VmRSS")
    begin = time.perf_counter()
    loader = Loader(folder, data, seed=1, mask_fraction=0.15)
    constructed, held = time.perf_counter(), memory("VmRSS")
    step = min(store.rows for store in loader.stores.values()) // 2 // a_task
    (batch,) = loader.step(step)
    end = time.perf_counter()
    return {
        "construct_s": constructed - begin,
        "first_batch_s": end - begin,
        "construct_mib": (held - before) / 2**20,
        "peak_mib": (memory("VmHWM") - before) / 2**20,
        "shards": sum(len(store.manifest.shards) for store in loader.stores.values()),
        "gigabytes": sum(shard.bytes for store in loader.stores.values() for shard in store.manifest.shards) / 1e9,
        "step": step,
        "tokens": int(batch.tokens_BT.sum()),
    }


if __name__ == "__main__":
    print(json.dumps(resume(Path(sys.argv[1]), int(sys.argv[2]))))

"""Cost of a recipe and ways to run it, before anything runs: parameters, operations, memory, communication, days.

    python -m xlme_ds.plan --recipe xl_zero3 --gpus 64 --gpu a100-80g [--json] [--utilisation 0.4] [--section.key value
    ...]

The model is built on the meta device, so the largest one takes no memory either. Speed is an estimate from counted
operations and bytes; no figure of it was measured.
"""

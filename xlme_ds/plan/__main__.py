"""python -m xlme_ds.plan."""

from .command import main

main()

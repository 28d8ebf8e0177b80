"""The code that travels with an exported model. It needs torch and transformers, and nothing else of this package.

It repeats the formulas of the encoder in `xlme_ds/models`; the tests in tests/export compare the two.
"""

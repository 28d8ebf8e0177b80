"""The code that travels with an exported model: torch and transformers alone, and nothing else of this package.

It has the encoder's formulas a second time (`xlme_ds/models` is the first); tests/export compares the two.
"""

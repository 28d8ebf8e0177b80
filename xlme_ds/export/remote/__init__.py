"""The code that travels with an exported model: torch and transformers alone, and nothing else of this package.

It says the encoder's formulas a second time (`xlme_ds/models` is the first); tests/export holds the two together.
"""

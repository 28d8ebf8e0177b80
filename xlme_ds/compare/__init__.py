"""Systems trained to the same number of operations, scored, and set side by side."""

"""Systems trained to the same number of operations, scored on the way, and set side by side."""

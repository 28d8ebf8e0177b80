"""Compare systems that were trained with the same number of operations."""

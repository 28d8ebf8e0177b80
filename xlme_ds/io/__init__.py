"""Files, folders and their errors, for both packages; needs no library but Python's own."""

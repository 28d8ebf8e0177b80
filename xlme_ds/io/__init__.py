"""Files, folders and their errors, for xlme_ds and data_prep. Needs only the standard library."""

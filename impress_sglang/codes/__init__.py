"""KVs in few bits: in groups of tokens (`groups`), or as rows by a basis of the model (`rows`)."""

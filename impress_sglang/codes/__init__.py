"""KVs in few bits: in planes (`planes`), or as rows by a basis of the model (`rows`)."""

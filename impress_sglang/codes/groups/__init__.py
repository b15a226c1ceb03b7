"""KVs in few bits without a basis: coded in groups of tokens, and restored into slots."""

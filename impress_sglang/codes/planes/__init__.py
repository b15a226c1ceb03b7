"""KVs in a few bits: coded in planes, restored into slots, and raised there."""

"""The SSD tier: segment files, their index, reads and writes."""

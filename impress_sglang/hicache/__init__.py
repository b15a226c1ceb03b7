"""Pages of SGLang's HiCache on SSD: a storage backend for servers that keep HiCache."""

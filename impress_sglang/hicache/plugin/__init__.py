"""The storage backend that SGLang's HiCache calls."""

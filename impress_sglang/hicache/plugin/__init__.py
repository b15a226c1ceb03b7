"""What SGLang's HiCache calls."""

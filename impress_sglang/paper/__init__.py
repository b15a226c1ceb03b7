"""A request whose prefix is loaded while its layers are computed, for the modes of the paper."""

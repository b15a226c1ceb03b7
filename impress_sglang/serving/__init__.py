"""Serve a request from the store: admit, load, save; knows nothing of SGLang."""

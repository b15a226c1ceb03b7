"""Requests whose prefixes are loaded while their layers are computed, for the paper's modes."""

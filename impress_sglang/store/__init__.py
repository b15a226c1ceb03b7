"""Prefix KV management (PKM): which prefixes are stored, found again, and given up."""

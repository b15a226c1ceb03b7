"""Prefix KV management (PKM): stores, matches and evicts prefixes."""

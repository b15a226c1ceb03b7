"""Attention over the rows that a request really has; no storage, no selection."""

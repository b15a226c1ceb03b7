"""Policies of the store, compared on one trace."""

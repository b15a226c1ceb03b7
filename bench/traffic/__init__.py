"""Loads in the midst of other requests, in this clone and in others."""

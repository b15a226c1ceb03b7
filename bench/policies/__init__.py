"""Policies compared."""

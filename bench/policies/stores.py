"""Which stores the policies read."""

from __future__ import annotations

# Stores differ by whether they have probe heads; each is written by a policy that reads it.
STORED_BY = {"codes": "as", "paper": "paper"}


def store_kind(policy: str) -> str:
    """A key of `STORED_BY`."""
    return "paper" if policy.startswith("paper") else "codes"

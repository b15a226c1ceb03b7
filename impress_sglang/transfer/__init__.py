"""From storage to attention: what to read for a layer, and reading it."""

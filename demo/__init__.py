"""Small real model for demonstrations and tests without a model hub."""

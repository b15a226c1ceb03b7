"""Benchmarks; each module is a command, see bench/README.md."""

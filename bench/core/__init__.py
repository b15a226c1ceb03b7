"""What all benchmarks share: options, report, servers, data."""

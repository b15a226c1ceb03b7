"""Important token identification (ITF): which tokens of a stored prefix matter for this query."""

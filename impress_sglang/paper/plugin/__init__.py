"""Loading within SGLang's pass, for the query-dependent modes of the paper."""

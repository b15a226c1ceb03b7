"""Runs SGLang's model over single blocks of blends, between its passes."""

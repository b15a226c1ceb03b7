"""`impress`: what an operator asks of a running server, or of the directory of one that is not."""

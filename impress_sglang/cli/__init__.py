"""`impress`: commands for a running server, or for a directory that no server uses."""

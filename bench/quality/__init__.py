"""What precision and dropping do to answers."""

"""What few bits and few tokens do to answers."""

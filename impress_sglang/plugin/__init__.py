"""Everything that touches SGLang; no other package of this project imports it."""

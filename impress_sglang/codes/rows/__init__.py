"""KVs in few bits: predicted from the layer below, decorrelated across heads, and rounded.

A *stream* is what one tensor of a layer holds of a token, all heads joined: the keys, turned back
to position 0, or the values. A *component* is one coordinate of a stream after prediction and
transform. A *basis* is all that this takes, of all layers of a model; it is fitted once per model.
"""

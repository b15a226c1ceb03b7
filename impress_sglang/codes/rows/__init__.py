"""KVs in few bits: predicted from the layer below, decorrelated across heads, and rounded.

A *stream* is one tensor of a layer for a token, all heads joined: the keys, rotated back to
position 0, or the values. A *component* is one coordinate of a stream after prediction and
transform. A *basis* is the means, predictions and transforms of all layers of a model, fitted once.
"""

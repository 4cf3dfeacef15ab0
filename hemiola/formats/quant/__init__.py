"""Quantised number formats, one scheme per file: encode and decode in torch, bit-exact, no device code."""

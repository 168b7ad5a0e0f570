"""The regenerator: the same seeds again at high precision, over HTTP."""

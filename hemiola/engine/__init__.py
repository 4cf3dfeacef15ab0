"""The engine: schedule a mixed batch, run it, sample, post-process. It knows token ids only, no text."""

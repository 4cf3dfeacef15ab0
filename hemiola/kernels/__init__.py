"""Triton kernels and their launchers: tensors in, tensors out. They know no weights, no op table and no model."""

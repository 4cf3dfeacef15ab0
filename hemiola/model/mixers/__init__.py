"""The four mixers, one per layer letter: mamba2 (M), attention (*), mlp (-), moe (E)."""

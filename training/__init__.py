"""Scripts that make the small model hemiola ships: corpus, tokenizer, training, export. Not part of the wheel."""

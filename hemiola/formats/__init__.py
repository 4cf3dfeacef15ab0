"""Files on disk and what they mean: safetensors, index, declared and stored quantisation. CPU only, no ops."""

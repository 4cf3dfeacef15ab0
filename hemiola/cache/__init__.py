"""Caches: a pool of paged KV blocks and a pool of recurrent state slots, sized from one byte budget."""

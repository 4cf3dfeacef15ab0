"""Text on both sides of the engine: tokenizer, chat template, incremental detokenisation and stop strings.

Only fronts import this; the engine knows ids alone.
"""

from hemiola.text.output import OutputText
from hemiola.text.tokenizer import Tokenizer, read_eos_token_ids

__all__ = ["OutputText", "Tokenizer", "read_eos_token_ids"]

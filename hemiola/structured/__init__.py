"""Structured output: requests' structures as constraints on their tokens, by grammars of llguidance.

The library was chosen by measurement against xgrammar; see docs/structured.md. It is an extra (`hemiola[structured]`).
"""

from hemiola.structured.compiler import Grammars

__all__ = ["Grammars"]

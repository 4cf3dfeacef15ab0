"""Evidence that an engine's tokens are right: goldens of an oracle, the gate that holds an engine to them, and the
trace that finds where two engines depart.

It drives the ordinary LLM, or an engine over an op table that shows its calls, and reads its counters; no engine
depends on it. Whatever keeps an instrument from giving a verdict is an EvidenceError, never a pass.
"""

from hemiola.evidence.capture import Server, capture, capture_from_server, capture_from_transformers
from hemiola.evidence.compare import MODES, Figures, Mode, measure
from hemiola.evidence.gate import GateResult, Verdict, check_identity, gate
from hemiola.evidence.golden import EvidenceError, Golden, GoldenItem, Noise
from hemiola.evidence.identity import Identity, identify
from hemiola.evidence.oracle import Oracle

__all__ = [
    "MODES",
    "EvidenceError",
    "Figures",
    "GateResult",
    "Golden",
    "GoldenItem",
    "Identity",
    "Mode",
    "Noise",
    "Oracle",
    "Server",
    "Verdict",
    "capture",
    "capture_from_server",
    "capture_from_transformers",
    "check_identity",
    "gate",
    "identify",
    "measure",
]

"""Simulation: the engine's own scheduler and caches on a trace of arrivals, with a cost model in the model's place."""

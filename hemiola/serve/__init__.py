"""The server: OpenAI's HTTP API over one engine.

The engine runs in a thread of its own (`loop`); everything else, HTTP, JSON, templates, tokenisation, parsers, runs
beside it. One module per family of endpoints; `service` is what they share.
"""

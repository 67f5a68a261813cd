"""An OpenAI-compatible HTTP endpoint for an engine, as an ASGI application."""

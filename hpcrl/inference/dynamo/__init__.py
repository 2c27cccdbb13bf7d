"""NVIDIA Dynamo's KV-aware router in front of vLLM's own servers: its choice, and the HTTP front that acts on it."""

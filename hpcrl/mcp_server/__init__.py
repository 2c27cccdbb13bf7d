"""A server of the Model Context Protocol: runs, recipes and plans for coding agents (``hpcrl mcp``)."""

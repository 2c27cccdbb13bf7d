"""Extensions of vLLM: weight updates from hand-offs, and corrections that the CPU build needs."""

"""The judge of software-engineering tasks and what it runs in the sandbox."""

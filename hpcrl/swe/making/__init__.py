"""The generator of software-engineering tasks: bugs seeded into pinned packages."""

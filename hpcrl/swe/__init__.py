"""Software-engineering tasks: their records and sources, the generator, and the judge. No torch in here."""

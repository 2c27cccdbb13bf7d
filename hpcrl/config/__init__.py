"""Recipe, cluster profile and plan: schemas, loading with provenance, rules across components."""

"""This file puts what the rooms below share (`harness`, `shards`, `stub_engine`) where they can import it."""

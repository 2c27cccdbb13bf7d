"""This file puts what the folders below share (`scenes`) where they can import it."""

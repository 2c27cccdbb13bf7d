"""This file puts what the rooms below share where they can import it, as `triton_checks`."""

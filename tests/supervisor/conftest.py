"""This file puts what the folders below share (`elastic_scene`, `supervisor_testing`) where they can import it."""

"""This file puts what the rooms below share (`sharing_testing`, `warehouse_testing`) where they can import it."""

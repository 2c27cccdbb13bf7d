"""This file puts what the folders below share (`runs_testing`) where they can import it."""

"""The process that starts, watches and ends the roles of a run.

Importing this package imports nothing else: the guards start from here and must be quick.
"""

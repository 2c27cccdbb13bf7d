"""The process that starts the roles of a run and owns their fate. Importing this package imports nothing else:
the guards start from here and must be quick."""

"""Environments of a site: ``hpcrl site install`` and ``hpcrl site bundle``."""

"""The first run on a site: one command from a profile to a tiny run of all roles (`hpcrl site first-run`)."""

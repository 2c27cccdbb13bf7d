"""Workers of environments: processes of the role ``env``, on nodes of their own or on the trainer's."""

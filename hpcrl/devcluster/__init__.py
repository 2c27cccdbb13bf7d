"""A real Slurm of many virtual nodes on one machine, to try hpcrl and to test it without a cluster.

Real munged, slurmctld, slurmd (one a virtual node), optionally slurmdbd with MariaDB; fake GPUs. Everything lies in
one directory, and `hpcrl.devcluster.dev_cluster.DevCluster.down` leaves nothing of it behind.
"""

"""Dense attention of packed sequences: one interface, and what computes it on which device.

`plain` defines the results: softmax attention in chunks of queries, in plain torch, on any device. `fused` and `varlen`
are faster ways to the same numbers. `attend` chooses among them.
"""

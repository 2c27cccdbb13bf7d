"""Kernels of sparse attention: one interface, and what computes it on which device.

`reference` defines the results in plain torch, on any device. `by_triton` has programs of our own; `flash_mla` and
`cudnn_dsa` call libraries. `find` chooses among them and tries what it has chosen.
"""

"""The embedded engine: a server on the project's own model that speaks vLLM's HTTP API.

It needs no accelerator and starts in seconds, so the whole loop runs on a laptop and in tests; an orchestrator
that works against it works against vLLM without a change (``tests/inference/test_contract_*.py`` run against
either). Layers, each importing only those before it::

    params, blocks          what a request asks; the pool of KV blocks and its prefix cache
    request, rows           one request's life; what the model step needs to know of running ones, as arrays
    scheduler               which tokens of which request run in this step
    attention, sampler      paged attention over the KV cache; sampling of a whole batch
    runner                  one model step
    loading, updates        weights from a model directory or a hand-off; the update session
    engine                  the model thread
    metrics, protocol       Prometheus text; the wire format
    errors, serving, api_*  the HTTP side
    settings, process, server   ``python -m hpcrl.inference.embedded.server``
"""

"""Who provides which bytes of a version, for any sharding: compared with elements counted one by one."""

import itertools
import random

import numpy as np
import pytest
import torch

from hpcrl.modeling.blocks import HeldBlock
from hpcrl.trainer.publish.holdings import cut_regions, find_overlaps, find_runs
from hpcrl.trainer.publish.sources import Form, Source
from hpcrl.weights.format.layout import PublishedTensor
from hpcrl.weights.format.quantise import BLOCK, scale_tensor

SHAPES = {"experts": (4, 300, 140), "matrix": (270, 130), "vector": (9,), "scalar": (), "convolution": (6, 5, 4)}


def pieces(rng, size, parts):
    """Cuts of a dimension, some of them empty."""
    ends = [*sorted(rng.randint(0, size) for _ in range(parts - 1)), size]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def random_blocks(rng, ranks):
    """Each tensor is cut along one or two dimensions; ranks beyond hold what another one holds."""
    held = [{} for _ in range(ranks)]
    for name, shape in SHAPES.items():
        cuts = [[(0, size)] for size in shape]
        for dim in rng.sample(range(len(shape)), min(len(shape), rng.randint(0, 2))):
            cuts[dim] = pieces(rng, shape[dim], rng.randint(1, 2))
        blocks = [
            HeldBlock(tuple(low for low, _ in part), tuple(high for _, high in part))
            for part in itertools.product(*cuts)
        ]
        if len(blocks) > ranks:
            blocks = [HeldBlock((0,) * len(shape), shape)]
        order = rng.sample(range(ranks), ranks)
        for number, rank in enumerate(order):
            held[rank][name] = blocks[number % len(blocks)]
    return held


def sources_of(fp8):
    """Experts become tensors of their own, two of each; the other parameters are published as they are."""
    found = []
    for name, shape in SHAPES.items():
        if name == "experts":
            regions = [((expert, row, 0), (150, 140)) for expert in range(4) for row in (0, 150)]
        else:
            regions = [((0,) * len(shape), shape)]
        for low, region in regions:
            published = f"{name}.{'.'.join(map(str, low))}.weight"
            if fp8 and len(region) == 2:
                found.append(
                    Source(PublishedTensor(published, "float8_e4m3fn", region), name, low, region, Form.QUANTISED)
                )
                found.append(Source(scale_tensor(published, region), name, low, region, Form.SCALES))
            else:
                found.append(Source(PublishedTensor(published, "bfloat16", region), name, low, region, Form.PLAIN))
    return found


def elements_of(source, block):
    """Numbers of the elements of the published tensor that a rank with ``block`` can provide."""
    whole = np.zeros(SHAPES[source.parameter], bool)
    whole[tuple(map(slice, block.low, block.high))] = True
    leading = len(source.low) - len(source.shape)
    region = whole[source.low[:leading]]
    region = region[tuple(slice(low, low + size) for low, size in zip(source.low[leading:], source.shape, strict=True))]
    if source.form is Form.SCALES:
        region = region[::BLOCK, ::BLOCK]
    return set(np.flatnonzero(region).tolist())


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_each_byte_comes_from_one_rank_that_has_it(seed, fp8):
    rng = random.Random(seed)
    ranks = rng.choice([1, 2, 5, 8])
    sources, blocks = sources_of(fp8), random_blocks(rng, ranks)
    overlaps = find_overlaps(sources, blocks)
    runs = find_runs(overlaps)
    for number, source in enumerate(sources):
        width = 4 if source.form is Form.SCALES else {"bfloat16": 2}.get(source.tensor.dtype, 1)
        seen = []
        for i in np.flatnonzero(runs.tensor == number):
            start, size = int(runs.start[i]), int(runs.bytes[i])
            assert start % width == size % width == 0
            elements = range(start // width, (start + size) // width)
            assert set(elements) <= elements_of(source, blocks[runs.rank[i]][source.parameter])
            seen += elements
        assert sorted(seen) == list(range(max(1, torch.Size(source.tensor.shape).numel())))
    cut = cut_regions(sources, overlaps)
    for source in sources:
        if source.form is Form.QUANTISED:
            square = np.arange(torch.Size(source.shape).numel()).reshape(source.shape)
            tiles = [set(square[r : r + BLOCK, c : c + BLOCK].flat) for r in (0, BLOCK, 2 * BLOCK) for c in (0, BLOCK)]
            held = [elements_of(source, own[source.parameter]) for own in blocks]
            on_several = any(own & tile and not tile <= own for own in held for tile in tiles)
            assert on_several == ((source.parameter, source.low) in cut)


def test_ranks_that_hold_the_same_share_the_work():
    sources = sources_of(fp8=False)
    blocks = [{name: HeldBlock((0,) * len(shape), shape) for name, shape in SHAPES.items()} for _ in range(3)]
    runs = find_runs(find_overlaps(sources, blocks))
    assert runs.rank[np.argsort(runs.tensor)].tolist() == [number % 3 for number in range(len(sources))]

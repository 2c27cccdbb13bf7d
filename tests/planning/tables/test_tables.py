"""Measured kernel times: their files, what lies between measured shapes, and what a plan makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.errors import ConfigError, UsageError
from hpcrl.models import load_facts
from hpcrl.planning.calibration.calibration_file import Calibration, load_calibration
from hpcrl.planning.collectives import RankGroup, all_to_all
from hpcrl.planning.hardware import node_hardware
from hpcrl.planning.profile_tables import measure_kernels, table_yaml
from hpcrl.planning.report import make_outlook
from hpcrl.planning.tables.file import TableFile, load_table, shipped_tables
from hpcrl.planning.tables.lookup import Curves, Tables, gemm_roofline
from hpcrl.planning.times.engine import decode_step
from hpcrl.planning.times.rates import Rates
from hpcrl.planning.times.shapes import EngineShape
from hpcrl.planning.times.work import matrices

V3 = load_facts("DeepSeek-V3")
WIDE = EngineShape(replicas=1, nodes=9, gpus_per_node=8, expert_parallel=72, weight_dtype="fp8")


def rates(calibration: Calibration) -> Rates:
    cluster = load_cluster("h200-28").value
    assert isinstance(cluster, SlurmCluster)
    return Rates(node_hardware(cluster, Role.DECODE), calibration)


def of_site(samples: list[dict[str, float | str]], **more: object) -> TableFile:
    value = {
        "format_version": 1,
        "device": "h200",
        "source": "a test of this file",
        "hardware": {"memory_gb_s": 4800, "tflops": {"fp8": 1979}, "nvlink_gb_s": 450, "nic_gb_s": 50},
        "gemm": samples,
    }
    return TableFile.model_validate({**value, **more})


def test_shipped_tables_give_back_what_was_measured() -> None:
    files = {file.source.split()[0]: file for file in shipped_tables()}
    assert set(files) == {"DeepGEMM", "DeepEP"}
    gemm = files["DeepGEMM"]
    tables = Tables((gemm,)).for_device("h800")
    for sample in gemm.gemm:
        share = tables.share("gemm.fp8", (sample.n, sample.k), sample.m)
        assert share is not None
        least = gemm_roofline((sample.m, sample.n, sample.k), "fp8", 1979e12, 3350e9)
        assert least / share == pytest.approx(sample.seconds)
        assert 0.2 < share < 1.0
    assert Tables((gemm,)).for_device("b200").share("gemm.fp8", (4096, 7168), 64) is None
    assert Tables((gemm,)).for_device(None).kinds == {}


def test_between_measured_shapes_shares_are_interpolated_and_outside_they_stay() -> None:
    curves = Curves.of([((100.0,), 10.0, 0.2), ((100.0,), 1000.0, 0.8), ((400.0,), 10.0, 0.4)])
    assert curves.share((100.0,), 100.0) == pytest.approx(0.4)
    assert curves.share((100.0,), 1e6) == 0.8
    assert curves.share((100.0,), 1.0) == 0.2
    # half-way between two families, on logarithmic axes
    assert curves.share((200.0,), 10.0) == pytest.approx((0.2 * 0.4) ** 0.5)
    assert 0.2 < curves.share((1e6,), 10.0) < 0.4


def test_a_larger_product_never_takes_less_time() -> None:
    tables = Tables(shipped_tables()).for_device("h800")
    times = []
    for rows in (1, 8, 64, 100, 128, 500, 4096, 20_000, 100_000):
        share = tables.share("gemm.fp8", (5000.0, 6000.0), rows)
        assert share is not None
        times.append(gemm_roofline((rows, 5000.0, 6000.0), "fp8", 1979e12, 3350e9) / share)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(5 * times[-2], rel=0.01)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"format_version": 2}, "format_version"),
        ({"devise": "h200"}, "devise"),
        ({"gemm": [{"dtype": "fp8", "m": 1, "n": 1, "k": 1, "seconds": 0}]}, "seconds"),
        ({"gemm": [{"dtype": "fp4", "m": 1, "n": 1, "k": 1, "seconds": 1.0}]}, "dtype"),
        ({"gemm": [{"dtype": "fp8", "m": 1.5, "n": 1, "k": 1, "seconds": 1.0}]}, "m"),
        ({"collectives": [{"kind": "gossip", "ranks": 2, "per_node": 2, "bytes": 1, "seconds": 1.0}]}, "kind"),
        ({"hardware": {"memory_gb_s": 4800}}, "tflops"),
    ],
)
def test_a_file_is_read_strictly(tmp_path: Path, change: dict[str, object], what: str) -> None:
    good = of_site([{"dtype": "fp8", "m": 64, "n": 4096, "k": 4096, "seconds": 1e-5}])
    path = tmp_path / "table.yaml"
    path.write_text(table_yaml(good))
    assert load_table(path) == good
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=what):
        load_table(path)
    with pytest.raises(UsageError, match="hpcrl plan profile"):
        load_table(tmp_path / "none.yaml")


def linear_s(calibration: Calibration) -> float:
    seconds = decode_step(V3, WIDE, rates(calibration), batch=64, context=4000)["decode.linear"].value
    assert seconds is not None
    return seconds


def test_a_plan_takes_measured_times_where_there_are_some() -> None:
    plain = load_calibration()
    shapes = [(int(n), int(k)) for n, k, _ in matrices(V3, experts=False)]
    hardware = rates(plain).hardware

    def measured(factor: float, device: str = "h200") -> Calibration:
        samples = [
            {
                "dtype": "fp8",
                "m": 64,
                "n": n,
                "k": k,
                "seconds": factor * gemm_roofline((64, n, k), "fp8", 1979e12, hardware.gpu_memory_rate),
            }
            for n, k in shapes
        ]
        return plain.with_tables(Tables((*shipped_tables(), of_site(samples, device=device))))

    # twice the time of every product is twice the time of the step's products
    assert linear_s(measured(4.0)) == pytest.approx(2 * linear_s(measured(2.0)))
    # a table of another GPU says nothing
    assert linear_s(measured(4.0, device="b200")) == linear_s(plain)
    # without any, efficiencies count
    assert linear_s(plain.with_tables(Tables())) != linear_s(plain)


def test_a_dispatch_takes_what_was_measured_and_small_ones_keep_their_latency() -> None:
    links = rates(load_calibration()).low_latency
    sent = 128 * 8 * 7168 * (1 + 4 / 128)
    # EP 64 on H800: 173 us; adapters of the site are the same
    assert all_to_all(sent, RankGroup.inner(64, 8), links) == pytest.approx(173e-6, rel=0.01)
    small = all_to_all(sent / 64, RankGroup.inner(64, 8), links)
    assert links.hop_s * 0.9 < small < 173e-6 / 2


def test_ranges_name_measured_times_and_trust_those_of_the_site_most() -> None:
    recipe, cluster = load_recipe("glm5_swe").value, load_cluster("h200-28").value
    facts = load_facts("GLM-5")

    def cause(calibration: Calibration) -> tuple[str, float]:
        found = make_outlook(recipe, cluster, calibration, facts).ranges["trainer side"].causes
        one = next(cause for cause in found if cause.name == "tables.grouped_gemm.fp8")
        return one.origin, one.width

    shipped = load_calibration()
    own = tuple(file.model_copy(update={"device": "h200", "same_chip": ()}) for file in shipped_tables())
    published, measured = cause(shipped), cause(shipped.with_tables(Tables(own)))
    assert (published[0], measured[0]) == ("published", "measured")
    assert measured[1] < 0.5 * published[1]
    names = {cause.name for cause in make_outlook(recipe, cluster, shipped, facts).ranges["trainer side"].causes}
    assert "efficiencies.gemm_fp8" not in names


def test_profiling_needs_a_described_gpu() -> None:
    with pytest.raises(UsageError, match="describes no GPU"):
        measure_kernels(load_cluster("local").value, None, device="cuda", ranks=1, limit_s=1.0)
    with pytest.raises(UsageError, match="cuda or cpu"):
        measure_kernels(load_cluster("local").value, None, device="tpu", ranks=1, limit_s=1.0)


@pytest.mark.slow
def test_a_processor_is_really_measured(tmp_path: Path) -> None:
    """Small shapes, and collectives of two processes over gloo."""
    pytest.importorskip("torch")
    found, left_out = measure_kernels(load_cluster("local").value, None, device="cpu", ranks=2, limit_s=60.0)
    assert [what for what in left_out if "out of time" not in what] == []
    assert found.device == "cpu"
    assert {sample.kind for sample in found.collectives} == {"all_gather", "all_reduce", "all_to_all"}
    path = tmp_path / "cpu.yaml"
    path.write_text(table_yaml(found))
    tables = Tables((load_table(path),)).for_device("cpu")
    assert set(tables.kinds) >= {"gemm.float32", "grouped_gemm.float32", "attention.float32", "collectives.all_reduce"}
    peak = found.hardware
    for sample in found.gemm:
        shape = (sample.m, sample.n, sample.k)
        least = gemm_roofline(shape, "float32", peak.tflops["float32"] * 1e12, peak.memory_gb_s * 1e9)
        share = tables.share("gemm.float32", (sample.n, sample.k), sample.m)
        assert share is not None
        assert least / share == pytest.approx(sample.seconds)

"""The catalogue is data with sources: every figure that a formula can check is checked."""

from __future__ import annotations

import pytest

from costmodel.catalog import DeviceRow, InstanceRow, load_catalog, name_key, read_table
from costmodel.clusters import find_device, list_devices, list_instances
from costmodel.errors import InputError

CATALOG = load_catalog()
RAW_DEVICES = read_table("devices.yaml")
RAW_INSTANCES = read_table("instances.yaml")


@pytest.mark.parametrize("row", [row for row in RAW_DEVICES["devices"] if "check" in row], ids=lambda row: row["id"])
def test_peak_agrees_with_units_times_clock(row: dict) -> None:
    check = row["check"]
    derived = check["units"] * check["boost_ghz"] * check["flop_per_clock_per_unit"] / 1e3
    assert row["dense_tflop_per_s"][check["dtype"]] == pytest.approx(derived, rel=0.02)


@pytest.mark.parametrize("row", [row for row in RAW_DEVICES["devices"] if "measured" in row], ids=lambda row: row["id"])
def test_latency_is_the_slope_of_the_measured_all_reduces(row: dict) -> None:
    measured = row["measured"]["nccl_512mib_fp16"]
    most = max(int(name.removeprefix("all_reduce_x")) for name in measured if name.startswith("all_reduce"))
    rise = measured[f"all_reduce_x{most}"]["small_message_us"] - measured["all_reduce_x2"]["small_message_us"]
    assert row["fast_link"]["latency_us"] == pytest.approx(rise / (2 * (most - 2)), abs=0.006)


@pytest.mark.parametrize("row", [row for row in RAW_DEVICES["devices"] if "measured" in row], ids=lambda row: row["id"])
def test_measured_gemm_stays_below_the_dense_peak(row: dict) -> None:
    for dtype, rates in row["measured"]["gemm_large"].items():
        peak = row["dense_tflop_per_s"][{"fp8_block": "fp8", "nvfp4": "fp4"}.get(dtype, dtype)]
        assert rates["max_tflop_per_s"] <= peak * 1.05


def test_every_name_is_unique() -> None:
    names = [{name_key(alias) for alias in (row.device.device_id, *row.aliases)} for row in CATALOG.devices]
    names += [{name_key(row.instance_id)} for row in CATALOG.instances]
    assert sum(map(len, names)) == len(set().union(*names))


@pytest.mark.parametrize("table", [RAW_DEVICES, RAW_INSTANCES], ids=["devices", "instances"])
def test_every_row_has_a_known_source_and_confidence(table: dict) -> None:
    rows = table["devices"] if "devices" in table else table["instances"]
    for row in rows:
        assert row["sources"], row["id"]
        assert set(row["sources"]) <= set(table["sources"]), row["id"]
        assert row["confidence"] in ("A", "B", "C"), row["id"]


def test_every_default_has_a_source() -> None:
    defaults = dict(CATALOG.defaults)
    for entry in (*defaults.pop("latency_us").values(), *defaults.values()):
        assert entry["source"]


@pytest.mark.parametrize("row", CATALOG.devices, ids=lambda row: row.device.device_id)
def test_device_figures_are_plausible(row: DeviceRow) -> None:
    device = row.device
    assert device.peak("fp32") > 0
    assert device.kind == "cpu" or device.peak("fp32") <= device.peak("fp16")
    assert device.memory_bandwidth_bytes_per_s > 1e9
    assert device.memory_bytes > 7e9
    assert row.fast_link.bandwidth_bytes_per_s > 1e9
    assert row.host_link.bandwidth_bytes_per_s > 1e9
    assert 0 < row.fast_link.latency_s < 1e-4
    assert CATALOG.instance(row.host_like) is not None


@pytest.mark.parametrize("row", CATALOG.instances, ids=lambda row: row.instance_id)
def test_instance_figures_are_plausible(row: InstanceRow) -> None:
    pool = row.pool
    assert pool.network.bandwidth_bytes_per_s <= 50e9
    assert pool.host_memory_bytes >= 32 * 2**30
    assert pool.usd_per_hour is None or 0.5 < pool.usd_per_hour < 200
    assert (pool.storage_bytes > 0) == (pool.storage_read_bytes_per_s > 0)


def test_visible_memory_is_what_nvidia_smi_shows() -> None:
    assert find_device("H200").device.memory_bytes == 143771 * 2**20
    assert find_device("T4").device.memory_bytes == 15360 * 2**20


@pytest.mark.parametrize("name", ["h100", "H100-SXM5-80GB", "NVIDIA H100 80GB HBM3", "h100_sxm", "h100-sxm5-80gb"])
def test_names_ignore_case_punctuation_and_vendor(name: str) -> None:
    assert find_device(name).device.device_id == "h100-sxm5-80gb"


def test_volta_and_turing_have_no_bf16() -> None:
    assert find_device("V100").device.peak("bf16") == find_device("T4").device.peak("bf16") == 0.0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("H100", "nvswitch"),
        ("V100", "nvlink-mesh"),
        ("A100-PCIE-80GB", "pcie"),
        ("A6000", "pcie"),
        ("4090", "pcie-staged"),
        ("MI300X", "xgmi-mesh"),
    ],
)
def test_bridge_pairs_and_pcie_cards_are_not_nvswitch(name: str, kind: str) -> None:
    assert find_device(name).fast_link.kind == kind


def test_other_meanings_of_ambiguous_names_exist() -> None:
    for name, others in CATALOG.ambiguous:
        assert CATALOG.device(name) is not None
        assert all(CATALOG.device(other) not in (None, CATALOG.device(name)) for other in others)


def test_listings_and_unknown_names() -> None:
    assert len(list_devices()) == len(RAW_DEVICES["devices"])
    assert len(list_instances()) == len(RAW_INSTANCES["instances"])
    with pytest.raises(InputError, match=r"did you mean .*H100.*autoplan hardware"):
        find_device("H10O")

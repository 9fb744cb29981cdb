"""Names, files and plan data to clusters; and every malformed input to a typed error with place and remedy."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import cluster_file
from costmodel.catalog import load_catalog
from costmodel.cluster_codec import cluster_from_dict, cluster_to_dict
from costmodel.clusters import find_device
from costmodel.errors import InputError
from costmodel.hardware import Cluster, Device, NodePool
from costmodel.probe import cpu_pool, gpu_pool
from costmodel.work import DTYPE_BYTES

DOCS = Path(__file__).parents[2] / "docs"
NAMES = (
    "H100", "8xH100", "8xH100*4", "H100:8*4", "64xH100", "p5.48xlarge*4", "72xGB200", "4xGB200*2", "8xA100-40GB*2+8xV100-32GB", "2x4090", "4xCPU",
    "desktop-2x4090", "8xMI300X", "4xA100-PCIE-80GB", "lambda-gpu_4x_a6000*2", "GH200*4", "8xB300*2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "domain", "device"),
    [
        ("8xH100*4", 4, 8, 8, "h100-sxm5-80gb"),
        (" 8 x h100 * 4 ", 4, 8, 8, "h100-sxm5-80gb"),
        ("H100:8*4", 4, 8, 8, "h100-sxm5-80gb"),
        ("8xH100", 1, 8, 8, "h100-sxm5-80gb"),
        ("H100:8", 1, 8, 8, "h100-sxm5-80gb"),
        ("H100", 1, 1, 1, "h100-sxm5-80gb"),
        ("64xH100", 8, 8, 8, "h100-sxm5-80gb"),
        ("16xH100*2", 4, 8, 8, "h100-sxm5-80gb"),
        ("p5.48xlarge*4", 4, 8, 8, "h100-sxm5-80gb"),
        ("P5.48XLARGE", 1, 8, 8, "h100-sxm5-80gb"),
        ("Standard_ND128isr_NDR_GB200_v6*2", 2, 4, 8, "gb200-186gb"),
        ("Standard_ND128isr_NDR_GB200_v6*36", 36, 4, 72, "gb200-186gb"),
        ("72xGB200", 18, 4, 72, "gb200-186gb"),
        ("4xGB200", 1, 4, 4, "gb200-186gb"),
        ("3xA100-80GB", 1, 3, 3, "a100-sxm4-80gb"),
    ],
)
def test_names(text: str, nodes: int, per_node: int, domain: int, device: str) -> None:
    pool = Cluster.parse(text).pool
    assert (pool.num_nodes, pool.devices_per_node, pool.fast_domain, pool.device.device_id) == (nodes, per_node, domain, device)


@pytest.mark.parametrize("text", NAMES)
def test_a_cluster_name_parses_to_the_same_pools(text: str) -> None:
    cluster = Cluster.parse(text)
    assert Cluster.parse(cluster.name).pools == cluster.pools


@pytest.mark.parametrize("text", NAMES)
def test_plan_data_round_trips_exactly(text: str) -> None:
    cluster = Cluster.parse(text)
    written = json.dumps(cluster_to_dict(cluster), sort_keys=False)
    assert cluster_from_dict(json.loads(written)) == cluster


def test_a_device_alone_gets_its_share_of_the_usual_host() -> None:
    whole, half, instance = (Cluster.parse(text).pool for text in ("8xH100", "4xH100", "p5.48xlarge"))
    assert replace(whole, instance="p5.48xlarge") == instance
    assert half.host_memory_bytes == instance.host_memory_bytes / 2
    assert half.usd_per_hour == pytest.approx(instance.usd_per_hour / 2)
    assert half.network == instance.network


def test_a_device_without_an_instance_has_no_price_and_says_so() -> None:
    cluster = Cluster.parse("8xL40*2")
    assert cluster.pool.usd_per_hour is None
    assert any("no instance of L40" in note for note in cluster.notes)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("8xA100", r"A100 taken as a100-sxm4-40gb; for another write A100-80GB"),
        ("8xV100", r"V100 taken as v100-sxm2-16gb; for another write V100-32GB"),
        ("8xV100", r"no bf16"),
        ("64xH100", r"taken as 8 nodes of 8"),
        ("8xH100*2", r"50.0 GB/s efa per device between nodes"),
        ("lambda-gpu_4x_a6000*2", r"lists no network"),
        ("2x4090", r"peer-to-peer"),
    ],
)
def test_notes_say_what_was_assumed(text: str, note: str) -> None:
    assert any(re.search(note, line) for line in Cluster.parse(text).notes)


def test_plain_names_of_whole_hosts_need_no_note() -> None:
    assert Cluster.parse("p5.48xlarge*4").notes == ()


def test_half_the_lanes_are_half_the_bandwidth() -> None:
    narrow, wide = Cluster.parse("desktop-2x4090").pool, Cluster.parse("2x4090").pool
    assert narrow.host_link.bandwidth_bytes_per_s == wide.host_link.bandwidth_bytes_per_s / 2
    assert narrow.fast_link.bandwidth_bytes_per_s == wide.fast_link.bandwidth_bytes_per_s / 2


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "+", "8xH100+", "8xH100,,8xA100", "8x", "x8", "xH100", "*4", "8xH100*", "8xH100**4", "8xH100*4*2", "8xH100*0", "0xH100",
        "-1xH100", "8xH100*-2",
        "8xH100*two", "8xH100*1.5", "H100:", "H100:0", "H100:-4", "H100:8:2", "8xH100:8", "12xH100", "8xH100*99999999", "8xH100*9999999999999",
        "H1000", "H10O",
        "8xfoo", "p5.48xlarg", "2xp5.48xlarge", "p5.48xlarge:2", "8", "8 H100", "nvidia", "local:0", "local:-1", "local:x", "local:",
        "missing.yaml", "/no/such/file",
        "8xH100 + local:none", "a" * 5000 + ".yaml", "a\x00.yaml", "{}", "😀", None, 8, ["8xH100"],
    ],
)  # fmt: skip
def test_malformed_names_are_input_errors_with_place_and_remedy(text: object) -> None:
    with pytest.raises(InputError) as caught:
        Cluster.parse(text)
    assert caught.value.where
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "hint"), [("H10O", "H100"), ("p5.48xlarg", "p5.48xlarge"), ("8xA100-8OGB", "A100-80GB"), ("8xMI30OX", "MI300X")]
)
def test_unknown_names_offer_the_nearest(text: str, hint: str) -> None:
    with pytest.raises(InputError, match=rf"did you mean .*{hint}.*autoplan hardware"):
        Cluster.parse(text)


def example() -> str:
    """The YAML of docs/clusters.md."""
    match = re.search(r"```yaml\n(.*?)```", (DOCS / "clusters.md").read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    return match[1]


def test_the_documented_file_parses(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(example(), encoding="utf-8")
    cluster = Cluster.parse(str(path))
    first, second = cluster.pools
    assert cluster.name == "two-pools"
    assert cluster.num_devices == 40
    assert (first.network.kind, first.network.bandwidth_bytes_per_s, first.network.latency_s) == ("infiniband", 50e9, 4e-6)
    assert (first.host_memory_bytes, first.storage_bytes, first.usd_per_hour) == (2 * 2**40, 30e12, 48.5)
    assert (second.device.memory_bytes, second.device.peak("bf16"), second.device.arch) == (80 * 2**30, 312e12, "ampere")
    assert (second.fast_domain, second.fast_link.kind, second.fast_link.bandwidth_bytes_per_s) == (2, "nvlink-bridge", 300e9)
    assert second.host_link == replace(find_device("A100-PCIE-80GB").host_link, bandwidth_bytes_per_s=25e9)
    same = tmp_path / "cluster.json"
    same.write_text(json.dumps(yaml.safe_load(example())), encoding="utf-8")
    assert Cluster.parse(same) == cluster


def test_the_schema_and_the_reader_know_the_same_keys() -> None:
    schema = json.loads((DOCS / "clusters.schema.json").read_text(encoding="utf-8"))["$defs"]
    assert list(schema["pool_fields"]["properties"]) == cluster_file.POOL_KEYS
    assert list(schema["device"]["properties"]) == cluster_file.DEVICE_KEYS
    assert list(schema["link"]["properties"]) == cluster_file.LINK_KEYS
    assert list(schema["pool_fields"]["properties"]["storage"]["properties"]) == cluster_file.STORAGE_KEYS
    assert schema["device"]["properties"]["peak"]["propertyNames"]["enum"] == list(DTYPE_BYTES)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", ""), ("[1, 2]", ""), ("8xH100", ""), ("{", ""), ("a: b: c", ""), ("!!python/object/apply:os.system [ls]", ""), ("pools: []", "pools"),
        ("pools: 3", "pools"), ("pools: [3]", "pools[0]"), ("{pools: [{gpu: H100, nodes: 1}], nodes: 2}", ""), ("{gpu: H100}", ""),
        ("{nodes: 2}", ""),
        ("{gpu: H100, instance: p5.48xlarge, nodes: 1}", ""), ("{gpu: H100, nodes: 0}", "nodes"), ("{gpu: H100, nodes: -1}", "nodes"),
        ("{gpu: H100, nodes: two}", "nodes"), ("{gpu: H100, nodes: 1.5}", "nodes"), ("{gpu: H100, nodes: true}", "nodes"),
        ("{gpu: H100, nodes: 10000000000}", "nodes"),
        ("{gpu: H100, nodes: 900000, devices_per_node: 900000}", ""), ("{gpu: H100, nodes: 1, device_per_node: 8}", ""),
        ("{gpu: H1000, nodes: 1}", "gpu"),
        ("{gpu: 100, nodes: 1}", "gpu"), ("{gpu: p5.48xlarge, nodes: 1}", "gpu"), ("{instance: H100, nodes: 1}", "instance"),
        ("{instance: [], nodes: 1}", "instance"),
        ("{instance: p5.48xlarge, nodes: 1, devices_per_node: 4}", "devices_per_node"), ("{gpu: H100, nodes: 1, fast_domain: 9}", "fast_domain"),
        ("{gpu: H100, nodes: 1, fast_domain: 0}", "fast_domain"), ("{gpu: H100, nodes: 1, network: 400 Gb/s}", "network"),
        ("{gpu: H100, nodes: 1, network: {bandwidth: 400}}", "network.bandwidth"),
        ("{gpu: H100, nodes: 1, network: {bandwidth: 0 GB/s}}", "network.bandwidth"),
        ("{gpu: H100, nodes: 1, network: {bandwith: 400 Gb/s}}", "network"), ("{gpu: H100, nodes: 1, network: {kind: warp}}", "network"),
        ("{gpu: H100, nodes: 1, network: {latency: -5us}}", "network.latency"), ("{gpu: H100, nodes: 1, host_memory: 2048}", "host_memory"),
        ("{gpu: H100, nodes: 1, host_memory: 0 GB}", "host_memory"), ("{gpu: H100, nodes: 1, storage: {capacity: 1 TB}}", "storage"),
        ("{gpu: H100, nodes: 1, usd_per_hour: cheap}", "usd_per_hour"), ("{gpu: H100, nodes: 1, usd_per_hour: -1}", "usd_per_hour"),
        ("{gpu: H100, nodes: 1, usd_per_hour: .nan}", "usd_per_hour"), ("{gpu: {memory: 80GB}, nodes: 1}", "gpu"),
        ("{gpu: {name: X, memory: 80GB}, nodes: 1}", "gpu"),
        ("{gpu: {name: X, base: Y}, nodes: 1}", "gpu.base"), ("{gpu: {name: X, base: H100, memory: lots}, nodes: 1}", "gpu.memory"),
        ("{gpu: {name: X, base: H100, peak: {bf17: 1 TFLOP/s}}, nodes: 1}", "gpu.peak"),
        ("{gpu: {name: X, base: H100, peak: {}}, nodes: 1}", "gpu.peak"),
        ("{name: 3, gpu: H100, nodes: 1}", "name"), ("{gpu: H100, nodes: 0x"+"f"*5000+"}", "nodes"),
        ("{gpu: H100, nodes: 1, usd_per_hour: 1"+"0"*400+"}", "usd_per_hour"),
        ("&a [*a]", ""), ("{gpu: &a {name: X, base: *a}, nodes: 1}", ""),
        ("a: &a [x, x, x]\nb: &b [*a, *a, *a]\nname: &c [*b, *b]\nnodes: 1", ""), ("2026-01-01: 1", ""),
    ],
)  # fmt: skip
def test_malformed_files_are_input_errors_with_place_and_remedy(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        Cluster.parse(path)
    assert caught.value.where.startswith(str(path))
    assert place in caught.value.where
    assert caught.value.remedy


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"name: caf\xe9\n")
    folder = tmp_path / "folder.yaml"
    folder.mkdir()
    broken = tmp_path / "broken.json"
    broken.write_text("{'gpu': 1}", encoding="utf-8")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000, encoding="utf-8")
    for path, what in ((latin, "UTF-8"), (folder, "directory"), (broken, "JSON"), (deep, "JSON"), (tmp_path / "none.yaml", "no such file")):
        with pytest.raises(InputError, match=what):
            Cluster.parse(path)


@settings(max_examples=80, deadline=None)
@given(st.text(alphabet="0189xX*:+,-. HAaBbVvLl40pP5gG\x00/\n²", max_size=12) | st.text(max_size=6))
def test_any_text_is_a_cluster_or_an_input_error(text: str) -> None:
    try:
        cluster = Cluster.parse(text)
    except InputError as error:
        told = bool(error.where and error.remedy)
    else:
        told = Cluster.parse(cluster.name).pools == cluster.pools
    assert told


def test_misspelled_keys_offer_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("{gpu: H100, nodes: 1, device_per_node: 8}", encoding="utf-8")
    with pytest.raises(InputError, match="did you mean 'devices_per_node'"):
        Cluster.parse(path)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda data: data.pop("pools"), "cluster"),
        (lambda data: data.update(pools=[]), "cluster.pools"),
        (lambda data: data.update(pools={}), "cluster.pools"),
        (lambda data: data.update(extra=1), "cluster"),
        (lambda data: data.update(name=3), "cluster.name"),
        (lambda data: data.update(notes="text"), "cluster.notes"),
        (lambda data: data["pools"][0].pop("device"), "cluster.pools[0]"),
        (lambda data: data["pools"][0].update(num_nodes=0), "cluster.pools[0].num_nodes"),
        (lambda data: data["pools"][0].update(num_nodes=1.0), "cluster.pools[0].num_nodes"),
        (lambda data: data["pools"][0].update(host_memory_bytes="2 TiB"), "cluster.pools[0].host_memory_bytes"),
        (lambda data: data["pools"][0].update(host_memory_bytes=float("nan")), "cluster.pools[0].host_memory_bytes"),
        (lambda data: data["pools"][0].update(fast_link="nvlink"), "cluster.pools[0].fast_link"),
        (lambda data: data["pools"][0]["device"].update(peak_flops=[]), "cluster.pools[0].device.peak_flops"),
        (lambda data: data["pools"][0]["device"]["peak_flops"].update(bf16="fast"), "cluster.pools[0].device.peak_flops.bf16"),
        (lambda data: data["pools"][0]["network"].pop("latency_s"), "cluster.pools[0].network"),
    ],
)
def test_malformed_plan_data_is_an_input_error_with_place_and_remedy(change: object, place: str) -> None:
    data = json.loads(json.dumps(cluster_to_dict(Cluster.parse("8xH100*2"))))
    change(data)
    with pytest.raises(InputError) as caught:
        cluster_from_dict(data)
    assert caught.value.where == place
    assert caught.value.remedy


def test_plan_data_holds_every_field() -> None:
    data = cluster_to_dict(Cluster.parse("8xH100"))
    assert set(data) == {field.name for field in fields(Cluster)}
    assert set(data["pools"][0]) == {field.name for field in fields(NodePool)}
    assert set(data["pools"][0]["device"]) == {field.name for field in fields(Device)}


def test_local_probes_this_machine() -> None:
    cluster = Cluster.parse("local-cpu:4")
    pool = cluster.pool
    assert (cluster.name, pool.devices_per_node, pool.device.kind) == ("local-cpu:4", 4, "cpu")
    assert pool.device.memory_bytes * 4 <= pool.host_memory_bytes
    assert 1e8 < pool.device.peak("fp32") < 1e13
    assert 1e7 < pool.device.memory_bandwidth_bytes_per_s < 1e12
    assert cluster_from_dict(cluster_to_dict(cluster)) == cluster


def test_more_ranks_than_cores_share_them() -> None:
    catalog = load_catalog()
    _, two, _ = cpu_pool(catalog, 2, cores=2, host_bytes=16e9, flops_per_s=1e11, bytes_per_s=2e10)
    _, four, notes = cpu_pool(catalog, 4, cores=2, host_bytes=16e9, flops_per_s=1e11, bytes_per_s=2e10)
    assert two.device.peak("fp32") == 1e11
    assert four.device.peak("fp32") == 5e10
    assert four.device.memory_bandwidth_bytes_per_s == 1e10
    assert (two.device.memory_bytes, four.device.memory_bytes) == (8e9, 4e9)
    assert "4 CPU ranks on 2 cores" in notes[0]
    assert two.device.peak("fp16") < two.device.peak("bf16") < two.device.peak("fp32")


def ring_all_reduce_s(pool: NodePool, num_bytes: float) -> float:
    steps, link = 2 * (pool.devices_per_node - 1), pool.fast_link
    return steps * (link.latency_s + num_bytes / pool.devices_per_node / link.bandwidth_bytes_per_s)


def test_loopback_gives_back_the_measured_all_reduces() -> None:
    for ranks, small_s, large_s in ((2, 0.17e-3, 1.4e-3), (4, 0.7e-3, 8.6e-3)):
        _, pool, _ = cpu_pool(load_catalog(), ranks, cores=2, host_bytes=16e9, flops_per_s=1e11, bytes_per_s=2e10)
        assert ring_all_reduce_s(pool, 0) == pytest.approx(small_s, rel=0.1)
        assert ring_all_reduce_s(pool, 4 * 2**20) == pytest.approx(large_s, rel=0.1)


H200 = ("NVIDIA H200", "143771", "5", "16")


def test_gpus_as_nvidia_smi_lists_them() -> None:
    catalog = load_catalog()
    name, pool, _ = gpu_pool(catalog, (H200,) * 8, None, 2e12)
    assert (name, pool.devices_per_node, pool.fast_link.kind, pool.device.memory_bytes) == ("local-gpu:8", 8, "nvswitch", 143771 * 2**20)
    assert pool.host_link.bandwidth_bytes_per_s == pytest.approx(63e9, rel=0.01)
    _, narrow, _ = gpu_pool(catalog, (("NVIDIA GeForce RTX 4090", "24564", "4", "8"),) * 2, 2, 64e9)
    assert narrow.host_link.bandwidth_bytes_per_s == pytest.approx(15.75e9, rel=0.01)
    assert narrow.fast_link.bandwidth_bytes_per_s < narrow.host_link.bandwidth_bytes_per_s
    _, silent, _ = gpu_pool(catalog, (("NVIDIA H200", "[N/A]", "[N/A]", "[N/A]"),), None, 2e12)
    assert silent.device.memory_bytes == find_device("H200").device.memory_bytes


@pytest.mark.parametrize(
    ("rows", "count"),
    [((H200,), 4), ((("NVIDIA Unheard Of", "1", "5", "16"),), None), ((H200, ("NVIDIA A10", "23028", "4", "16")), None)],
)
def test_gpus_that_cannot_be_described_are_input_errors(rows: tuple, count: int | None) -> None:
    with pytest.raises(InputError) as caught:
        gpu_pool(load_catalog(), rows, count, 1e12)
    assert caught.value.remedy

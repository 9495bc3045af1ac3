"""`gare plan`: arithmetic that can be followed by hand, on constants that are kept with their commands."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from gare.bench.capacity_plan import Demand, Machines, Plan, make_plan
from gare.bench.measured_constants import CONSTANTS, constants_path, read_constants, remember_constants
from gare.cli.main import app
from gare.errors import GareError


@pytest.fixture(autouse=True)
def no_measured_constants(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan_for(videos: float, hours: float = 0.0, queries: float = 1.0, **machines: float) -> Plan:
    return make_plan(Demand(videos, hours, queries), Machines(**machines), CONSTANTS)


def value(name: str) -> float:
    return CONSTANTS[name].value


def test_short_videos_are_one_item_each_and_films_have_moments():
    assert plan_for(1000).items == 1000
    assert plan_for(1000, hours=1000 * 12 / 3600).items == 1000  # of twelve seconds
    assert plan_for(1, hours=100).items == pytest.approx(1 + value("items_an_hour") * (100 - 12 / 3600))


def test_what_is_stored_is_items_and_frames():
    made = plan_for(1e6, hours=2000, dim=256)
    frame = 2 * 256 + value("picture_bytes")
    item = value("item_bytes") - 5 * 256  # a float and a byte of each dimension
    assert made.frames == 2000 * value("frames_an_hour")
    assert made.storage_bytes == pytest.approx(made.items * item + made.frames * frame)


def test_a_wider_embedding_takes_more_of_everything_that_holds_it():
    narrow, wide = plan_for(1e7, dim=512), plan_for(1e7, dim=1024)
    assert wide.card_bytes - narrow.card_bytes == 1e7 * 28 * 512
    assert wide.search_memory_bytes - narrow.search_memory_bytes == 1e7 * 512
    assert wide.exact_gpu_shards > narrow.exact_gpu_shards
    one_shard = {"memory_gb": 1e6, "gpu_memory_gb": 1e6}
    narrow, wide = plan_for(1e7, dim=512, **one_shard), plan_for(1e7, dim=1024, **one_shard)
    ratio = wide.card_bytes / narrow.card_bytes
    assert wide.exact_gpu_ms - value("gpu_exact_fixed_ms") == pytest.approx(
        ratio * (narrow.exact_gpu_ms - value("gpu_exact_fixed_ms"))
    )


def test_a_constant_that_was_measured_with_another_width_counts_for_that_width(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gare", "bench", "exact", "--dim", "128"])
    measured = value("card_bytes") - 28 * (512 - 128)
    remember_constants({"card_bytes": measured}, where="a CPU", dim=128)
    made = make_plan(Demand(1e6, 0.0, 1.0), Machines(), read_constants())
    assert made.card_bytes == plan_for(1e6).card_bytes


def test_indexing_takes_the_hours_of_all_cores_and_nodes_share_them():
    made = plan_for(1e6, hours=1e6, cores=8, days=1)
    assert made.index_cpu_hours == pytest.approx(1e6 * value("index_core_s") / 8 / 3600)
    assert made.index_cpu_nodes == -(-made.index_cpu_hours // 24)
    assert made.index_gpu_hours <= made.index_cpu_hours
    assert made.index_gpu_nodes <= made.index_cpu_nodes


def test_a_search_takes_as_long_as_it_was_measured_and_grows_slowly():
    assert plan_for(value("search_items")).search_ms == pytest.approx(value("search_ms"))
    times = [plan_for(videos).search_ms for videos in (1e5, 1e6, 4e6, 8e6)]
    assert times == sorted(times)
    assert plan_for(1e8).search_ms == pytest.approx(plan_for(1e9).search_ms, rel=0.05)  # at most eight parts


def test_shards_hold_the_cards_and_work_at_the_same_time():
    made = plan_for(1e8, memory_gb=100, gpu_memory_gb=100)
    assert made.card_bytes == 1e8 * value("card_bytes")
    assert made.card_bytes / made.exact_gpu_shards <= 100e9
    assert made.exact_gpu_shards == made.exact_cpu_shards
    assert made.exact_gpu_ms < made.exact_cpu_ms
    more = plan_for(1e8, memory_gb=50, gpu_memory_gb=50)
    assert more.exact_cpu_ms < made.exact_cpu_ms


def test_replicas_follow_the_searches_a_second():
    assert plan_for(1e6, queries=1).replicas == 1
    assert plan_for(1e6, queries=2000).replicas >= 2 * plan_for(1e6, queries=1000).replicas - 1


def test_it_says_where_the_design_ends():
    assert plan_for(1e6).limits == ()
    assert any("recall falls" in limit for limit in plan_for(2e7).limits)
    assert len(plan_for(1e9).limits) == 3


def test_what_was_measured_here_is_kept_with_its_command(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gare", "bench", "serve", "--items", "9"])
    assert read_constants() == CONSTANTS
    remember_constants({"replica_searches": 7.0}, where="a test")
    remember_constants({"replica_cores": 3.0}, where="a test")
    known = read_constants()
    assert (known["replica_searches"].value, known["replica_cores"].value) == (7.0, 3.0)
    assert known["replica_searches"].command == "gare bench serve --items 9"
    assert known["replica_searches"].where == "this machine: a test"
    assert known["search_ms"] == CONSTANTS["search_ms"]
    assert set(json.loads(constants_path().read_text())) == {"replica_searches", "replica_cores"}


def test_constants_of_another_machine(tmp_path):
    file = tmp_path / "theirs.json"
    remember_constants({"search_ms": 5.0}, where="theirs")
    constants_path().rename(file)
    assert read_constants(file)["search_ms"].value == 5.0
    with pytest.raises(GareError, match="cannot read constants"):
        read_constants(tmp_path / "missing.json")
    file.write_text("[1]")
    with pytest.raises(GareError, match="gare bench writes such a file"):
        read_constants(file)


def test_the_command_prints_tables_and_json():
    shown = CliRunner().invoke(app, ["plan"])
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in CONSTANTS)
    assert all(constant.command in shown.stdout for constant in CONSTANTS.values())
    result = CliRunner().invoke(app, ["plan", "--json"])
    printed = json.loads(result.stdout)
    assert [plan["demand"]["videos"] for plan in printed["plans"]] == [1e6, 1e8, 1e9]
    assert printed["constants"]["search_ms"]["value"] == value("search_ms")
    result = CliRunner().invoke(app, ["plan", "--videos", "5e6", "--hours", "40000", "--json"])
    assert [plan["demand"]["hours"] for plan in json.loads(result.stdout)["plans"]] == [40000]


@pytest.mark.parametrize("option", ["--videos", "--hours", "--queries", "--memory-gb", "--days"])
@pytest.mark.parametrize("value", ["inf", "nan", "-1", "1e300", "", "many"])
def test_a_number_that_nobody_has_is_refused_by_name(option, value):
    result = CliRunner().invoke(app, ["plan", f"{option}={value}"])
    assert result.exit_code == 2
    assert option in result.stderr
    assert isinstance(result.exception, SystemExit)

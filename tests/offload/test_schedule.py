"""What is planned from the table: slots, sizes, actions, and their text."""

from __future__ import annotations

import pytest

from dzero import OffloadConfig, PrecisionConfig, ZeroConfig
from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.build_schedule import schedule_of
from dzero.offload.memory_pool import aligned
from dzero.offload.schedule import ActionKey, ActionKind, BufferSlot, OffloadAction, OffloadSchedule
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import ParamShape, UnitShape

HOST = {"grad": "host", "master": "host", "moments": "host"}
UNITS = [
    UnitShape("layers.0", (ParamShape("layers.0.weight", (64, 32), True), ParamShape("layers.0.bias", (7,), True))),
    UnitShape("root", (ParamShape("embed", (100, 32), True), ParamShape("table", (10, 32), False))),
]
LAYER, ROOT = 32 * 32 + 4, 50 * 32  # elements of the padded shards of two ranks


def planned(microbatches: int = 1, replicate: int = 1, precision: PrecisionConfig | None = None, **offload: object):  # type: ignore[no-untyped-def]
    layout = Layout.of(
        ZeroConfig(stage=2),
        precision or PrecisionConfig(),
        OffloadConfig(**(HOST | offload)),  # type: ignore[arg-type]
        replicate=replicate,
        shard=2,
        microbatches=microbatches,
    )
    return schedule_of(BufferLayout(layout, UNITS))


def sizes(schedule: OffloadSchedule) -> dict[str, int]:
    return {slot.name: slot.count for slot in schedule.slots}


def test_slots_hold_what_the_formula_says() -> None:
    """bf16: 2 for the gradient, 2 for the working copy, 4 for the master, 8 for the moments, on each rank's shards."""
    schedule = planned()
    assert sizes(schedule) == {
        "grad layers.0": 2 * LAYER,
        "master layers.0": 4 * LAYER,
        "work layers.0": 2 * LAYER,
        "moments layers.0": 8 * 1024 + 64 + 16,  # each moment of a parameter starts at a multiple of 64 bytes
        "grad root": 2 * ROOT,
        "master root": 4 * ROOT,
        "work root": 2 * ROOT,
        "moments root": 8 * ROOT,
    }
    assert schedule.host_bytes == sum(aligned(count) for count in sizes(schedule).values())


def test_fp32_parameters_send_their_master_and_need_no_other_copy() -> None:
    schedule = planned(precision=PrecisionConfig(param="fp32"))
    assert not any(name.startswith("work") for name in sizes(schedule))
    assert schedule.by_key[ActionKey(ActionKind.FETCH, "work", "root")].slots == ("master root",)


def test_small_states_take_small_slots() -> None:
    schedule = planned(precision=PrecisionConfig(master="remainder", moments="bf16"))
    assert sizes(schedule)["master root"] == 2 * ROOT
    assert sizes(schedule)["moments root"] == 4 * ROOT


def test_later_microbatches_land_beside_only_where_they_are_added_on_the_host() -> None:
    assert sizes(planned(microbatches=4))["landing 0"] == 4 * LAYER
    assert sizes(planned(microbatches=4))["landing 1"] == 4 * ROOT
    assert not any(name.startswith("landing") for name in sizes(planned(microbatches=4, replicate=2)))


def test_moments_on_the_device_pass_through_a_stage() -> None:
    schedule = planned(moments="device")
    assert sizes(schedule)["stage 1"] == 8 * ROOT
    assert "stage 1" in schedule.by_key[ActionKey(ActionKind.COMPUTE, "update", "root")].slots


def test_a_fraction_takes_the_last_parameters_first() -> None:
    schedule = planned(grad_fraction=0.5, master_fraction=0.5, moments_fraction=0.5)
    assert {name.split(" ", 1)[1] for name in sizes(schedule)} == {"root"}


def test_undo_slots_keep_to_their_budget_in_the_order_of_backward() -> None:
    every = planned(overlap="backward")
    root = aligned(sizes(every)["master root"]) + aligned(sizes(every)["moments root"])
    assert sizes(every)["undo root"] == root
    tight = sizes(planned(overlap="backward", undo_bytes=root))
    assert "undo root" in tight
    assert "undo layers.0" not in tight


def test_a_step_prints_as_its_slots_and_actions() -> None:
    assert "\n".join(planned().lines()).splitlines()[-7:] == [
        "EVICT    grad       root             grad root",
        "EVICT    grad       layers.0         grad layers.0",
        "COMPUTE  update     root             grad root, master root, work root, moments root",
        "FETCH    work       root             work root",
        "COMPUTE  update     layers.0         grad layers.0, master layers.0, work layers.0, moments layers.0",
        "FETCH    work       layers.0         work layers.0",
        "6 actions a step, 60.0 KiB of host memory",
    ]


def test_what_the_device_waits_for_does_not_queue_behind_updates() -> None:
    keys = [
        ActionKey(kind, what, "0")
        for kind in (ActionKind.LOAD, ActionKind.SPILL)
        for what in ("states", "param", "activation")
    ]
    assert [key.lane for key in keys] == ["LOAD", "LOAD param", "LOAD activation", "SPILL", "SPILL", "SPILL activation"]
    assert {ActionKey(kind, "activation", "0").lane for kind in (ActionKind.EVICT, ActionKind.FETCH)} == {
        "EVICT",
        "FETCH",
    }


def test_names_that_clash_or_do_not_exist_are_refused() -> None:
    key = ActionKey(ActionKind.EVICT, "grad", "root")
    with pytest.raises(ValueError, match=r"EVICT grad root: no slot is called \['nowhere'\]"):
        OffloadSchedule((BufferSlot("a", 1),), (OffloadAction(key, ("nowhere",)),))
    with pytest.raises(ValueError, match="one key"):
        OffloadSchedule((BufferSlot("a", 1),), (OffloadAction(key, ("a",)), OffloadAction(key, ("a",))))


MANY = [
    *(UnitShape(f"layers.{i}", (ParamShape(f"layers.{i}.weight", (64, 32 + 2 * i), True),)) for i in range(5)),
    UnitShape("root", (ParamShape("embed", (100, 32), True), ParamShape("table", (10, 32), False))),
]


def on_disk(**changes: object) -> OffloadSchedule:
    tiers = {**dict.fromkeys(("param", "grad", "master", "moments"), "disk"), **changes}
    layout = Layout.of(
        ZeroConfig(stage=3),
        PrecisionConfig(),
        OffloadConfig(**tiers),  # type: ignore[arg-type]
        replicate=1,
        shard=2,
    )
    return schedule_of(BufferLayout(layout, MANY))


def test_units_on_disk_take_turns_in_host_memory() -> None:
    """Six units and two turns, for the one in use and one ahead of it; everything once on disk."""
    found = on_disk(prefetch_units=1)
    slots = sizes(found)
    elems = [32 * (32 + 2 * i) for i in range(5)] + [50 * 32]  # of the padded shards of two ranks
    for turn, units in enumerate([[0, 2, 4], [1, 3, 5]]):  # whose turn it is
        most = max(elems[unit] for unit in units)
        assert slots[f"master turn {turn}"] == 4 * most
        assert slots[f"moments turn {turn}"] == 8 * most
        assert slots[f"grad turn {turn}"] == slots[f"work turn {turn}"] == slots[f"param turn {turn}"] == 2 * most
    host = {slot.name for slot in found.slots if slot.tier == "host"}
    kinds = ("master", "moments", "grad", "work", "param")
    assert host == {f"{kind} turn {turn}" for kind in kinds for turn in range(2)} | {"frozen turn 1"}
    for unit, count in zip(MANY, elems, strict=True):
        assert slots[f"disk master {unit.name}"] == 4 * count
        assert slots[f"disk moments {unit.name}"] == 8 * count
        assert slots[f"disk grad {unit.name}"] == slots[f"disk param {unit.name}"] == 2 * count
    assert slots["disk frozen root"] == 2 * 5 * 32
    assert found.disk_bytes == sum(aligned(slot.count) for slot in found.slots if slot.tier == "disk")


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_a_head_takes_the_turns_of_the_embedding_so_that_no_others_have_their_size(blocks: int) -> None:
    units = [
        UnitShape("embedding", (ParamShape("embedding", (256, 64), True),)),
        *(UnitShape(f"layers.{i}", (ParamShape(f"layers.{i}.weight", (64, 32), True),)) for i in range(blocks)),
        UnitShape("head", (ParamShape("head", (256, 64), True),), closes_forward=True),
        UnitShape("root", (ParamShape("norm", (64,), True),), closes_forward=True),
    ]
    layout = Layout.of(
        ZeroConfig(stage=3),
        PrecisionConfig(),
        OffloadConfig(**dict.fromkeys(("param", "grad", "master", "moments"), "disk")),  # type: ignore[arg-type]
        replicate=1,
        shard=2,
    )
    slots = sizes(schedule_of(BufferLayout(layout, units)))
    for kind, itemsize in {"grad": 2, "master": 4, "moments": 8, "work": 2, "param": 2}.items():
        turns = [slots[f"{kind} turn {turn}"] for turn in range(3)]
        assert turns[0] == itemsize * 256 * 64 // 2
        assert max(turns[1:]) == itemsize * 64 * 32 // 2


def test_what_is_loaded_is_what_is_spilled() -> None:
    for schedule in (on_disk(), on_disk(overlap="backward"), on_disk(param="device", grad="host")):
        for unit in MANY:
            load = schedule.by_key[ActionKey(ActionKind.LOAD, "states", unit.name)].slots
            update = schedule.by_key[ActionKey(ActionKind.COMPUTE, "update", unit.name)].slots
            spill = schedule.by_key[ActionKey(ActionKind.SPILL, "states", unit.name)].slots
            assert set(load) == set(spill)
            assert {slot for slot in load if not slot.startswith("disk")} <= set(update)


def test_what_is_updated_early_goes_to_spare_places_within_the_budget() -> None:
    spare = [name for name in sizes(on_disk(overlap="backward")) if name.startswith("spare")]
    assert len(spare) == 2 * len(MANY)
    assert not any(name.startswith("undo") for name in sizes(on_disk(overlap="backward")))
    tight = sizes(on_disk(overlap="backward", undo_bytes=aligned(4 * 1600) + aligned(8 * 1600)))
    assert [name for name in tight if name.startswith("spare")] == ["spare master root", "spare moments root"]


def test_fp32_parameters_on_disk_are_their_masters() -> None:
    tiers = dict.fromkeys(("param", "grad", "master", "moments"), "disk")
    layout = Layout.of(ZeroConfig(stage=3), PrecisionConfig(param="fp32"), OffloadConfig(**tiers), replicate=1, shard=2)
    schedule = schedule_of(BufferLayout(layout, MANY))
    assert not any(name.startswith("disk param") for name in sizes(schedule))
    assert "disk master root" in schedule.by_key[ActionKey(ActionKind.LOAD, "param", "root")].slots
    assert ActionKey(ActionKind.SPILL, "work", "root") not in schedule.by_key

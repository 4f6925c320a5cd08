from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint.plan import plan_conversion
from checkpoint.schema import Layout, Schema
from megatrain import engine, knobs
from megatrain.config import RunConfig, with_sets
from tests.support.runs import run_config, tiny_llama
from tiering.errors import CapacityError
from tiering.records import Record

CPU = torch.device("cpu")


def records_of(schema: Schema) -> dict[str, Record]:
    return {record.name: record for record in schema.records()}


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Schema:
    folder = tiny_llama(tmp_path_factory.mktemp("model") / "m", hidden_size=256, vocab_size=2000)
    return plan_conversion(folder, layout=Layout.FLOAT32).schema


def config_of(**changes: object) -> RunConfig:
    settings = {"train__micro_batch": 8, "memory__ram": "7MiB"} | changes
    return run_config(Path("/model"), Path("/data"), Path("/out"), **settings)


def test_a_refused_budget_names_the_settings_that_help_most_and_they_do(schema: Schema) -> None:
    config = config_of()
    with pytest.raises(CapacityError, match=r"memory\.ram is 7\.0 MiB") as refusal:
        engine.make_plan(schema, records_of(schema), config, CPU)
    lines = str(refusal.value).splitlines()
    raised = next(line for line in lines if line.startswith("raise memory.ram to "))
    enough = raised.split()[3].rstrip(";")
    engine.make_plan(schema, records_of(schema), with_sets(config, [f"memory.ram={enough}"]), CPU)
    shown = [line.split() for line in lines[lines.index(raised) + 1 :]]
    assert len(shown) == knobs.SHOWN
    for key, value, *rest in shown:
        if "too" not in rest:
            engine.make_plan(
                schema, records_of(schema), with_sets(config, [f"{key[:-1]}={value}"]), CPU
            )


def need(config: RunConfig) -> int:
    """Stand for a run in which micro-batches cost most."""
    train = config.train
    return 10 * train.micro_batch + 4 * train.accumulate + config.data.max_seq_len // 64


def test_settings_are_ranked_by_their_strongest_value_and_shown_with_the_mildest_that_fits():
    config = config_of(train__micro_batch=8, train__accumulate=8, data__max_seq_len=64)
    ladders = {
        "data.max_seq_len": ["32"],
        "train.accumulate": ["4", "2", "1"],
        "train.micro_batch": ["4", "2", "1"],
    }
    found = knobs.advise(config, ladders, need, now=need(config), limit=75)
    assert [advice.key for advice in found] == [
        "train.micro_batch",
        "train.accumulate",
        "data.max_seq_len",
    ]
    assert (found[0].value, found[0].need, found[0].fits) == ("4", 73, True)
    assert (found[1].value, found[1].need, found[1].fits) == ("1", 85, False)
    assert "still too much" in str(found[1])


def test_a_value_without_a_plan_is_no_advice():
    config = config_of()

    def need(other: RunConfig) -> int:
        if other.train.micro_batch < 8:
            raise CapacityError("no plan")
        return 1

    assert knobs.advise(config, {"train.micro_batch": ["1"]}, need, now=10, limit=1) == []

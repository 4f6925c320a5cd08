"""What is said about a run before it allocates anything."""

from __future__ import annotations

import json

import pytest

from checkpoint.schema import Tensor
from megatrain.inputs import check_length
from tests.support.model_zoo import CONFIGS
from tests.support.runs import run_config, tiny_llama, token_rows, train
from tiering.errors import RefusedError

TABLE = Tensor(name="wpe.weight", shape=(32, 8), dtype="BF16", offset=0)


@pytest.mark.parametrize(
    "config",
    [
        {"n_positions": 32},
        {"max_position_embeddings": 32},
        {"text_config": {"max_position_embeddings": 30}},  # two rows more, as in OPT
    ],
    ids=str,
)
def test_samples_longer_than_a_table_of_positions_are_refused(config):
    text = json.dumps(config).encode()
    check_length(30, text, (TABLE,))
    with pytest.raises(RefusedError, match=r"max_seq_len is 33, .*wpe\.weight\); lower it to 3"):
        check_length(33, text, (TABLE,))


def test_a_table_of_positions_is_found_before_a_byte_is_converted(tmp_path):
    import transformers

    transformers.AutoModelForCausalLM.from_config(CONFIGS["gpt2"]).save_pretrained(tmp_path / "m")
    config = run_config(tmp_path / "m", token_rows(tmp_path / "rows.jsonl"), tmp_path / "run")
    with pytest.raises(RefusedError, match="the model has learned 32 positions"):
        train(config)
    assert not config.out.exists()


def test_longer_samples_and_a_warm_up_without_end_are_told(tmp_path, caplog):
    model = tiny_llama(tmp_path / "model", max_position_embeddings=32)
    data = token_rows(tmp_path / "rows.jsonl")
    train(run_config(model, data, tmp_path / "run", train__warmup_steps=3, memory__resident=0))
    assert "longer than the 32 positions" in caplog.text
    assert "the learning rate never reaches train.lr" in caplog.text

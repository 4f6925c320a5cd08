"""What a StreamedModel promises about randomness, memory and the buffers it is given."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.model.products import BLOCK_LENGTH
from megatrain.model.streamed import OuterIn, StreamedModel, seed_device
from tests.support.model_driver import IGNORED, Driver, layer_seed
from tests.support.model_zoo import VOCABULARY, make_batch, make_plain

DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
CPU = torch.device("cpu")


def test_the_recomputed_layer_drops_what_the_forward_dropped(tmp_path: Path) -> None:
    plain = make_plain("gpt2", tmp_path, tied=True, **DROPOUT)
    driver, batch = Driver(tmp_path, plain), make_batch(3)
    driver.gradients([batch], seed=5)
    seed_at_each_layer(plain, seed=5)
    seed_device(CPU, layer_seed(5, 0, 999))
    logits = plain(input_ids=batch.input_ids, use_cache=False).logits
    functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
    norm = float(torch.cat(driver.grads).norm())
    for unit, grads in zip(driver.units, driver.grads, strict=True):
        for t in unit.tensors:
            expected = plain.get_parameter(t.name).grad
            found = grads[t.offset : t.end].view(t.shape)
            assert float((found - expected).norm()) < 1e-5 * norm, t.name


def seed_at_each_layer(plain: Any, *, seed: int) -> None:
    for index, layer in enumerate(plain.base_model.h):

        def hook(module: Any, args: Any, index: int = index) -> None:
            seed_device(CPU, layer_seed(seed, 0, index))

        layer.register_forward_pre_hook(hook)


def test_a_layer_is_a_function_of_its_seed(tmp_path: Path) -> None:
    driver = Driver(tmp_path, make_plain("gpt2", tmp_path, tied=True, **DROPOUT))
    batch = make_batch(0)
    outer = driver.outer_in([batch])
    first = driver.model.capture(batch, outer, seed=1)
    assert torch.equal(first.hidden, driver.model.capture(batch, outer, seed=1).hidden)
    assert not torch.equal(first.hidden, driver.model.capture(batch, outer, seed=2).hidden)

    def forward(seed: int) -> torch.Tensor:
        return driver.model.forward_layer(
            0, driver.weights[1], first.hidden, first.calls[0], seed=seed
        )

    assert torch.equal(forward(7), forward(7))
    assert not torch.equal(forward(7), forward(8))


def test_gradients_are_added_to_what_the_accumulator_holds(tmp_path: Path) -> None:
    driver = Driver(tmp_path, make_plain("llama", tmp_path, tied=False))
    batch = make_batch(0)
    captured = driver.model.capture(batch, driver.outer_in([batch]), seed=0)

    def backward(grads: torch.Tensor) -> torch.Tensor:
        ones = torch.ones_like(captured.hidden)
        driver.model.backward_layer(
            0, driver.weights[1], captured.hidden, captured.calls[0], ones, grads, seed=0
        )
        return grads

    once = backward(torch.zeros(driver.units[1].length))
    torch.testing.assert_close(backward(once.clone()), once + once)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_accumulators_are_not_held_after_a_call(grad_dtype: torch.dtype, tmp_path: Path) -> None:
    plain = make_plain("llama", tmp_path, tied=True)
    driver = Driver(tmp_path, plain, dtype=torch.bfloat16, grad_dtype=grad_dtype)
    driver.gradients([make_batch(0)])
    held = [StorageWeakRef(grads.untyped_storage()) for grads in driver.grads]
    driver.grads = []
    gc.collect()
    assert all(storage.expired() for storage in held)


def test_weights_are_not_held_after_a_release(tmp_path: Path) -> None:
    plain = make_plain("llama", tmp_path, tied=True)
    driver = Driver(tmp_path, plain, dtype=torch.bfloat16)
    driver.gradients([make_batch(0)])
    held = [StorageWeakRef(weights.untyped_storage()) for weights in driver.weights]
    driver.model.release()
    driver.weights = []
    gc.collect()
    assert all(storage.expired() for storage in held)
    assert all(p.is_meta and p.grad is None for p in driver.model._template.model.parameters())


def test_a_view_of_an_old_buffer_is_never_taken_for_a_new_one(tmp_path: Path) -> None:
    driver = Driver(tmp_path, make_plain("llama", tmp_path, tied=True))
    batch = make_batch(0)
    captured = driver.model.capture(batch, driver.outer_in([batch]), seed=0)

    def forward(weights: torch.Tensor) -> torch.Tensor:
        return driver.model.forward_layer(0, weights, captured.hidden, captured.calls[0], seed=0)

    buffers = [driver.weights[1] * scale for scale in range(1, 5)]
    outputs = [forward(buffer) for buffer in [*buffers, *buffers]]
    for output, buffer in zip(outputs, [*buffers, *buffers], strict=True):
        driver.model.release()
        assert torch.equal(output, forward(buffer))


def test_only_the_window_s_rows_of_the_table_are_needed_and_all_of_them(tmp_path: Path) -> None:
    driver = Driver(tmp_path, make_plain("llama", tmp_path, tied=True))
    batch = make_batch(0)
    outer = driver.outer_in([batch])
    assert len(outer.token_ids) < VOCABULARY
    short = OuterIn(token_ids=outer.token_ids[1:], rows=outer.rows[1:], rest=outer.rest)
    with pytest.raises(RuntimeError, match="the row of a token was not gathered"):
        driver.model.capture(batch, short, seed=0)


def test_the_padding_token_s_row_gets_no_gradient(tmp_path: Path) -> None:
    driver = Driver(tmp_path, make_plain("llama", tmp_path, tied=False))
    batch = make_batch(0)
    assert 0 in batch.input_ids
    driver.gradients([batch])
    rows = driver.table(driver.grads)
    assert not rows[0].any()
    assert rows[batch.input_ids[:, :-1].unique()[1:]].any(dim=1).all()


def test_without_the_padding_token_every_row_gets_a_gradient(tmp_path: Path) -> None:
    driver = Driver(tmp_path, make_plain("llama", tmp_path, tied=False))
    batch = make_batch(0)
    batch.input_ids.clamp_(min=1)
    driver.gradients([batch])
    assert driver.table(driver.grads)[batch.input_ids[:, :-1].unique()].any(dim=1).all()


def test_no_gradient_stays_on_a_parameter(tmp_path: Path) -> None:
    driver = Driver(tmp_path, make_plain("llama", tmp_path, tied=False))
    batch = make_batch(0)
    driver.gradients([batch])
    before = [grads.clone() for grads in driver.grads]
    driver.grads = [torch.full_like(grads, 7.0) for grads in driver.grads]
    driver.gradients([batch])  # into other accumulators
    for one, other in zip(before, driver.grads, strict=True):
        torch.testing.assert_close(one, other)


def test_unused_positions_and_untargeted_chunks_cost_nothing(tmp_path: Path) -> None:
    driver = Driver(tmp_path, make_plain("llama", tmp_path, tied=False), loss_chunk=8)
    hidden = torch.randn(2, 24, 32)
    targets = torch.full((2, 24), IGNORED)
    targets[1, 3] = 5
    result, calls = run_head(driver.model, driver, hidden, targets)
    assert calls == 1
    assert result.grad_hidden[1, 3].any()
    assert int(result.grad_hidden.flatten(0, 1).any(dim=1).sum()) == 1
    nothing, calls = run_head(driver.model, driver, hidden, torch.full((2, 24), IGNORED))
    assert (calls, float(nothing.loss), nothing.touched) == (0, 0.0, frozenset())


def run_head(
    model: StreamedModel, driver: Driver, hidden: torch.Tensor, targets: torch.Tensor
) -> tuple[Any, int]:
    seen = []
    head = model._template.model.lm_head
    handle = head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    result = model.head(
        driver.weights[-1],
        None,
        hidden,
        targets,
        target_count=1,
        grads=driver.grads[-1],
        table_grads=None,
    )
    handle.remove()
    return result, len(seen)


class LargeStorages(TorchDispatchMode):
    """The most bytes that storages of at least ``nbytes``, made by operations, had together."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.peak_nbytes = nbytes, 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self._note(output.untyped_storage())
        return output

    def _note(self, storage: torch.UntypedStorage) -> None:
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        if storage.nbytes() >= self.nbytes:
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        alive = sum(nbytes for _, nbytes in self._alive.values())
        self.peak_nbytes = max(self.peak_nbytes, alive)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_head_never_holds_more_than_a_chunk_s_logits_and_their_gradient(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    words, chunk = 20_000, 128
    plain = make_plain("llama", tmp_path, tied=False, vocab_size=words)
    driver = Driver(tmp_path, plain, dtype=dtype, loss_chunk=chunk)
    hidden, targets = torch.randn(4, 64, 32, dtype=dtype), torch.zeros(4, 64, dtype=torch.int64)
    with LargeStorages(words * chunk * dtype.itemsize) as storages:
        run_head(driver.model, driver, hidden, targets)
    block = BLOCK_LENGTH * torch.float32.itemsize  # of the head's weights, widened for a product
    assert 0 < storages.peak_nbytes <= 2 * words * chunk * torch.float32.itemsize + block


def test_many_small_gradients_are_not_lost_in_a_float32_accumulator(tmp_path: Path) -> None:
    plain = make_plain("llama", tmp_path, tied=False)
    driver = Driver(tmp_path, plain, dtype=torch.bfloat16)
    hidden, targets = torch.randn(1, 8, 32).bfloat16(), torch.full((1, 8), 7)
    run_head(driver.model, driver, hidden, targets)
    once = driver.grads[-1].clone()
    for _ in range(299):
        run_head(driver.model, driver, hidden, targets)
    torch.testing.assert_close(driver.grads[-1], once * 300, rtol=1e-4, atol=1e-4)

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from megatrain.optimizer import AdamStep, CpuAdam, remove_stale_lock
from megatrain.shape import PIECE

BETAS, EPS = (0.9, 0.999), 1e-8


@pytest.fixture(scope="module")
def adam():
    with CpuAdam(betas=BETAS, eps=EPS) as made:
        yield made


def state(n: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(n)
    zeros = torch.zeros(n)
    return {"master": torch.randn(n), "exp_avg": zeros.clone(), "exp_avg_sq": zeros.clone()}


def constants(t: int) -> AdamStep:
    return AdamStep.at(t, lr=1e-2, betas=BETAS, eps=EPS, weight_decay=0.1)


def test_updates_equal_torch_adamw(adam):
    ours = state(5000)
    theirs = torch.nn.Parameter(ours["master"].clone())
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=BETAS, eps=EPS, weight_decay=0.1)
    for t in range(1, 31):
        grad = torch.randn(5000, generator=torch.Generator().manual_seed(t))
        theirs.grad = grad.clone()
        reference.step()
        adam.update(**ours, grad=grad, step=constants(t))
    torch.testing.assert_close(ours["master"], theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [200_003, 3 * PIECE + 17, 1000])
@pytest.mark.parametrize("cut", [PIECE, 16, 4096])
def test_pieces_cut_at_multiples_of_16_equal_the_whole_in_every_bit(adam, n, cut):
    cut = max(cut, n // 50 // 16 * 16)
    whole, parts = state(n), state(n)
    for t in range(1, 4):
        grad = torch.randn(n, generator=torch.Generator().manual_seed(t))
        adam.update(**whole, grad=grad, step=constants(t))
        for at in range(0, n, cut):
            piece = {name: x[at : at + cut] for name, x in parts.items()}
            adam.update(**piece, grad=grad[at : at + cut].clone(), step=constants(t))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_restarted_kernel_goes_on_without_a_difference(adam):
    steady, broken = state(4096), state(4096)
    for t in range(1, 211):
        grad = torch.randn(4096, generator=torch.Generator().manual_seed(t))
        adam.update(**steady, grad=grad, step=constants(t))
        if t <= 200:
            adam.update(**broken, grad=grad, step=constants(t))
        else:  # as a resumed run does: a kernel that has never seen a step
            with CpuAdam(betas=BETAS, eps=EPS) as fresh:
                fresh.update(**broken, grad=grad, step=constants(t))
    assert all(torch.equal(steady[name], broken[name]) for name in steady)


def test_the_lock_of_a_killed_build_is_removed(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    old = time.time() - 60
    os.utime(lock, (old, old))
    remove_stale_lock(tmp_path)
    assert not lock.exists()


def test_the_lock_of_a_running_build_stays(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    old = time.time() - 60
    os.utime(lock, (old, old))
    compiler = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], cwd=tmp_path, stdin=subprocess.PIPE
    )
    try:
        remove_stale_lock(tmp_path)
        assert lock.exists()
    finally:
        compiler.communicate()

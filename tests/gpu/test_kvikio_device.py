"""Drive to device memory and back by the real kvikio; skipped where there is no GPU."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from tests.support.libcuda import require_kvikio
from tiering.backends.probe import probe
from tiering.errors import StorageError
from tiering.records import ALIGNMENT
from tiering.testing import BackendConformance, aligned_buffer, wait_for

MIB = 1 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def make_kvikio(folder: Path):
    require_kvikio()
    if not probe(folder).direct:
        pytest.skip(f"{folder}: no direct I/O")
    from tiering.backends.kvikio import KvikioBackend

    return KvikioBackend("test", writable=True)


class TestHostMemoryBesideADevice(BackendConformance):
    def make_backend(self, folder: Path):
        return make_kvikio(folder)


def on_device(data: memoryview) -> torch.Tensor:
    found = torch.frombuffer(data, dtype=torch.uint8).cuda()
    torch.cuda.synchronize()
    return found


# Below and above kvikio's threshold for GDS and the size of its pieces.
@pytest.mark.parametrize("nbytes", [ALIGNMENT, 5 * ALIGNMENT, 8 * MIB, 40 * MIB + ALIGNMENT])
@pytest.mark.parametrize("start", [0, 512, 3])
def test_bytes_go_from_drive_to_device_and_back(tmp_path: Path, nbytes: int, start: int) -> None:
    content = aligned_buffer(nbytes, seed=nbytes)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(content)
    target.write_bytes(bytes(nbytes))
    backend = make_kvikio(tmp_path)
    memory = torch.zeros(start + nbytes + 4096, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    part = memory[start : start + nbytes]
    assert wait_for(backend.read_device(source, 0, part)) == nbytes
    assert torch.equal(part.cpu(), torch.frombuffer(content, dtype=torch.uint8))
    assert not memory[start + nbytes :].any()
    assert wait_for(backend.write_device(target, 0, part)) == nbytes
    said = backend.path_taken()
    backend.close()
    assert target.read_bytes() == content
    assert "kvikio 2" in said
    if "compatibility mode" in said:
        assert "so far 0 by cuFile" in said


def test_a_write_from_a_device_changes_only_its_own_range(tmp_path: Path) -> None:
    before, data = aligned_buffer(8 * MIB, seed=1), aligned_buffer(2 * MIB, seed=2)
    path = tmp_path / "file"
    path.write_bytes(before)
    backend = make_kvikio(tmp_path)
    wait_for(backend.write_device(path, MIB, on_device(data)))
    backend.close()
    after = path.read_bytes()
    assert after[MIB : 3 * MIB] == data
    assert after[:MIB] + after[3 * MIB :] == bytes(before[:MIB]) + bytes(before[3 * MIB :])


def test_what_is_short_or_missing_is_an_error_and_never_zeros(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(aligned_buffer(3 * MIB, seed=1))
    backend = make_kvikio(tmp_path)
    memory = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with pytest.raises(StorageError, match="ended early") as early:
        wait_for(backend.read_device(path, 0, memory))
    with pytest.raises(StorageError, match="absent") as absent:
        wait_for(backend.read_device(tmp_path / "absent", 0, memory))
    backend.close()
    assert (early.value.errno, early.value.offset, early.value.wanted) == (0, 3 * MIB, 4 * MIB)
    assert absent.value.errno == errno.ENOENT

"""What is written beside stores, recorded: exports, and the files of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from checkpoint.formats.hf_writer import OutputShard, OutputTensor, new_folder, write_folder
from checkpoint.verify import verify
from megatrain.metrics import MetricsLog
from megatrain.stores import convert_model, is_store, read_run_file, store_path, write_run_file
from megatrain.trainer import Stop
from tests.support.power_cut import Recording
from tests.support.power_cut_scenarios import Allowed, Scenario, Workplace, allowed
from tests.support.runs import Quiet, run_config, tiny_llama, token_rows

OLD = {"config.json": b"{}", "model.safetensors": b"old" * 400, "code/old.py": b"old"}
TENSORS = (
    OutputTensor(name="a", dtype="F32", shape=(300,)),
    OutputTensor(name="b", dtype="U8", shape=(3,)),
)
SHARDS = tuple(
    OutputShard(file=f"model-0000{n}-of-00002.safetensors", tensors=(tensor,))
    for n, tensor in enumerate(TENSORS, start=1)
)
SIDE_FILES = {"config.json": b'{"a": 1}', "code/y.py": b"y" * 600, "code/deep/x.py": b"x"}


Contents = frozenset[tuple[str, bytes]] | None


def contents(folder: Path) -> Contents:
    """Return all files below a folder, or None if there is no folder."""
    if not folder.exists():
        return None
    files = (path for path in folder.rglob("*") if path.is_file())
    return frozenset((str(path.relative_to(folder)), path.read_bytes()) for path in files)


def exporting(place: Workplace, *, over: bool) -> Scenario:
    """Write a model's folder, into two new folders or over another model."""
    out = place.folder / "model" if over else place.folder / "new" / "er" / "model"
    if over:
        for name, data in OLD.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(data)

    def export(target: Path) -> None:
        with new_folder(target, overwrite=True, nbytes=0) as folder:
            write_folder(folder, SHARDS, SIDE_FILES, lambda t: [memoryview(b"n" * t.nbytes)])

    with tempfile.TemporaryDirectory() as scratch:
        export(Path(scratch) / "model")
        old, new = contents(out), contents(Path(scratch) / "model")

    def act(recording: Recording) -> None:
        recording.allow(allowed(old, new))
        export(out)
        recording.allow(allowed(new))

    def check(outcomes: Allowed) -> None:
        found = contents(out)
        assert found in outcomes, f"{found and sorted(name for name, _ in found)}"

    return Scenario(folder=place.folder, begin=allowed(old), act=act, check=check)


def run_file(place: Workplace) -> Scenario:
    """Leave the settings of a run in a new folder, and others after that."""
    out = place.folder / "runs" / "one"
    configs = [run_config(Path("model"), Path("data"), out, train__steps=n) for n in (1, 2)]

    def act(recording: Recording) -> None:
        write_run_file(configs[0])
        recording.allow(allowed(1, 2))
        write_run_file(configs[1])
        recording.allow(allowed(2))

    def check(steps: Allowed) -> None:
        exists = (out / "run.json").exists()
        found = read_run_file(out).train.steps if exists else None
        assert found in steps, f"{found}"

    return Scenario(folder=place.folder, begin=allowed(None, 1), act=act, check=check)


def metrics(place: Workplace) -> Scenario:
    """Log steps, make them durable, and take some back."""
    log = MetricsLog(place.folder / "run" / "metrics.jsonl")

    def act(recording: Recording) -> None:
        log.append({"step": 1, "loss": 1.5})
        log.append({"step": 2}, durable=True)
        recording.allow(allowed((1, 2), (1, 2, 3)))
        log.append({"step": 3})
        recording.allow(allowed((1, 2), (1, 2, 3), (1,)))
        log.truncate_after(1)
        recording.allow(allowed((1,)))

    def check(outcomes: Allowed) -> None:
        found = tuple(row["step"] for row in log.read())
        assert found in outcomes, f"{found}"

    begin = allowed((), (1,), (1, 2), (2,))
    return Scenario(folder=place.folder, begin=begin, act=act, check=check)


def conversion(place: Workplace) -> Scenario:
    """Make the store of a run, on two drives, of a model's folder."""
    model = tiny_llama(place.scratch / "model", num_hidden_layers=1)
    data = token_rows(place.scratch / "rows.jsonl")
    drives = [str(place.drives[name]) for name in "pq"]
    config = run_config(model, data, place.folder / "runs" / "one", store__drives=drives)
    store = store_path(config)

    def convert() -> None:
        inputs = convert_model(config, Quiet(), Stop())
        if inputs is not None:
            inputs.dataset.close()

    def act(recording: Recording) -> None:
        convert()
        recording.allow(allowed(0))

    def check(outcomes: Allowed) -> None:
        if None not in outcomes:
            assert is_store(store), "there is no store any more"
        convert()  # if it is there, it is known to be that of the model
        found = verify(store, deep=True).findings
        assert not found, f"{found}"
        place.assert_clean("pq", store)

    return Scenario(folder=place.folder, begin=allowed(None, 0), act=act, check=check)


BESIDE_STORES: Mapping[str, Callable[[Workplace], Scenario]] = {
    "convert": conversion,
    "export": lambda place: exporting(place, over=False),
    "export over another": lambda place: exporting(place, over=True),
    "run file": run_file,
    "metrics": metrics,
}

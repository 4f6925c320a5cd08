from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.config import RunConfig, load_run, parse_duration, parse_size, with_sets
from tiering.errors import UsageError

MINIMAL = "model: m\nout: runs/x\ndata: {train: train.jsonl}\n"


@pytest.fixture
def run_file(tmp_path: Path):
    def write(text: str = MINIMAL) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def message(path: Path, *sets: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_run(path, sets)
    return str(caught.value).replace(f"{path}", "run.yaml")


def test_defaults_are_those_of_the_documentation(run_file):
    config = load_run(run_file())
    assert (config.train.steps, config.train.samples_per_step) == (100, 8)
    assert (config.train.lr, config.train.schedule) == (1e-5, "cosine")
    assert (config.memory.ram, config.store.retain) == (8 << 30, 1)
    assert config.store.max_lost == 1800.0


def test_a_configuration_survives_json(run_file):
    sets = ["store.drives=[/a, /b]", "train.max_grad_norm=null", "memory.slab=4MiB"]
    config = load_run(run_file(), sets)
    assert RunConfig.from_json(config.to_json()) == config


def test_paths_are_absolute_so_that_a_run_resumes_from_anywhere(run_file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    config = load_run(run_file(), ["model=~/models/a"])
    assert config.model == Path("/home/someone/models/a")
    assert config.out == tmp_path / "runs/x"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8GiB", 8 << 30), ("1.5 MiB", 3 << 19), ("2gb", 2 * 10**9), ("512B", 512), (77, 77)],
)
def test_sizes(text: object, nbytes: int):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["8G", "GiB", "", "-1GiB", "8 GiB extra", "1e3MiB", "8"])
def test_a_size_without_a_clear_unit_is_refused(text: str):
    with pytest.raises(ValueError, match="write a size like 8GiB or 256MiB"):
        parse_size(text)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30min", 1800), ("1.5h", 5400)])
def test_durations(text: str, seconds: float):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "'1e-5'", '"1.e-5"', "0.00001", "1E-5"])
def test_however_a_small_number_is_written_it_is_a_number(run_file, text: str):
    assert load_run(run_file(MINIMAL + f"train: {{lr: {text}}}\n")).train.lr == 1e-5
    assert load_run(run_file(), [f"train.lr={text}"]).train.lr == 1e-5


@pytest.mark.parametrize("off", ["0", "0.0", "null", ""])
def test_clipping_is_turned_off_by_null_and_by_zero(run_file, off: str):
    assert load_run(run_file(), [f"train.max_grad_norm={off}"]).train.max_grad_norm is None


@pytest.mark.parametrize(
    ("text", "line", "unknown", "known"),
    [
        ("train: {step: 3}", 4, "train.step", "train.steps"),
        ("train:\n  lr: 1\n  learning_rate: 3", 6, "train.learning_rate", "train.lr"),
        ("memory: {rams: 1GiB}", 4, "memory.rams", "memory.ram"),
        ("stor: {}", 4, "stor", "store"),
        ("batch_size: 8", 4, "batch_size", "train.micro_batch"),
        ("commit_every: 8", 4, "commit_every", "store.commit_every"),
    ],
)
def test_an_unknown_key_names_its_line_and_the_nearest_one(run_file, text, line, unknown, known):
    expected = f"run.yaml:{line}: {unknown} is an unknown key; the nearest known key is {known}"
    assert message(run_file(MINIMAL + text + "\n")) == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("train.steps=ten", "train.steps must be a valid integer (found 'ten')"),
        ("train.steps='3'", "train.steps must be a valid integer (found '3')"),
        ("train.steps=true", "train.steps must be a valid integer (found True)"),
        ("train.steps=2.5", "train.steps must be a valid integer (found 2.5)"),
        ("train.steps=0", "train.steps must be greater than 0 (found 0)"),
        ("train.lr=fast", "train.lr is wrong: 'fast' is not a number"),
        ("train.lr=.nan", "train.lr must be a finite number (found nan)"),
        ("train.lr=-1", "train.lr must be greater than or equal to 0 (found -1)"),
        ("train.betas=[0.9, 1]", "train.betas must be less than 1 (found 1)"),
        ("train.no_decay=norm", "train.no_decay must be a list (found 'norm')"),
        ("data.shuffle='no'", "data.shuffle must be a valid boolean (found 'no')"),
        ("data.train=", "data.train is wrong: None is not a path"),
        ("memory=8GiB", "memory is a section: expected keys under it, found '8GiB'"),
        ("memory.ram=8G", "memory.ram is wrong: '8G' is not understood; write a size like 8GiB"),
        ("memory.ram=0", "memory.ram must be greater than 0 (found 0)"),
        ("store.max_lost=soon", "store.max_lost is wrong: 'soon' is not understood; write a time"),
        ("store.layout=split", "store.layout is wrong: layout split is not built yet; use fp32"),
        ("store.commit_every=0", "store.commit_every must be 'auto' (found 0) or must be greater"),
    ],
)
def test_a_wrong_value_is_one_clear_line(run_file, setting: str, expected: str):
    found = message(run_file(), setting)
    assert found.startswith(f"--set {setting}: {expected}")
    assert "\n" not in found


@pytest.mark.parametrize("missing", ["model", "out", "data"])
def test_a_key_that_must_be_there_is_named(run_file, missing: str):
    lines = [line for line in MINIMAL.splitlines(True) if not line.startswith(missing)]
    assert message(run_file("".join(lines))) == f"run.yaml: {missing} is missing"


def test_every_mistake_is_told_at_once(run_file):
    text = message(run_file(MINIMAL + "train: {steps: 0}\nmemory: {rom: 1}\n"))
    assert [line.partition(": ")[0] for line in text.splitlines()] == ["run.yaml:4", "run.yaml:5"]


def test_a_key_that_stands_twice_is_refused(run_file):
    text = MINIMAL + "train:\n  lr: 1\n  steps: 5\n  lr: 2\n"
    assert message(run_file(text)) == "run.yaml:7: train.lr stands twice, first in line 5"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml is not a run file: expected keys such as model, data and out"),
        ("- model\n", "run.yaml is not a run file: expected keys such as model, data and out"),
        ("model: m\n\tout: x\n", "run.yaml:2: not valid YAML: found character '\\t'"),
        ("model: !!python/name:os.system\n", "run.yaml:1: not valid YAML: could not determine"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: not valid YAML: but found another document"),
    ],
)
def test_what_is_no_run_file_is_refused(run_file, text: str, expected: str):
    assert message(run_file(text)).startswith(expected)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    expected = "cannot read run file run.yaml: No such file or directory"
    assert message(tmp_path / "gone.yaml") == expected


def test_set_wins_over_the_file_and_makes_sections(run_file):
    config = load_run(run_file(MINIMAL + "train: {steps: 5}\n"), ["train.steps=7", "memory.ram=9"])
    assert (config.train.steps, config.memory.ram) == (7, 9)


def test_a_stored_configuration_takes_sets_with_the_same_checks(run_file):
    config = load_run(run_file(), ["train.steps=5"])
    assert with_sets(config, []) == config
    assert with_sets(config, ["train.lr=1e-3"]) == load_run(
        run_file(), ["train.steps=5", "train.lr=1e-3"]
    )
    with pytest.raises(UsageError, match=r"--set train.lrs=1: train.lrs is an unknown key"):
        with_sets(config, ["train.lrs=1"])


def test_an_unknown_section_that_was_set_is_traced_to_its_set(run_file):
    assert message(run_file(), "trian.lr=1").startswith("--set trian.lr=1: trian is an unknown key")


@pytest.mark.parametrize("text", ["train.lr", "=3", ".lr=3", "train..lr=3"])
def test_set_without_key_and_value_is_refused(run_file, text: str):
    assert message(run_file(), text) == f"--set {text}: expected key=value, as in train.lr=1e-5"


@pytest.mark.parametrize(
    ("name", "decays"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.embed_tokens.weight", True),
        ("model.layers.0.input_layernorm.weight", False),
        ("model.norm.weight", False),
        ("transformer.h.0.ln_1.weight", False),
        ("transformer.h.0.mlp.c_fc.bias", False),
    ],
)
def test_norms_and_biases_do_not_decay_by_default(run_file, name: str, decays: bool):
    assert load_run(run_file()).train.decays(name) is decays


def test_importing_the_configuration_loads_nothing_heavy():
    code = (
        "import sys, megatrain.config, megatrain.lr_schedule, megatrain.metrics;"
        "print(sorted({'torch', 'transformers', 'zarr', 'numpy', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
